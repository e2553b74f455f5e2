"""Standardized targets of a regression: (target - mean) / deviation over the training rows.

A head needs many steps to reach targets such as ages of 20 to 65. At the end of a run its weights
are scaled, so that the exported model gives targets in their own unit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from razorctl.errors import UsageError
from razorctl.step import scored
from razorctl.surgery import freezing
from razorctl.system import processes

Logits = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Standard:
    """The mean and the deviation of targets, and the name of the head; "" standardizes nothing.

    For a head without a bias the mean is 0, and the deviation is the root of the mean square.
    """

    mean: float = 0.0
    deviation: float = 1.0
    head: str = ""

    @classmethod
    def of(cls, targets: Sequence[float], model: nn.Module) -> "Standard":
        """The standard of training targets, without a head if the model has none."""
        try:
            name, layer = freezing.head(model)
        except UsageError:
            return cls()
        numbers = np.asarray(targets, np.float64)
        mean = numbers.mean() if getattr(layer, "bias", None) is not None else 0.0
        deviation = math.sqrt(((numbers - mean) ** 2).mean())
        return cls(float(mean), deviation or 1.0, name)

    def labels(self, targets: Tensor) -> Tensor:
        """The targets that the head learns."""
        return (targets - self.mean) / self.deviation if self.head else targets

    def logits(self, logits: Logits) -> Logits:
        """The function of a model's outputs in the unit of the targets."""
        if not self.head:
            return logits
        return lambda model, inputs: logits(model, inputs).float() * self.deviation + self.mean

    @torch.no_grad()
    def fold(self, model: nn.Module) -> None:
        """Scales the head, so that the model's outputs are in the unit of the targets."""
        self._scale(model, self.deviation, self.mean)

    @torch.no_grad()
    def unfold(self, model: nn.Module) -> None:
        """The reverse of `fold`."""
        self._scale(model, 1 / self.deviation, -self.mean / self.deviation)

    def _scale(self, model: nn.Module, factor: float, offset: float) -> None:
        if self.head:
            layer: Any = model.get_submodule(self.head)
            layer.weight.mul_(factor)
            if getattr(layer, "bias", None) is not None:
                layer.bias.mul_(factor).add_(offset)

    @torch.no_grad()
    def fitted(self, model: nn.Module, logits: Logits, batch: Any, job: Any) -> "Standard":
        """This standard if `fold` scales the outputs of a model, else one without a head.

        A trained head, whose outputs are in the unit of the targets already, is unfolded.
        Collective. batch: inputs and targets. job: a resolved job.
        """
        inputs, targets = batch
        training = model.training
        model.eval()

        def outputs() -> Tensor:
            with scored(targets.device, job):
                return logits(model, inputs).float().squeeze(-1)

        before = outputs()
        self.fold(model)
        after = outputs()
        self.unfold(model)
        model.train(training)
        scaled = before * self.deviation + self.mean
        fits = bool((after - scaled).abs().max() <= 1e-3 * self.deviation)
        knows = bool((before - targets).square().mean() < (after - targets).square().mean())
        fits, knows = processes.every((fits, knows))[0]
        if fits and knows:
            self.unfold(model)
        return self if fits else replace(self, mean=0.0, deviation=1.0, head="")
