"""Models of transformers: what all of them share, and what models of texts share."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl import units
from razorctl.models.model import Modality, Model, Size, Transform
from razorctl.models.transformers.pretrained_files import (
    PretrainedFiles,
    has_argument,
    name_classes,
    quiet_transformers,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PretrainedModel(Model):
    """A model of transformers by its files.

    fresh: prefixes of the names of weights that need not be pretrained.
    """

    pretrained: PretrainedFiles
    fresh: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def auto(self) -> Any:
        """The `AutoModelFor...` class of transformers that builds it."""

    @abstractmethod
    def size(self, input_size: Size) -> int:
        """The input size that is used; raises UsageError for one that the model cannot take."""

    def settings(self, classes: int) -> dict[str, Any]:
        """The settings of its config for some classes."""
        return {"num_labels": classes}

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        self.size(input_size)
        settings = self.settings(classes)
        if not pretrained:
            return self.pretrained.bare(self.auto, **settings)
        return self.pretrained.built(self.auto, self.fresh, **settings)

    def files(self, weights: bool) -> Sequence[Path]:
        return self.pretrained.files(weights)

    @property
    def unproven(self) -> bool:
        return True

    def check(self, model: Any, weights: bool) -> None:
        self.pretrained.check(self.fresh, model, weights)

    def load(self, folder: Path, input_size: Size = None) -> tuple["nn.Module", Transform]:
        saved = replace(self, pretrained=PretrainedFiles(str(folder), folder))
        model = saved.restored()
        return model, saved.transform(model, input_size)

    def restored(self) -> "nn.Module":
        """The model whose weights `save` wrote, all of them."""
        return self.pretrained.built(self.auto)


@dataclass(frozen=True, kw_only=True)
class TextModel(PretrainedModel):
    """A model of texts. most_tokens: the usual length, if the model's limit is not lower."""

    modality: ClassVar[Modality] = "text"
    most_tokens: ClassVar[int]

    def size(self, input_size: Size) -> int:
        return self.pretrained.length(input_size, self.most_tokens)

    def longest(self, input_size: Size) -> int:
        return self.size(input_size)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.pretrained.tokenizer.decode(tokens)
        return text

    def logits(self, model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
        output: Tensor = model(**inputs).logits
        return output

    def example(
        self, model: "nn.Module", batch_size: int, input_size: Size = None
    ) -> "dict[str, Tensor]":
        """A batch of texts [batch, tokens] of the largest size; they end in padding, as most do."""
        import torch

        ids = torch.zeros(batch_size, self.size(input_size), dtype=torch.long)
        mask = torch.ones_like(ids)
        mask[:, -1] = 0
        kinds = {}
        types = getattr(model.config, "type_vocab_size", 0)
        if has_argument(model, "token_type_ids") and types > 1:
            kinds["token_type_ids"] = torch.zeros_like(ids)
        return {"input_ids": ids, **kinds, "attention_mask": mask}

    def tokenizer(self, model: Any) -> Any:
        """The tokenizer that is saved with a model.

        A decoder classifies at the last token that is not padding according to its config, which
        gets the id of that token. Padding is on the right, since positions may be absolute.
        """
        tokenizer = self.pretrained.tokenizer
        if hasattr(model, "score"):
            model.config.pad_token_id, tokenizer.padding_side = tokenizer.pad_token_id, "right"
        return tokenizer

    def save(self, model: Any, classes: Sequence[str], input_size: Size, folder: Path) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its tokenizer load."""
        tokenizer, config = self.tokenizer(model), self.pretrained.config
        tokenizer.model_max_length = self.size(input_size)
        if classes:
            name_classes(model, classes, self.task)
        if hasattr(config, "use_cache"):
            model.config.use_cache = config.use_cache  # training has switched it off
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    def check(self, model: Any, weights: bool) -> None:
        """Raises ValueError also if a special token has no embedding."""
        super().check(model, weights)
        rows = len(model.get_input_embeddings().weight)
        for name, value in model.config.to_diff_dict().items():
            if not name.endswith("_token_id"):
                continue
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int and not 0 <= number < rows:
                    has = units.count(rows, "row")
                    raise ValueError(f"{name} is {number:,}, and its embedding has {has}")
