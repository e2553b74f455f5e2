"""Models of images: how rows become inputs, whatever the library of the model."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl.models import images, masks
from razorctl.models.model import ANY, Modality, Model, Shapes, Size, Transform
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ImageModel(Model):
    """A model of images, which `data_config` describes; segmentation also takes their masks."""

    modality: ClassVar[Modality] = "image"

    @abstractmethod
    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        """The data config, as in `models.images`, for images of a size."""

    @property
    def _rows(self) -> Any:
        """The module that prepares rows."""
        return masks if self.task == "segmentation" else images

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        transform: Transform = self._rows.transform(self.data_config(model, input_size))
        return transform

    def augmented(self, model: "nn.Module", input_size: Size, augment: str) -> Transform:
        config = self.data_config(model, input_size)
        transform: Transform = self._rows.augmented(config, augment)
        return transform

    def example(self, model: "nn.Module", batch_size: int, input_size: Size = None) -> Any:
        return images.example(self.data_config(model, input_size), batch_size)

    def logits(self, model: "nn.Module", inputs: Any) -> "Tensor":
        logits: Tensor = model(inputs)
        return logits


def write(model: "nn.Module", config: Mapping[str, Any], folder: Path) -> None:
    """Writes config.json and model.safetensors, for models without a format of their library."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(documents.text(config, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors")
