"""The order in which a run takes its training rows, from any step on."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from razorctl.job import Job


class Order(Sampler[list[int]]):
    """The rows of each micro-batch of an epoch, in an order that depends on seed and epoch alone.

    An epoch ends with its last whole batch. epoch: the one to iterate over. first: its first step,
    counted from 0; rows of earlier steps are not read.
    """

    def __init__(self, rows: int, job: Job) -> None:
        assert job.batch_size is not None
        self.rows, self.seed, self.batch_size = rows, job.seed, job.batch_size
        self.micro_batch = job.batch_size // job.accumulate
        self.steps = rows // job.batch_size
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        for start in range(
            self.first * self.batch_size, self.steps * self.batch_size, self.micro_batch
        ):
            yield order[start : start + self.micro_batch].tolist()


class Loading:
    """Loads the micro-batches of each step; on CUDA by processes of its own, which load ahead.

    The place in the data is the number of steps taken, so what is loaded ahead does not count.
    """

    def __init__(self, data: Dataset[Any], rows: int, job: Job, device: torch.device) -> None:
        self.order, self.accumulate = Order(rows, job), job.accumulate
        # Its own generator: the seeds of the processes are not drawn from torch's.
        self.loader = DataLoader(
            data, batch_sampler=self.order, generator=torch.Generator(), **workers(device)
        )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the data."""
        return self.order.steps

    def state(self, taken: int) -> dict[str, int]:
        """What the rows after the first `taken` steps depend on."""
        epoch, first = divmod(taken, self.order.steps)
        return {"seed": self.order.seed, "epoch": epoch, "step_in_epoch": first}

    def batches(self, taken: int = 0) -> Iterator[Iterator[Any]]:
        """The micro-batches of each step after the first `taken`; take all before the next step."""
        first_epoch, first = divmod(taken, self.order.steps)
        for epoch in itertools.count(first_epoch):
            self.order.epoch, self.order.first = epoch, first
            micro_batches = iter(self.loader)
            for _ in range(first, self.order.steps):
                yield itertools.islice(micro_batches, self.accumulate)
            first = 0


def workers(device: torch.device) -> dict[str, Any]:
    """Arguments of a DataLoader for a device."""
    if device.type != "cuda":
        return {}
    return {"num_workers": min(8, os.cpu_count() or 1), "pin_memory": True}
