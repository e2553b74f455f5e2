"""What a step of a job keeps, and its byte budget, by a trace of its largest micro-batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.job import Job
from razorctl.memory import saved
from razorctl.models import Model
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, losses_of
from razorctl.surgery.byte_budget import sparsify_within


@dataclass(frozen=True)
class OfJob:
    """A resolved job with its model's entry.

    The loss counts where it keeps more than a number for each row: that of a language model or of
    segmentation keeps the logits.
    """

    family: Model
    job: Job

    def inputs(self, model: nn.Module, device: torch.device) -> Any:
        """What `forward` takes."""
        size, pixels = self.job.micro_batch, self.job.input_size
        batch: Any = self.family.example(model, size, pixels)
        if self.forward is not None:
            batch = self.family.batch(model, size, pixels)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    @property
    def forward(self) -> saved.Forward | None:
        """As in `saved_bytes`."""
        return None if self.job.classifies else self._loss

    def _loss(self, model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        inputs, labels = batch
        return losses_of(self.family.logits(model, inputs), labels, self.job)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"autocast": DTYPES[self.job.precision], "forward": self.forward}

    def sparsify(
        self, model: nn.Module, recipe: Recipe, inputs: Any, full: int | None = None
    ) -> tuple[str, ...]:
        """`sparsify_within` for a micro-batch; full: its `saved_bytes` in full, if known."""
        return sparsify_within(model, recipe, inputs, **self._settings, full=full)

    def saved_bytes(self, model: nn.Module, inputs: Any) -> int:
        """What a model as it is keeps of a micro-batch."""
        return saved.saved_bytes(model, inputs, **self._settings)

    def saved_by_module(self, model: nn.Module, inputs: Any) -> dict[str, int]:
        """The same by the names of modules."""
        return saved.saved_by_module(model, inputs, **self._settings)
