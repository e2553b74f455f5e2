"""Text classifiers of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl.models.joined_texts import rounded
from razorctl.models.model import ANY, Shapes, Size, Transform, prepared
from razorctl.models.rows import Rows
from razorctl.models.tokens import around, text_lengths, unframed
from razorctl.models.transformers.pretrained_model import TextModel

if TYPE_CHECKING:
    from torch import nn


HEADS = ("classifier.", "score.", "pre_classifier.", "classification_head.", "head.")


def tokenized(tokenizer: Any, tokens: int, shapes: Shapes, rows: Rows) -> Rows:
    """Texts padded to one length: the longest, `rounded` to a width of the shapes."""
    texts, pairs = map(unframed(tokenizer, *around(tokenizer)), rows["text"]), rows.get("text_pair")
    batch = tokenizer([*texts], pairs, truncation=True, max_length=tokens)
    return prepared(padded(tokenizer, batch, tokens, shapes), rows)


def padded(tokenizer: Any, batch: Any, tokens: int, shapes: Shapes) -> list[dict[str, Any]]:
    """The inputs of each row of tokenized texts, padded to the length of `tokenized`."""
    widths = [width for _, width in shapes]
    length = rounded(max(map(len, batch["input_ids"])), tokens, widths)
    batch = tokenizer.pad(batch, padding="max_length", max_length=length, return_tensors="pt")
    return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class TextClassifier(TextModel):
    """The classifier of a pretrained model for a task; only its last layers are fresh."""

    most_tokens: ClassVar[int] = 128
    fresh: ClassVar[tuple[str, ...]] = HEADS

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    @property
    def pads(self) -> bool:
        return True

    def settings(self, classes: int) -> dict[str, Any]:
        """The number of classes, and a padding token for a config without one, as of GPT-2."""
        settings, config = super().settings(classes), self.pretrained.config
        if getattr(config, "pad_token_id", None) is not None:
            return settings
        end = getattr(config, "eos_token_id", None)
        return {**settings, "pad_token_id": end[0] if isinstance(end, list) else end or 0}

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        """Raises MissingError if the tokenizer cannot be found, and DataError if it is unusable."""
        return partial(tokenized, self.tokenizer(model), self.size(input_size), shapes)

    def lengths(self, rows: Any, input_size: Size) -> Sequence[int]:
        return text_lengths(self.pretrained.tokenizer, self.size(input_size), rows[:])
