"""Text classifiers of transformers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.tasks import Task
from razorctl.models import Model, Rows, prepared
from razorctl.models.joined_texts import rounded
from razorctl.models.tokens import around, text_lengths, unframed
from razorctl.models.transformers.pretrained_files import (
    PretrainedFiles,
    has_argument,
    name_classes,
    quiet_transformers,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

TOKENS = 128
# Prefixes of weights that need not be pretrained in a classifier of transformers.
FRESH = ("classifier.", "score.", "pre_classifier.", "classification_head.", "head.")


def example(
    length: Callable[[int | None], int],
    model: "nn.Module",
    batch_size: int,
    input_size: int | None = None,
) -> "dict[str, Tensor]":
    """A batch of texts [batch, tokens] of the largest size; they end in padding, as most do."""
    import torch

    config: Any = model.config
    ids = torch.zeros(batch_size, length(input_size), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    kinds = {}
    if has_argument(model, "token_type_ids") and getattr(config, "type_vocab_size", 0) > 1:
        kinds["token_type_ids"] = torch.zeros_like(ids)
    return {"input_ids": ids, **kinds, "attention_mask": mask}


def logits(model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
    output: Tensor = model(**inputs).logits
    return output


def tokenized(tokenizer: Any, tokens: int, widths: Sequence[int], rows: Rows) -> Rows:
    """Texts padded to one length: the longest, `rounded` with these widths."""
    texts, pairs = map(unframed(tokenizer, *around(tokenizer)), rows["text"]), rows.get("text_pair")
    batch = tokenizer([*texts], pairs, truncation=True, max_length=tokens)
    longest = max(map(len, batch["input_ids"]))
    length = rounded(longest, tokens, widths)
    batch = tokenizer.pad(batch, padding="max_length", max_length=length, return_tensors="pt")
    inputs = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return prepared(inputs, rows)


def check(pretrained: PretrainedFiles, fresh: tuple[str, ...], model: Any, weights: bool) -> None:
    """`PretrainedFiles.check`; also raises ValueError if a special token has no embedding."""
    pretrained.check(fresh, model, weights)
    rows = len(model.get_input_embeddings().weight)
    said = model.config.to_diff_dict()
    for name, value in said.items():
        if not name.endswith("_token_id"):
            continue
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int and not 0 <= number < rows:
                has = units.count(rows, "row")
                raise ValueError(f"{name} is {number:,}, and its embedding has {has}")


def load(folder: Path, input_size: int | None = None) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    from transformers import AutoModelForSequenceClassification

    saved = PretrainedFiles(str(folder), folder)
    model = saved.built(AutoModelForSequenceClassification)
    length = saved.length(input_size, TOKENS)
    return model, partial(tokenized, _tokenizer(saved, model), length, ())


def _tokenizer(pretrained: PretrainedFiles, model: Any) -> Any:
    """The tokenizer of a classifier; a decoder's config gets the id of its padding token.

    A decoder classifies at the last token that is not padding according to its config. Padding is
    on the right, since positions may be absolute.
    """
    tokenizer = pretrained.tokenizer
    if hasattr(model, "score"):
        model.config.pad_token_id, tokenizer.padding_side = tokenizer.pad_token_id, "right"
    return tokenizer


def save(
    pretrained: PretrainedFiles,
    usual: int,
    task: Task,
    model: Any,
    classes: Sequence[str],
    input_size: int | None,
    folder: Path,
    tokenizer: Any = None,
) -> None:
    """Writes what `from_pretrained(folder)` of the model and of its tokenizer load.

    Args:
        usual: the tokens of a text, as in `PretrainedFiles.length`.
        tokenizer: None for the model's own.
    """
    tokenizer = tokenizer or _tokenizer(pretrained, model)
    tokenizer.model_max_length = pretrained.length(input_size, usual)
    if classes:
        name_classes(model, classes, task)
    if hasattr(pretrained.config, "use_cache"):
        model.config.use_cache = pretrained.config.use_cache  # training has switched it off
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def classifier(
    pretrained: PretrainedFiles, task: Task, summary: str, defaults: Mapping[str, Any]
) -> Model:
    """The classifier of a pretrained model for a task; only its last layers are fresh."""

    def length(input_size: int | None) -> int:
        return pretrained.length(input_size, TOKENS)

    def bare(classes: int, input_size: int | None = None) -> "nn.Module":
        from transformers import AutoModelForSequenceClassification

        length(input_size)
        padding = _padding(pretrained)
        return pretrained.bare(AutoModelForSequenceClassification, num_labels=classes, **padding)

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        from transformers import AutoModelForSequenceClassification

        length(input_size)
        return pretrained.built(
            AutoModelForSequenceClassification, FRESH, num_labels=classes, **_padding(pretrained)
        )

    def transform(
        model: "nn.Module", input_size: int | None = None, widths: Sequence[int] = (), _: int = 0
    ) -> Callable[[Rows], Rows]:
        """A function from rows of texts or text pairs to the model's inputs.

        They have up to `input_size` tokens. Raises MissingError if the tokenizer cannot be found,
        and DataError if it cannot be used.
        """
        return partial(tokenized, _tokenizer(pretrained, model), length(input_size), widths)

    return Model(
        name=pretrained.name,
        summary=summary,
        modality="text",
        task=task,
        build=build,
        bare=bare,
        transform=transform,
        example=partial(example, length),
        logits=logits,
        save=partial(save, pretrained, TOKENS, task),
        load=load,
        defaults=defaults,
        padded=transform,
        longest=length,
        lengths=lambda rows, size: text_lengths(pretrained.tokenizer, length(size), rows),
        check=partial(check, pretrained, FRESH),
        decode=lambda tokens: pretrained.tokenizer.decode(tokens),
    )


def _padding(pretrained: PretrainedFiles) -> dict[str, Any]:
    """The padding token for a config without one, such as a decoder's."""
    config = pretrained.config
    if getattr(config, "pad_token_id", None) is not None:
        return {}
    end = getattr(config, "eos_token_id", None)
    return {"pad_token_id": end[0] if isinstance(end, list) else end or 0}
