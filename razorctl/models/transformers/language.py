"""Language models of transformers: causal ones, and masked ones such as BERT's."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import Task
from razorctl.models import Model, Progress, RenderedChat, Rows, chats, tokens
from razorctl.models.transformers import classification
from razorctl.models.transformers.pretrained_files import (
    TOKENIZER_CONFIG,
    PretrainedFiles,
    has_argument,
)
from razorctl.models.transformers.writing import Writer, writer

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = 1024  # of a text, if the model takes as many
# Functions of transformers that compute masks from positions.
MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
# Models that compute masks or positions without using the given positions, as runs have shown.
CROSSING = frozenset(("biogpt", "gpt_oss", "opt", "xglm"))
ATTENTIONS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))


def _auto(task: Task) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForCausalLM if task == "causal-lm" else AutoModelForMaskedLM


def language_model(
    pretrained: PretrainedFiles,
    task: Task,
    summary: str,
    defaults: Mapping[str, Any],
    packing: bool | None = None,
) -> Model:
    """A pretrained model that learns to predict the next token, or masked tokens.

    packing: as `Job.packing`.
    """
    causal = task == "causal-lm"

    def bare(_: int, input_size: int | None = None) -> "nn.Module":
        pretrained.length(input_size, TOKENS)
        return pretrained.bare(_auto(task))

    def build(_: int, input_size: int | None = None) -> "nn.Module":
        pretrained.length(input_size, TOKENS)
        return pretrained.built(_auto(task))

    def transform(
        _: "nn.Module", input_size: int | None = None, widths: Sequence[int] = (), count: int = 0
    ) -> Callable[[Rows], Rows]:
        if not causal:
            return partial(tokens.masked_inputs, pretrained.tokenizer, True)
        size = pretrained.length(input_size, TOKENS)
        make = partial(tokens.causal_inputs, pretrained.tokenizer, tokens=size, packing=packing)
        return partial(make, widths=widths, sequences=count)

    def trained(_: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
        return partial(tokens.masked_inputs, pretrained.tokenizer, False)

    def sequences(rows: Any, input_size: int | None, progress: Progress) -> Any:
        make = tokens.token_blocks if packing is None else tokens.single_texts
        if "messages" in rows.column_names:
            make = chats.conversation_tokens
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
        example=partial(_example, pretrained, packing),
        logits=classification.logits,
        save=partial(_save, pretrained, packing, task),
        load=partial(load, task),
        defaults=defaults,
        padded=None if packing is None else transform,
        trained=None if causal else trained,
        sequences=sequences,
        writer=writing if causal else None,
        packed=partial(language_model, pretrained, task, summary, defaults) if causal else None,
        sample=partial(_sample, pretrained) if causal else None,
        longest=lambda size: pretrained.length(size, TOKENS),
        packs=partial(_packs, pretrained) if causal else lambda: False,
        check=partial(_check, pretrained, causal),
        decode=lambda tokens: pretrained.tokenizer.decode(tokens),
    )


def _check(pretrained: PretrainedFiles, causal: bool, model: Any, weights: bool) -> None:
    """`classification.check`; for a causal model, also checks its chat template."""
    classification.check(pretrained, (), model, weights)
    if causal and pretrained.local(TOKENIZER_CONFIG):
        chats.check(pretrained.tokenizer)


def _example(
    pretrained: PretrainedFiles,
    packing: bool | None,
    _: "nn.Module",
    batch_size: int,
    input_size: int | None = None,
) -> "dict[str, Tensor]":
    import torch

    ids = torch.zeros(batch_size, pretrained.length(input_size, TOKENS), dtype=torch.long)
    if packing is None:
        return {"input_ids": ids}
    if packing:
        positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
        positions[:, -1] = 0  # begins another text
        return {"input_ids": ids, "position_ids": positions}
    mask = torch.ones_like(ids)
    mask[:, -1] = 0  # most rows end in padding
    return {"input_ids": ids, "attention_mask": mask}


def _packs(pretrained: PretrainedFiles) -> bool:
    """Whether the model's own code separates the texts of one sequence by their positions.

    State-space, convolutional and linear-attention layers carry one text into the next.
    """
    import sys

    from transformers import AutoModelForCausalLM

    config = pretrained.config
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or not has_argument(kind, "position_ids"):
        return False
    names = vars(sys.modules[kind.__module__])
    layers = {*(getattr(config, "layer_types", None) or ATTENTIONS)}
    return (
        any(name in names for name in MASKS)
        and config.model_type not in CROSSING
        and layers <= ATTENTIONS
        and not (getattr(config, "alibi", False) or "create_recurrent_attention_mask" in names)
    )


def _save(
    pretrained: PretrainedFiles,
    packing: bool | None,
    task: Task,
    model: "nn.Module",
    classes: Sequence[str],
    input_size: int | None,
    folder: Path,
) -> None:
    tokenizer = pretrained.tokenizer
    if packing is not None:
        chats.templated(tokenizer)
    classification.save(pretrained, TOKENS, task, model, classes, input_size, folder, tokenizer)


def _sample(pretrained: PretrainedFiles, row: Mapping[str, Sequence[int]]) -> RenderedChat:
    tokenizer = pretrained.tokenizer
    return RenderedChat(bool(tokenizer.chat_template), chats.sample(tokenizer, row))


def load(
    task: Task, folder: Path, input_size: int | None = None
) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    saved = language_model(PretrainedFiles(str(folder), folder), task, "", {})
    model = saved.build(0, None)
    return model, saved.transform(model, input_size)
