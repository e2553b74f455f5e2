"""R2, the share of the variance of labels that guesses explain."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class Explained(Metric):
    """R2 = 1 - squared errors / squared deviations of the labels; 0 if all labels are equal.

    It is computed in double precision from deviations. `torchmetrics.R2Score` subtracts sums of
    squares, which loses all digits of labels such as years, and takes small labels for equal.
    """

    full_state_update = False
    guesses: Any  # a list of tensors, or one of all processes
    labels: Any

    def __init__(self) -> None:
        super().__init__()
        for name in ("guesses", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, guesses: Tensor, labels: Tensor) -> None:
        """Adds the guesses and the labels of some rows, [rows] each."""
        self.guesses.append(guesses.detach().double())
        self.labels.append(labels.detach().double())

    def compute(self) -> Tensor:
        """R2; below 0 if the mean of the labels is a better guess."""
        guesses, labels = dim_zero_cat(self.guesses), dim_zero_cat(self.labels)
        spread = (labels - labels.mean()).square().sum()
        share = 1 - (guesses - labels).square().sum() / spread
        return torch.where(spread > 0, share, torch.zeros_like(share))
