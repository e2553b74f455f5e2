"""Taggers of transformers: a class per token of a text."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import NO_LABEL, Task
from razorctl.errors import UsageError
from razorctl.models import Model, Rows
from razorctl.models.joined_texts import rounded
from razorctl.models.tokens import text_lengths
from razorctl.models.transformers import classification
from razorctl.models.transformers.classification import FRESH, TOKENS
from razorctl.models.transformers.pretrained_files import PretrainedFiles

if TYPE_CHECKING:
    from torch import nn

TASK: Task = "token-classification"


def words_of(rows: Rows) -> list[list[str]]:
    """The tokens of each row: its own, or the words of its text."""
    return rows["tokens"] if "tokens" in rows else [text.split() for text in rows["text"]]


def tagged(tokenizer: Any, tokens: int, widths: Sequence[int], rows: Rows) -> Rows:
    """Tokens split into a tokenizer's pieces, padded as by `classification.tokenized`.

    The first piece of a token gets its label; all other pieces get NO_LABEL. Tokens with pieces
    beyond `tokens` are dropped. Rows without labels have `words` instead: for each first piece the
    index of its token, and -1 elsewhere.
    """
    import torch

    found = tokenizer(words_of(rows), is_split_into_words=True, truncation=True, max_length=tokens)
    firsts = [_first_pieces(found.word_ids(row)) for row in range(len(found["input_ids"]))]
    longest = max(map(len, firsts))
    length = rounded(longest, tokens, widths)
    batch = tokenizer.pad(found, padding="max_length", max_length=length, return_tensors="pt")
    inputs = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    words = torch.full((len(firsts), length), -1)
    for row, own in enumerate(firsts):
        start = length - len(own) if tokenizer.padding_side == "left" else 0
        words[row, start : start + len(own)] = torch.tensor(own)
    if "label" not in rows:
        return {"inputs": inputs, "words": list(words)}
    labels = [
        torch.tensor([*own, NO_LABEL])[numbers]  # of -1 the last
        for own, numbers in zip(rows["label"], words, strict=True)
    ]
    return {"inputs": inputs, "labels": labels}


def _first_pieces(words: Sequence[int | None]) -> list[int]:
    """The index of the word for each first piece of a word; -1 for other pieces."""
    return [
        -1 if word is None or (place and words[place - 1] == word) else word
        for place, word in enumerate(words)
    ]


def _auto() -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification


def _tokenizer(pretrained: PretrainedFiles) -> Any:
    """A tokenizer for rows of tokens; raises UsageError if it cannot take them."""
    tokenizer = pretrained.tokenizer
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer of {pretrained.name} is not a fast one, which tokens need; choose "
            "another model."
        )
    if _splits_alike(tokenizer):
        return tokenizer
    return pretrained.tokenizer_with(add_prefix_space=True)  # so that each token begins a word


def _splits_alike(tokenizer: Any) -> bool:
    """Whether separate tokens are split as in a text, where a space precedes a word."""
    try:
        split = tokenizer(["a", "b"], is_split_into_words=True)
    except (AssertionError, ValueError):  # some raise, since they need the space
        return False
    return bool(split["input_ids"] == tokenizer("a b")["input_ids"])


def tagger(pretrained: PretrainedFiles, summary: str, defaults: Mapping[str, Any]) -> Model:
    """The tagger of a pretrained model; only its last layer is fresh."""

    def length(input_size: int | None) -> int:
        return pretrained.length(input_size, TOKENS)

    def bare(classes: int, input_size: int | None = None) -> "nn.Module":
        length(input_size)
        return pretrained.bare(_auto(), num_labels=classes)

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        length(input_size)
        return pretrained.built(_auto(), FRESH, num_labels=classes)

    def transform(
        model: "nn.Module", input_size: int | None = None, widths: Sequence[int] = (), _: int = 0
    ) -> Callable[[Rows], Rows]:
        return partial(tagged, _tokenizer(pretrained), length(input_size), widths)

    return Model(
        name=pretrained.name,
        summary=summary,
        modality="text",
        task=TASK,
        build=build,
        bare=bare,
        transform=transform,
        example=partial(classification.example, length),
        logits=classification.logits,
        save=partial(classification.save, pretrained, TOKENS, TASK),
        load=load,
        defaults=defaults,
        padded=transform,
        longest=length,
        lengths=lambda rows, size: text_lengths(_tokenizer(pretrained), length(size), rows),
        check=partial(classification.check, pretrained, FRESH),
        decode=lambda tokens: pretrained.tokenizer.decode(tokens),
    )


def load(folder: Path, input_size: int | None = None) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    pretrained = PretrainedFiles(str(folder), folder)
    model = pretrained.built(_auto())
    return model, tagger(pretrained, "", {}).transform(model, input_size)
