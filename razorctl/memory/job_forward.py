"""The forward pass of a job's largest micro-batch, for traces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.config.job import Job
from razorctl.memory.saved import Forward
from razorctl.models import Model
from razorctl.step import DTYPES, losses_of, unit_weights


@dataclass(frozen=True)
class JobForward:
    """The forward pass of a resolved job, with its model's entry.

    The loss belongs to it if it stores more than a number per row: losses of language models and
    of segmentation store the logits.
    """

    family: Model
    job: Job

    def inputs(self, model: nn.Module, device: torch.device) -> Any:
        """The inputs of `forward`: the model's inputs, with labels if the loss belongs to it."""
        shape = self.job.micro_batch, self.job.input_size
        if self.forward is None:
            batch: Any = self.family.example(model, *shape)
        else:
            batch = self.family.batch(model, *shape, 0)  # no loss over classes is traced
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    @property
    def forward(self) -> Forward | None:
        """Computes the loss; None if the forward pass is the model's own."""
        return None if self.job.of_rows else self._loss

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `saved.traced_bytes` and `byte_budget.sparsify_within`."""
        return {"autocast": DTYPES[self.job.precision], "forward": self.forward}

    def _loss(self, model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        inputs, labels = batch
        output = self.family.logits(model, inputs)
        weights = unit_weights(self.job, output.shape[1], labels.device)
        return losses_of(output, labels, self.job, class_weights=weights)
