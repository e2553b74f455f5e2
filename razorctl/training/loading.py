"""The order in which a run takes its training rows, from any step on."""

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from razorctl import processes, units
from razorctl.data.own.images import unreadable
from razorctl.data.own.stream import Read, Stream
from razorctl.errors import DataError, UsageError
from razorctl.job import Job

ROOM = 256 << 20  # bytes of the rows that a data set keeps in memory
PRIME = 1_000_003  # of seeds and what is counted under each
Key = tuple[int, SupportsIndex]  # the epoch and the row, by its number or as it was read


class KeyedRows(Dataset[Any]):
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

    def _draw(self, epoch: int, row: SupportsIndex) -> Any:
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        seed = (self.seed * PRIME + epoch) * PRIME + index(row)
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

    Each process takes its own part of a batch, which is one after the other by rank. An epoch ends
    with its last whole batch. epoch: the one to iterate over. first: its first step, counted from
    0; rows of earlier steps are not read.
    """

    def __init__(self, rows: int, job: Job) -> None:
        assert job.batch_size is not None
        self.rows, self.seed, self.batch_size = rows, job.seed, job.batch_size
        self.micro_batch, self.part = job.micro_batch, job.batch_size // job.processes
        self.steps = rows // job.batch_size
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(self.seed * PRIME + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        for step in range(self.first, self.steps):
            start = step * self.batch_size + processes.rank() * self.part
            for at in range(start, start + self.part, self.micro_batch):
                rows = order[at : at + self.micro_batch].tolist()
                yield [(self.epoch, row) for row in rows]


class StreamOrder(Sampler[list[Key]]):
    """As `Order`, of a stream, which this process reads; what loads rows gets them as keys."""

    def __init__(self, stream: Stream, job: Job) -> None:
        assert job.batch_size is not None
        self.stream, self.seed, self.batch_size = stream, job.seed, job.batch_size
        self.micro_batch, self.part = job.micro_batch, job.batch_size // job.processes
        self.steps = stream.count and stream.count // job.batch_size
        self.epoch = self.first = 0

    def __iter__(self) -> Iterator[list[Key]]:
        rows = self.stream.shuffled(self.seed, self.epoch, self.first * self.batch_size)
        while len(batch := list(itertools.islice(rows, self.batch_size))) == self.batch_size:
            start = processes.rank() * self.part
            for at in range(start, start + self.part, self.micro_batch):
                yield [(self.epoch, row) for row in batch[at : at + self.micro_batch]]


class CachedRows(Dataset[Any]):
    """Rows of images that stay in memory once they are made, as far as they fit into ROOM bytes.

    Texts do not stay: their padding depends on the micro-batch.
    """

    def __init__(self, rows: Any) -> None:
        self.rows, self.left = rows, ROOM
        self._known: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        new = [number for number in numbers if number not in self._known]
        made = dict(zip(new, self.rows.__getitems__(new) if new else (), strict=True))
        for number, row in made.items():
            inputs = row["inputs"]
            if isinstance(inputs, Tensor) and inputs.nbytes <= self.left:
                self._known[number], self.left = row, self.left - inputs.nbytes
        return [made[number] if number in made else self._known[number] for number in numbers]


@dataclass(frozen=True)
class Unreadable:
    """What comes instead of a batch with an image that cannot be read, from any process."""

    error: DataError


class CheckedRows(Dataset[Any]):
    """Rows; an image that was good when it was checked, and cannot be read now, is named."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        try:
            several = getattr(self.rows, "__getitems__", None)
            found: list[Any] = several(keys) if several else [self.rows[key] for key in keys]
            return found
        except Exception:  # PIL's decoders raise many kinds
            stored = (self._stored(key) for key in keys)
            named = next(filter(None, map(unreadable, stored)), None)
            if named is None:
                raise
        return [
            Unreadable(DataError(f"{named} cannot be read any more; restore it, and run again."))
        ]

    def _stored(self, key: Any) -> Mapping[str, Any]:
        """A row as it is stored."""
        rows = self.rows
        while isinstance(rows, (KeyedRows, CachedRows)):
            rows, key = rows.rows, key[1] if isinstance(rows, KeyedRows) else key
        if isinstance(key, Read):
            return key.values
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

    Rows are small: on a busy CPU, waiting for a second thread takes longer than their operations.
    Iterating raises DataError for an image that cannot be read any more.
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
                del batches  # ends its processes, for which Python would wait later
                raise batch.error
            yield batch


def cached(rows: Any, device: torch.device) -> Any:
    """Rows that are not changed at random, as a run reads them again and again.

    Processes that load for CUDA would each keep their own.
    """
    return rows if isinstance(rows, Stream) or workers(device) else CachedRows(rows)


class Loading:
    """Loads the micro-batches of each step; on CUDA by processes of its own, which load ahead.

    The place in the data is the number of steps taken, so what is loaded ahead does not count.
    begun: the epoch and the number of steps before it, which only a stream need be told.
    """

    def __init__(self, rows: Any, job: Job, device: torch.device, drawn: bool = False) -> None:
        """drawn: as of `KeyedRows`."""
        self.accumulate = job.accumulate
        self.order: Order | StreamOrder
        if isinstance(rows, Stream):
            self.order, rows = StreamOrder(rows, job), rows.prepared
        else:
            self.order = Order(len(rows), job)
        self.begun = (0, 0)
        # Its own generator: the seeds of the processes are not drawn from torch's.
        self.loader = Loader(
            KeyedRows(rows, job.seed, drawn),
            batch_sampler=self.order,
            generator=torch.Generator(),
            **workers(device, persistent=True),
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole batches in the data; None if that is not known."""
        return self.order.steps

    def batches(self, taken: int = 0) -> Iterator[Iterator[Any]]:
        """The micro-batches of each step after the first `taken`; take all before the next step.

        Raises DataError if a whole epoch of a stream has no batch.
        """
        epoch, before = self.begun
        if isinstance(self.order, Order):
            epoch = taken // self.order.steps
            before = epoch * self.order.steps
        while True:
            self.begun = (epoch, before)
            self.order.epoch, self.order.first = epoch, taken - before
            micro_batches = iter(self.loader)
            while (first := next(micro_batches, None)) is not None:
                taken += 1
                rest = itertools.islice(micro_batches, self.accumulate - 1)
                yield itertools.chain([first], rest)
            if taken == before:
                raise DataError("the training rows are fewer than a batch; give --batch-size less.")
            epoch, before = epoch + 1, taken


class StoredOrder(Sampler[list[Read]]):
    """The rows of each micro-batch of a stream as they are stored, to the last row.

    Each process takes its own part of them.
    """

    def __init__(self, stream: Stream, job: Job) -> None:
        self.stream, self.micro_batch, self.processes = stream, job.micro_batch, job.processes

    def __iter__(self) -> Iterator[list[Read]]:
        rows = self.stream.in_order()
        while batch := list(itertools.islice(rows, self.micro_batch * self.processes)):
            if own := batch[processes.rank() :: self.processes]:
                yield own


def in_order(data: Any, job: Job, device: torch.device) -> DataLoader[Any]:
    """Loads all rows in micro-batches, for an evaluation; each process loads its own part.

    Raises UsageError if there are fewer rows than processes.
    """
    if isinstance(data, Stream):
        order: Any = StoredOrder(data, job)
        return Loader(data.prepared, batch_sampler=order, **workers(device))
    own = range(processes.rank(), len(data), job.processes)
    if len(data) < job.processes:
        there = units.count(job.processes, "process")
        rows = units.count(len(data), "row")
        raise UsageError(f"{rows} cannot be evaluated by {there}; start fewer.")
    return Loader(data, sampler=own, batch_size=job.micro_batch, **workers(device))


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def workers(device: torch.device, persistent: bool = False) -> dict[str, Any]:
    """Arguments of a DataLoader for a device; persistent: whether processes outlive an epoch."""
    if device.type != "cuda":
        return {}
    count = min(8, os.cpu_count() or 1)
    return {"num_workers": count, "pin_memory": True, "persistent_workers": persistent}
