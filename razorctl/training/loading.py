"""The loading of rows: training rows in a random order from any step on, other rows in order."""

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from razorctl import units
from razorctl.config.job import Job
from razorctl.data.own.images import unreadable_image
from razorctl.errors import DataError, UsageError, first_line, raise_lack
from razorctl.models.joined_texts import GROUPED
from razorctl.system import processes

ROOM = 256 << 20  # most bytes of rows in memory
PRIME = 1_000_003  # factor by which a seed and a number below it become one seed
Key = tuple[int, int]  # the epoch and the number of the row


class KeyedRows(Dataset[Any]):
    """The rows of a data set by `Key`.

    drawn: whether rows are changed at random. The random numbers depend only on the seed and the
    key, so that a row is the same in every process and after a resume.
    """

    def __init__(self, rows: Any, seed: int, drawn: bool) -> None:
        self.rows, self.seed, self.drawn = rows, seed, drawn

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        if self.drawn:
            return [self._draw(*key) for key in keys]
        rows: list[Any] = self.rows.__getitems__([row for _, row in keys])
        return rows

    def _draw(self, epoch: int, row: int) -> Any:
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        seed = (self.seed * PRIME + epoch) * PRIME + row
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed % 2**63)  # CUDA's state is not restored below
        try:
            return self.rows[row]
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])
            torch.set_rng_state(before[2])


class Order(Sampler[list[Key]]):
    """The rows of each micro-batch of an epoch, in an order by the seed and the epoch.

    Each process takes an equal part of a batch; the parts are in the order of ranks. An epoch ends
    with its last whole batch. steps: the number of batches. epoch: the epoch to iterate over.
    first: its first step, counted from 0; rows of earlier steps are not read. lengths: of the rows,
    for batches of about one length: GROUPED batches are drawn together, sorted by length, and taken
    in a random order; None for rows drawn at random.
    """

    def __init__(self, rows: int, job: Job, lengths: Sequence[int] | None = None) -> None:
        assert job.batch_size is not None
        self.lengths = lengths
        self.rows, self.seed, self.batch_size = rows, job.seed, job.batch_size
        self.micro_batch, self.part = job.micro_batch, job.batch_size // job.processes
        self.steps = rows // job.batch_size
        self.epoch = self.first = 0

    def batches(self) -> Iterator[list[int]]:
        """The rows of each whole batch of the epoch, from step `first` on."""
        generator = torch.Generator().manual_seed(self.seed * PRIME + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        if self.lengths is not None:
            order = self._grouped(order[: self.steps * self.batch_size], generator)
        for step in range(self.first, self.steps):
            yield order[step * self.batch_size : (step + 1) * self.batch_size].tolist()

    def _grouped(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """The rows of whole batches, each of about one length."""
        lengths = torch.tensor(self.lengths)
        parts = torch.split(order, GROUPED * self.batch_size)
        ordered = torch.cat([part[lengths[part].argsort(stable=True)] for part in parts])
        batches = ordered.view(-1, self.batch_size)
        return batches[torch.randperm(len(batches), generator=generator)].flatten()

    def __iter__(self) -> Iterator[list[Key]]:
        start = processes.rank() * self.part
        for batch in self.batches():
            for at in range(start, start + self.part, self.micro_batch):
                yield [(self.epoch, row) for row in batch[at : at + self.micro_batch]]


class CachedRows(Dataset[Any]):
    """Rows of images that stay in memory after their first use, up to ROOM bytes."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.left = rows, ROOM
        self._cached: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        new = [number for number in numbers if number not in self._cached]
        loaded = dict(zip(new, self.rows.__getitems__(new) if new else (), strict=True))
        for number, row in loaded.items():
            inputs = row["inputs"]
            if isinstance(inputs, Tensor) and inputs.nbytes <= self.left:
                self._cached[number], self.left = row, self.left - inputs.nbytes
        return [loaded[number] if number in loaded else self._cached[number] for number in numbers]


@dataclass(frozen=True)
class Unreadable:
    """The error that a process returns in place of a batch, for an image that cannot be read."""

    error: DataError


class CheckedRows(Dataset[Any]):
    """Rows, with an error that names an image which cannot be read any more."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        try:
            several = getattr(self.rows, "__getitems__", None)
            rows: list[Any] = several(keys) if several else [self.rows[key] for key in keys]
            return rows
        except Exception as error:  # PIL's decoders raise many kinds
            raise_lack(error)
            stored = (self._stored(key) for key in keys)
            image = next(filter(None, map(unreadable_image, stored)), None)
            if image is None and isinstance(error, OSError):
                image = f"a row ({first_line(error)})"  # the disk fails at times
            if image is None:
                raise
        return [
            Unreadable(DataError(f"{image} cannot be read any more; restore it, and run again."))
        ]

    def _stored(self, key: Any) -> Mapping[str, Any]:
        """The stored image and mask of a row."""
        rows = self.rows
        while isinstance(rows, (KeyedRows, CachedRows)):
            rows, key = rows.rows, key[1] if isinstance(rows, KeyedRows) else key
        names = {"image", "mask"} & {*getattr(rows, "column_names", ())}
        if not names:
            return {}
        stored: Mapping[str, Any] = rows.select_columns([*names]).with_format("arrow")[key]
        return {name: stored[name][0].as_py() for name in names}


def collated(rows: list[Any]) -> Any:
    """A batch of rows; see `CheckedRows`."""
    return rows[0] if isinstance(rows[0], Unreadable) else default_collate(rows)


class Loader(DataLoader[Any]):
    """A DataLoader with one thread of torch while it loads.

    Operations on rows are small, and on a busy CPU waiting for a second thread takes longer.
    Iteration raises DataError for an image that cannot be read any more.
    """

    def __init__(self, rows: Any, **settings: Any) -> None:
        super().__init__(CheckedRows(rows), collate_fn=collated, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        while True:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                torch.set_num_threads(threads)
            if isinstance(batch, Unreadable):
                del batches  # ends the processes, which Python would wait for
                raise batch.error
            yield batch


def cached(rows: Any, job: Job, device: torch.device) -> Any:
    """Rows that stay in memory for the next epoch; for rows that are not changed at random.

    Rows that other processes load do not, since each process would have a copy.
    """
    return rows if workers(job, device)["num_workers"] else CachedRows(rows)


class Loading:
    """Loads the micro-batches of each step, ahead of it if there are processes for loading.

    The position in the data is the number of steps taken, whatever is loaded ahead.
    """

    def __init__(
        self,
        rows: Any,
        job: Job,
        device: torch.device,
        drawn: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """drawn: whether rows are changed at random. lengths: as for `Order`."""
        self.accumulate = job.accumulate
        self.order = Order(len(rows), job, lengths)
        # Without a generator, torch's default one would draw the seeds of processes.
        self.loader = Loader(
            KeyedRows(rows, job.seed, drawn),
            batch_sampler=self.order,
            generator=torch.Generator(),
            **workers(job, device, persistent=True),
        )

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in the data."""
        return self.order.steps

    def batches(self, taken: int = 0) -> Iterator[Iterator[Any]]:
        """The micro-batches of each step after `taken` steps; read all before the next step."""
        while True:
            self.order.epoch, self.order.first = divmod(taken, self.order.steps)
            micro_batches = iter(self.loader)
            while (first := next(micro_batches, None)) is not None:
                taken += 1
                rest = itertools.islice(micro_batches, self.accumulate - 1)
                yield itertools.chain([first], rest)


def in_order(data: Any, job: Job, device: torch.device) -> DataLoader[Any]:
    """Loads all rows in micro-batches, for an evaluation; each process loads a part of them.

    Raises UsageError if there are fewer rows than processes.
    """
    if len(data) < job.processes:
        raise UsageError(
            f"{units.count(len(data), 'row')} cannot be evaluated by "
            f"{units.count(job.processes, 'process')}; start fewer."
        )
    part = range(processes.rank(), len(data), job.processes)
    return Loader(data, sampler=part, batch_size=job.micro_batch, **workers(job, device))


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def workers(job: Job, device: torch.device, persistent: bool = False) -> dict[str, Any]:
    """Arguments of a DataLoader for a device; persistent: whether processes outlive an epoch."""
    cuda, count = device.type == "cuda", job.workers
    if count is None:
        count = min(8, os.cpu_count() or 1) if cuda else 0
    return {
        "num_workers": count,
        "pin_memory": cuda,
        "persistent_workers": persistent and count > 0,
    }
