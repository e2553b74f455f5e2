"""Embeddings of images and texts: the two towers of CLIP, SigLIP and their kin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.job import Job
from razorctl.models import images
from razorctl.models.model import ANY, Model, Shapes, Size, Transform
from razorctl.models.rows import Rows
from razorctl.models.tokens import text_id, text_lengths
from razorctl.models.transformers.classification import padded
from razorctl.models.transformers.pretrained_files import PROCESSOR, quiet_transformers
from razorctl.models.transformers.vision import VisionModel, data_config
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

    from razorctl.ops.contrastive import Similarity
    from razorctl.step import ByLogits

# Types of configs whose models have `get_image_features`, `get_text_features` and `logit_scale`. Of
# SigLIP2, models of images of one shape have the type siglip; others cannot be traced.
KINDS = ("clip", "siglip", "chinese_clip", "altclip", "metaclip_2")
# Of these, kinds that read all texts at their full length and without a mask, as in pretraining.
FULL_LENGTH = ("siglip",)
DIRECTIONS = ("image_to_text", "text_to_image")
TOKENS = 77  # most tokens of a text, if the model's limit is not lower
LARGEST = math.log(100)  # of CLIP's `logit_scale` (Radford et al., 2021, section 2.5)


def embedded_rows(
    pixels: Transform, tokenizer: Any, tokens: int, masked: bool, shapes: Shapes, rows: Rows
) -> Rows:
    """The inputs of the image and the text of each row, or of one of them if rows have no other.

    Labels are the `image_id` of the row and the `text_id`. pixels: a transform of images.
    masked: whether texts have a mask, and are padded as by `classification.tokenized`.
    """
    import torch

    inputs: list[dict[str, Any]] = [{} for _ in next(iter(rows.values()))]
    if "image" in rows:
        for each, image in zip(inputs, pixels({"image": rows["image"]})["inputs"], strict=True):
            each["pixel_values"] = image
    if "text" in rows:
        batch = tokenizer(rows["text"], truncation=True, max_length=tokens, verbose=False)
        names = ("input_ids", "attention_mask")[: 1 + masked]
        widths = shapes if masked else [(0, tokens)]
        for each, text in zip(inputs, padded(tokenizer, batch, tokens, widths), strict=True):
            each.update({name: text[name] for name in names})
    if "image_id" not in rows:
        return {"inputs": inputs}
    ids = zip(rows["image_id"], map(text_id, rows["text"]), strict=True)
    return {"inputs": inputs, "labels": [torch.tensor(row) for row in ids]}


@dataclass(frozen=True, kw_only=True)
class TwoTowers(VisionModel):
    """A model of images and one of texts, whose projected states are their embeddings.

    temperature: as in `Job`.
    """

    temperature: float | None = None

    @property
    def auto(self) -> Any:
        from transformers import AutoModel

        return AutoModel

    @property
    def has_mask(self) -> bool:
        """Whether texts have a mask, so that a model reads no padding."""
        return self.pretrained.config.model_type not in FULL_LENGTH

    @property
    def pads(self) -> bool:
        return self.has_mask

    def fed(self, job: Job) -> Model:
        return replace(self, temperature=job.temperature)

    def settings(self, classes: int) -> dict[str, Any]:
        return {}

    def longest(self, input_size: Size) -> int:
        most: int = self.pretrained.config.text_config.max_position_embeddings
        return min(TOKENS, most)

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        """The scale is the inverse of the temperature, if there is one."""
        model: Any = super().build(classes, input_size, pretrained)
        if self.temperature is not None:
            model.logit_scale.data.fill_(-math.log(self.temperature))
        return model  # type: ignore[no-any-return]

    def losses(self, job: Job, class_weights: "Tensor | None" = None) -> "ByLogits":
        return replace(super().losses(job, class_weights), similarity=self._similarity)

    def _similarity(self, model: Any) -> "Similarity":
        """The model's own scale, and for sigmoid its bias; a temperature is not trained."""
        import torch

        from razorctl.ops.contrastive import Similarity

        scale, bias = model.logit_scale, getattr(model, "logit_bias", None)
        if bias is None and model.training:
            with torch.no_grad():  # as CLIP does: a clamp of its value would stop its gradient
                scale.clamp_(max=LARGEST)
        if self.temperature is not None:
            scale = scale.detach()
        bias = None if bias is None else bias.float()
        return Similarity(scale.float().exp(), bias, True, DIRECTIONS)

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        processor = self.pretrained.processor
        crops = processor.get("do_center_crop", self.has_mask)
        config = data_config(processor, self.size(input_size))
        return {**config, "crop_mode": "center" if crops else "squash"}

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        return self._of_rows(images.transform(self.data_config(model, input_size)), shapes)

    def augmented(self, model: "nn.Module", input_size: Size, augment: str) -> Transform:
        """Texts have their full length, since rows are then prepared one by one."""
        pixels = images.augmented(self.data_config(model, input_size), augment)
        return self._of_rows(pixels, [(0, self.longest(input_size))])

    def _of_rows(self, pixels: Transform, shapes: Shapes) -> Transform:
        tokenizer = self.tokenizer
        return partial(embedded_rows, pixels, tokenizer, self.longest(None), self.has_mask, shapes)

    @property
    def tokenizer(self) -> Any:
        tokenizer = self.pretrained.tokenizer
        tokenizer.padding_side = "right"
        return tokenizer

    def lengths(self, rows: Any, input_size: Size) -> Sequence[int]:
        texts = rows.select_columns("text")[:]
        return text_lengths(self.pretrained.tokenizer, self.longest(input_size), texts)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.pretrained.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def example(self, model: "nn.Module", batch_size: int, input_size: Size = None) -> Any:
        """A batch of images with texts of the largest size; they end in padding, as most do."""
        import torch

        ids = torch.zeros(batch_size, self.longest(input_size), dtype=torch.long)
        inputs = {"pixel_values": super().example(model, batch_size, input_size), "input_ids": ids}
        if self.has_mask:
            inputs["attention_mask"] = torch.ones_like(ids)
            inputs["attention_mask"][:, -1] = 0
        return inputs

    def batch(
        self, model: "nn.Module", batch_size: int, input_size: Size, classes: int
    ) -> tuple[Any, "Tensor"]:
        """`example` of images and texts that are all unlike."""
        import torch

        labels = torch.arange(1, 1 + 2 * batch_size).view(batch_size, 2)
        return self.example(model, batch_size, input_size), labels

    def logits(self, model: Any, inputs: "Mapping[str, Tensor]") -> "Tensor":  # type: ignore[override]
        """Unit vectors, fp32: [batch, d] of images or texts, or [batch, 2, d] of both."""
        import torch
        import torch.nn.functional as F

        vectors = []
        if "pixel_values" in inputs:
            vectors.append(model.get_image_features(pixel_values=inputs["pixel_values"]))
        if texts := {name: of for name, of in inputs.items() if name != "pixel_values"}:
            vectors.append(model.get_text_features(**texts))
        units = [F.normalize(each.pooler_output.float(), dim=-1) for each in vectors]
        return units[0] if len(units) == 1 else torch.stack(units, 1)

    def save(self, model: Any, classes: Sequence[str], input_size: Size, folder: Path) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its processor load."""
        tokenizer = self.tokenizer
        tokenizer.model_max_length = self.longest(input_size)
        with quiet_transformers():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        settings = documents.text(self.pretrained.processor, indent=2)
        (folder / PROCESSOR).write_text(settings + "\n")
