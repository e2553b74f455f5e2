"""Taggers of transformers: a class per token of a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import NO_LABEL
from razorctl.errors import UsageError
from razorctl.models.model import ANY, Shapes, Size, Transform
from razorctl.models.rows import Rows
from razorctl.models.tokens import text_lengths
from razorctl.models.transformers.classification import TextClassifier, padded
from razorctl.models.transformers.pretrained_files import PretrainedFiles

if TYPE_CHECKING:
    from torch import nn


def words_of(rows: Rows) -> list[list[str]]:
    """The tokens of each row: its own, or the words of its text."""
    return rows["tokens"] if "tokens" in rows else [text.split() for text in rows["text"]]


def tagged(tokenizer: Any, tokens: int, shapes: Shapes, rows: Rows) -> Rows:
    """Tokens split into a tokenizer's pieces, padded as by `classification.tokenized`.

    The first piece of a token gets its label; all other pieces get NO_LABEL. Tokens with pieces
    beyond `tokens` are dropped. Rows without labels have `words` instead: for each first piece the
    index of its token, and -1 elsewhere.
    """
    import torch

    batch = tokenizer(words_of(rows), is_split_into_words=True, truncation=True, max_length=tokens)
    firsts = [_first_pieces(batch.word_ids(row)) for row in range(len(batch["input_ids"]))]
    inputs = padded(tokenizer, batch, tokens, shapes)
    words = torch.full((len(firsts), len(inputs[0]["input_ids"])), -1)
    for row, first in enumerate(firsts):
        start = words.shape[1] - len(first) if tokenizer.padding_side == "left" else 0
        words[row, start : start + len(first)] = torch.tensor(first)
    if "label" not in rows:
        return {"inputs": inputs, "words": list(words)}
    labels = [
        torch.tensor([*tags, NO_LABEL])[numbers]  # -1 takes the last, NO_LABEL
        for tags, numbers in zip(rows["label"], words, strict=True)
    ]
    return {"inputs": inputs, "labels": labels}


def _first_pieces(words: Sequence[int | None]) -> list[int]:
    """The index of the word for each first piece of a word; -1 for other pieces."""
    return [
        -1 if word is None or (place and words[place - 1] == word) else word
        for place, word in enumerate(words)
    ]


@dataclass(frozen=True, kw_only=True)
class Tagger(TextClassifier):
    """The tagger of a pretrained model; only its last layer is fresh."""

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification

    def settings(self, classes: int) -> dict[str, Any]:
        return {"num_labels": classes}

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        return partial(tagged, _tokenizer(self.pretrained), self.size(input_size), shapes)

    def lengths(self, rows: Any, input_size: Size) -> Sequence[int]:
        return text_lengths(_tokenizer(self.pretrained), self.size(input_size), rows[:])


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
