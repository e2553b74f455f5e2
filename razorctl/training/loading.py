"""The order in which a run takes its training rows, from any step on."""

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from razorctl.job import Job

PRIME = 1_000_003  # of seeds and what is counted under each
Key = tuple[int, int]  # the epoch and the row


class Rows(Dataset[Any]):
    """The rows of a data set by `Key`.

    drawn: whether rows are changed at random. What is drawn depends on the seed and the key alone,
    so a row is the same whichever process loads it, and after a resume.
    """

    def __init__(self, rows: Any, seed: int, drawn: bool) -> None:
        self.rows, self.seed, self.drawn = rows, seed, drawn

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        if self.drawn:
            return [self._draw(*key) for key in keys]
        found: list[Any] = self.rows.__getitems__([row for _, row in keys])
        return found

    def _draw(self, epoch: int, row: int) -> Any:
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        seed = (self.seed * PRIME + epoch) * PRIME + row
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)  # not CUDA's, which nothing puts back
        try:
            return self.rows[row]
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])
            torch.set_rng_state(before[2])


class Order(Sampler[list[Key]]):
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

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(self.seed * PRIME + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        for start in range(
            self.first * self.batch_size, self.steps * self.batch_size, self.micro_batch
        ):
            rows = order[start : start + self.micro_batch].tolist()
            yield [(self.epoch, row) for row in rows]


class Loading:
    """Loads the micro-batches of each step; on CUDA by processes of its own, which load ahead.

    The place in the data is the number of steps taken, so what is loaded ahead does not count.
    """

    def __init__(self, rows: Any, job: Job, device: torch.device) -> None:
        self.order, self.accumulate = Order(len(rows), job), job.accumulate
        # Its own generator: the seeds of the processes are not drawn from torch's.
        self.loader = DataLoader(
            Rows(rows, job.seed, drawn=job.augment != "none"),
            batch_sampler=self.order,
            generator=torch.Generator(),
            **workers(device, persistent=True),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the data."""
        return self.order.steps

    def batches(self, taken: int = 0) -> Iterator[Iterator[Any]]:
        """The micro-batches of each step after the first `taken`; take all before the next step."""
        first_epoch, first = divmod(taken, self.order.steps)
        for epoch in itertools.count(first_epoch):
            self.order.epoch, self.order.first = epoch, first
            micro_batches = iter(self.loader)
            for _ in range(first, self.order.steps):
                yield itertools.islice(micro_batches, self.accumulate)
            first = 0


def in_order(data: Dataset[Any], job: Job, device: torch.device) -> DataLoader[Any]:
    """Loads all rows in micro-batches, for an evaluation."""
    assert job.batch_size is not None
    return DataLoader(data, batch_size=job.batch_size // job.accumulate, **workers(device))


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def workers(device: torch.device, persistent: bool = False) -> dict[str, Any]:
    """Arguments of a DataLoader for a device; persistent: whether processes outlive an epoch."""
    if device.type != "cuda":
        return {}
    count = min(8, os.cpu_count() or 1)
    return {"num_workers": count, "pin_memory": True, "persistent_workers": persistent}
