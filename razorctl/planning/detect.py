"""The GPUs of this machine, and the one to plan for."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from razorctl.config import presets
from razorctl.errors import UsageError
from razorctl.planning.gpus import Gpu, load, memory_size, names, read

# Older drivers report up to 3 % less than newer ones; cards of one name differ by far more.
_SAME_MEMORY = 0.05


@dataclass(frozen=True)
class Process:
    """A process on a card; memory_bytes is None where the driver does not say."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Detected:
    """A GPU of this machine as the driver describes it now.

    memory_bytes, free_bytes: in all, and what nobody holds at this moment.
    compute_capability: such as "8.9". processes: those on the card, this one left out;
    inside a container the driver may name pids of the host, or none.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: str
    processes: tuple[Process, ...]


def detect() -> tuple[Detected, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES lets through; none without a driver, never an error.

    Indices count as nvidia-smi does, which is CUDA's way too under CUDA_DEVICE_ORDER=PCI_BUS_ID.
    A card that the driver cannot describe (lost, forbidden, without memory of its own) and
    instances of a card (MIG) are left out.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        uuids = [_uuid(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cards = [_describe(index) for index in _visible(uuids)]
        return tuple(card for card in cards if card is not None)
    except pynvml.NVMLError:
        return ()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def preset_for(detected: Detected) -> Gpu | None:
    """The preset of a card that was found, by its name and memory; the user's own come first."""
    for file in presets.files("gpus").values():
        gpu = read(file)
        distance = abs(gpu.memory_bytes - detected.memory_bytes)
        if _bare(gpu.name) == _bare(detected.name) and distance < _SAME_MEMORY * gpu.memory_bytes:
            return gpu
    return None


class Target(NamedTuple):
    """A card to plan for.

    budget: bytes of it that may be used. source: where that figure is from. assumed: whether the
    card was guessed from its memory.
    """

    gpu: Gpu
    budget: int
    source: str
    assumed: bool = False


def target(name: str | None = None, vram: str | None = None, index: int = 0) -> Target:
    """The card to plan for.

    By `name`, a preset's or a preset file's, or else the card of this machine with that index, or
    else the preset of the memory nearest to `vram`. Of a named card all may be used, of one that is
    there what is free now; `vram` says otherwise. Raises UsageError if that names no card, or more
    memory than it has.
    """
    budget = None if vram is None else memory_size(vram)
    found = detect() if name is None else ()
    if name is not None:
        gpu = load(name)
        free, source = gpu.memory_bytes, "as its preset says"
    elif found[index:]:
        known = preset_for(found[index])
        if known is None:
            raise UsageError(
                f"{found[index].name} has no preset; name one with --gpu, or write one."
            )
        gpu, free, source = known, found[index].free_bytes, "free now"
        if found[index].processes:
            source += f", beside {len(found[index].processes)} other processes"
    elif budget is not None:
        cards = [load(each) for each in names()]
        gpu = min(
            cards, key=lambda card: (abs(math.log(card.memory_bytes / budget)), card.rates["fp32"])
        )
        return Target(gpu, budget, "as asked for", assumed=True)
    else:
        raise UsageError("no GPU was found; name one with --gpu, or its memory with --vram.")
    if budget is None:
        return Target(gpu, free, source)
    if budget > max(free, gpu.memory_bytes):
        raise UsageError(
            f"{gpu.name} has {gpu.memory_bytes / 2**30:.1f} GiB; ask for no more than that."
        )
    return Target(gpu, budget, "as asked for")


def _bare(name: str) -> str:
    """A card's name without the brands that come and go with the driver's version."""
    return name.casefold().removeprefix("nvidia ").removeprefix("tesla ")


def _visible(uuids: Sequence[str]) -> list[int]:
    """Indices of the cards that CUDA_VISIBLE_DEVICES names, as CUDA reads it.

    The first entry that names no card (-1, too high, a prefix of several UUIDs) ends the list;
    a card named twice empties it.
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.startswith("GPU-"):
            matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            matches = [index for index in range(len(uuids)) if entry == str(index)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def _uuid(index: int) -> str:
    try:
        return _text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except pynvml.NVMLError:
        return ""


def _describe(index: int) -> Detected | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = _text(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return None
    return Detected(name, memory.total, memory.free, f"{major}.{minor}", _processes(handle))


def _processes(handle: Any) -> tuple[Process, ...]:
    found: dict[int, int | None] = {}
    for running in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            for process in running(handle):
                if found.get(process.pid) is None:  # one that computes and draws is in both lists
                    found[process.pid] = process.usedGpuMemory
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
            continue  # not every card or driver lists them
    found.pop(os.getpid(), None)
    return tuple(Process(pid, used) for pid, used in sorted(found.items()))


def _text(value: str | bytes) -> str:
    """Text as older versions of the binding (bytes) and newer ones hand it out."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
