"""The GPUs of this machine, and the one to plan for."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

try:
    import pynvml
except ModuleNotFoundError:  # a GPU machine with torch and little else
    pynvml = None

from razorctl import units
from razorctl.config import presets
from razorctl.errors import UsageError
from razorctl.planning.gpus import (
    OLDEST,
    Gpu,
    load,
    memory_size,
    names,
    read_preset,
    too_old,
    usable,
)

T = TypeVar("T")
# Older drivers report up to 3 % less than newer ones, and ECC takes a sixteenth of a card's memory;
# cards of one name differ by far more.
_SAME_MEMORY = 0.07


@dataclass(frozen=True)
class Process:
    """A process on a card; memory_bytes is None if the driver does not report it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Detected:
    """A GPU of this machine as the driver describes it now.

    Args:
        memory_bytes, free_bytes: total memory, and memory that is free at this moment.
        compute_capability: such as "8.9".
        processes: the processes on the card without this one; inside a container the driver may
            report pids of the host, or no processes.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    compute_capability: str
    processes: tuple[Process, ...]


def cards() -> tuple[Detected, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES allows. Never raises.

    Empty without a driver, or without nvidia-ml-py. Indices are nvidia-smi's, which CUDA also
    uses with CUDA_DEVICE_ORDER=PCI_BUS_ID. MIG instances are omitted, and so are cards that the
    driver cannot describe: lost or forbidden cards, and cards without their own memory.
    """
    return _answer(_cards, ())


def driver() -> str:
    """The version of the driver; empty without one or nvidia-ml-py. Never raises."""
    return _answer(pynvml.nvmlSystemGetDriverVersion, "")


def _cards() -> tuple[Detected, ...]:
    uuids = [_uuid(index) for index in range(pynvml.nvmlDeviceGetCount())]
    cards = [_describe(index) for index in _visible(uuids)]
    return tuple(card for card in cards if card is not None)


def _answer(ask: Callable[[], T], otherwise: T) -> T:
    """The result of `ask` while the driver's library is in use, or `otherwise` if that fails."""
    if pynvml is None:
        return otherwise
    try:
        pynvml.nvmlInit()
        return ask()
    except pynvml.NVMLError:
        return otherwise
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def preset_for(detected: Detected) -> Gpu | None:
    """The preset with a detected card's name and memory, the user's own first; None if none has."""
    for file in presets.files("gpus").values():
        gpu = read_preset(file)
        distance = abs(gpu.memory_bytes - detected.memory_bytes)
        if _bare(gpu.name) == _bare(detected.name) and distance < _SAME_MEMORY * gpu.memory_bytes:
            return gpu
    return None


class Target(NamedTuple):
    """A card to plan for.

    Args:
        budget: bytes of the card that may be used.
        source: where the budget comes from.
        assumed: whether the card was guessed from its memory.
    """

    gpu: Gpu
    budget: int
    source: str
    assumed: bool = False


def target(name: str | None = None, vram: str | None = None, index: int = 0) -> Target:
    """The card to plan for, and the memory of it that may be used.

    With `name`, the card is the preset of that name or file. Otherwise it is this machine's card
    with that index. If there is none, it is the preset with the memory nearest to `vram`. The
    budget is `vram` if given, else all memory of a named card or the free memory of this machine's.
    Raises UsageError if no card is found, or if `vram` is more than the card has.
    """
    budget = None if vram is None else memory_size(vram)
    detected = cards() if name is None else ()
    if name is not None:
        gpu = load(name)
        free, source = gpu.memory_bytes, "as its preset says"
    elif index < len(detected):
        card = detected[index]
        preset = preset_for(card)
        if preset is None:
            if tuple(map(int, card.compute_capability.split("."))) < OLDEST:
                raise too_old(card.name)
            raise UsageError(
                f"{card.name} has no preset; name one with --gpu, or write a preset file."
            )
        gpu, free, source = preset, card.free_bytes, "free now"
        if card.processes:
            source += f", beside {len(card.processes)} other processes"
    elif budget is not None:
        gpu = min(map(load, names()), key=lambda card: _unlike(card, budget))
        return Target(gpu, usable(budget, gpu.memory_bytes) or budget, "as asked for", assumed=True)
    else:
        raise _no_card()
    if budget is None:
        return Target(gpu, free, source)
    size = usable(budget, max(free, gpu.memory_bytes))
    if size is None:
        raise UsageError(
            f"{gpu.name} has {units.size(gpu.memory_bytes)}; ask for no more than that."
        )
    return Target(gpu, size, "as asked for")


def _no_card() -> UsageError:
    """The error on a machine without a card that can be planned for."""
    from razorctl.system import devices  # imports torch

    other = devices.other_gpu()
    if other is None:
        return UsageError("no GPU was found; name one with --gpu, or its memory with --vram.")
    return UsageError(
        f"this machine has {other}, which razorctl does not plan for and was never tried on; name "
        "an NVIDIA GPU with --gpu, or its memory with --vram."
    )


def _unlike(card: Gpu, budget: int) -> tuple[float, bool, bool, bool, float]:
    """A sort key: the card that a memory size most likely means comes first.

    Sizes are compared in whole GiB, as on a box. Among equal cards a GeForce comes first, then one
    with bf16, as all since 2020, one that is not of a laptop, and the slowest, which is the safest
    guess.
    """
    distance = abs(math.log(max(1, round(card.memory_bytes / 2**30)) * 2**30 / budget))
    rare = "GeForce" not in card.name, "bf16" not in card.rates, "Laptop" in card.name
    return distance, *rare, card.rates["fp32"]


def _bare(name: str) -> str:
    """A card's name without the brands that only some driver versions include."""
    return name.casefold().removeprefix("nvidia ").removeprefix("tesla ")


def _visible(uuids: Sequence[str]) -> list[int]:
    """Indices of the cards that CUDA_VISIBLE_DEVICES names, read as CUDA reads it.

    The list ends before the first entry that does not name one card, such as -1, an index that is
    too high or a prefix of several UUIDs. It is empty if a card is named twice.
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
        uuid: str = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return ""
    return uuid


def _describe(index: int) -> Detected | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return None
    return Detected(name, memory.total, memory.free, f"{major}.{minor}", _processes(handle))


def _processes(handle: Any) -> tuple[Process, ...]:
    memory: dict[int, int | None] = {}
    for running in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            for process in running(handle):
                if memory.get(process.pid) is None:  # a process can be in both lists
                    memory[process.pid] = process.usedGpuMemory
        except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
            continue  # some cards and drivers do not list processes
    memory.pop(os.getpid(), None)
    return tuple(Process(pid, used) for pid, used in sorted(memory.items()))
