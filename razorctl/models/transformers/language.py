"""Language models of transformers: causal ones, and masked ones such as BERT's."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.models import Model, Progress, Rows, tokens
from razorctl.models.transformers import classification
from razorctl.models.transformers.pretrained_files import PretrainedFiles
from razorctl.models.transformers.writing import Writer, writer
from razorctl.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = 1024  # of a text, if the model takes as many


def _auto(task: Task) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForCausalLM if task == "causal-lm" else AutoModelForMaskedLM


def language_model(
    pretrained: PretrainedFiles, task: Task, summary: str, defaults: Mapping[str, Any]
) -> Model:
    """A pretrained model that learns to predict the next token, or masked ones."""

    def bare(_: int, input_size: int | None = None) -> "nn.Module":
        pretrained.length(input_size, TOKENS)
        return pretrained.bare(_auto(task))

    def build(_: int, input_size: int | None = None) -> "nn.Module":
        pretrained.length(input_size, TOKENS)
        return pretrained.built(_auto(task))

    def example(
        _: "nn.Module", batch_size: int, input_size: int | None = None
    ) -> "dict[str, Tensor]":
        import torch

        size = batch_size, pretrained.length(input_size, TOKENS)
        return {"input_ids": torch.zeros(size, dtype=torch.long)}

    def transform(_: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
        if task == "causal-lm":
            size = pretrained.length(input_size, TOKENS)
            return partial(tokens.causal_inputs, pretrained.tokenizer, tokens=size)
        return partial(tokens.masked_inputs, pretrained.tokenizer, True)

    def trained(_: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
        return partial(tokens.masked_inputs, pretrained.tokenizer, False)

    def sequences(rows: Any, input_size: int | None, progress: Progress) -> Any:
        make = (
            tokens.conversation_tokens if "messages" in rows.column_names else tokens.token_blocks
        )
        return make(rows, pretrained.tokenizer, pretrained.length(input_size, TOKENS), progress)

    def writing(model: "nn.Module") -> Writer:
        return writer(model, pretrained.tokenizer, pretrained.longest)

    return Model(
        name=pretrained.name,
        summary=summary,
        modality="text",
        task=task,
        build=build,
        bare=bare,
        transform=transform,
        example=example,
        logits=classification.logits,
        save=partial(classification.save, pretrained, TOKENS, task),
        load=partial(load, task),
        defaults=defaults,
        trained=None if task == "causal-lm" else trained,
        sequences=sequences,
        writer=writing if task == "causal-lm" else None,
    )


def load(
    task: Task, folder: Path, input_size: int | None = None
) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    saved = language_model(PretrainedFiles(str(folder), folder), task, "", {})
    model = saved.build(0, None)
    return model, saved.transform(model, input_size)
