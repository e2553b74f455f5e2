"""The forward pass of a job's largest micro-batch, for traces."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.config.job import Job
from razorctl.memory.saved import Forward
from razorctl.models import Model
from razorctl.step import DTYPES, unit_weights


@dataclass(frozen=True)
class JobForward:
    """The forward pass of a resolved job, with its model's entry.

    The loss belongs to it if it stores more than a number per row: losses of language models and
    of segmentation store the logits. classes: their number; only embeddings need it.
    """

    family: Model
    job: Job
    classes: int = 0

    def inputs(self, model: nn.Module, device: torch.device) -> Any:
        """The inputs of `forward`: the model's inputs, with labels if the loss belongs to it."""
        shape = self.job.micro_batch, self.job.input_size
        batch: Any = self.family.batch(model, *shape, self.classes)
        batch = batch[0] if self.job.of_rows else batch
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)

    @property
    def forward(self) -> Forward | None:
        """Computes the loss, or embeddings; None if the forward pass is the model's own."""
        if self.job.task == "embedding":
            return self.family.logits
        return None if self.job.of_rows else self.loss

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `saved.traced_bytes` and `byte_budget.sparsify_within`."""
        return {"autocast": DTYPES[self.job.precision], "forward": self.forward}

    def loss(self, model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
        """The loss of a batch of inputs and labels."""
        inputs, labels = batch
        weights = unit_weights(self.job, self.classes, labels.device)
        return self.family.losses(self.job, weights)(model, inputs, labels, "mean")
