"""Mixup and cutmix (Zhang et al., 2018; Yun et al., 2019), by timm."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from razorctl.job import Job

Batch = tuple[Any, Tensor]


def mixing(job: Job, classes: int) -> Callable[[Batch], Batch]:
    """A function that mixes a micro-batch of images and labels as a resolved job says.

    Mixed labels are shares of classes [rows, classes]. Random numbers are from NumPy's generator.
    """
    if not (job.mixup or job.cutmix):
        return lambda batch: batch
    from timm.data import Mixup

    # The loss smooths labels, mixed or not.
    mix = Mixup(job.mixup, job.cutmix, label_smoothing=0.0, num_classes=classes)

    def mixed(batch: Batch) -> Batch:
        images, shares = mix(*batch)
        return images, shares

    return mixed
