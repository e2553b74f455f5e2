"""The targets of a regression in units of their deviation over the training rows.

A head would need many steps to reach ages of 20 to 65, so it learns (target - mean) / deviation. At
the end of a run its weights are scaled, and give the targets as they are: what is exported is a
plain model.
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
    """The mean and the deviation of targets, and the name of the head; as it is, it changes none.

    A head without a bias holds no mean: its targets are divided by the root of their mean square.
    """

    mean: float = 0.0
    deviation: float = 1.0
    head: str = ""

    @classmethod
    def of(cls, targets: Sequence[float], model: nn.Module) -> "Standard":
        """The standard of training targets; it has no head if the model has none."""
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
        """The function whose results are targets as they are."""
        if not self.head:
            return logits
        return lambda model, inputs: logits(model, inputs).float() * self.deviation + self.mean

    @torch.no_grad()
    def fold(self, model: nn.Module) -> None:
        """Scales the head, so that the model gives targets as they are."""
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
        """Returns this standard if folding scales the outputs of a model, else one without a head.

        A head that gives the targets as they are already, since it was trained to, is unfolded.
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
