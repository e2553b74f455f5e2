"""Launches of kernels, and what each asks of Triton's compiler, whose own defaults change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

# a * b + c is rounded once, as by torch.addcmul in the PyTorch bodies, and by the C kernels.
OPTIONS = {"enable_fp_fusion": True}
# Of a multiprocessor, and the most of a thread; all cards since sm_70 have as many.
REGISTERS, MOST_REGISTERS = 2**16, 255
WARP = 32
ALIGNED = 16  # bytes of a pointer, or the number itself: what Triton's launcher specializes on
MOST_PLANS = 4096  # of a kernel, all forgotten then: texts may have new sizes in each step


Plan = tuple[Callable[..., object], tuple[Any, ...]]


class Kernel(JITFunction[Any]):  # type: ignore[misc]
    """A jitted function whose launches go through `launch`.

    plans: what launches it again, and its constants, by all that it was compiled for and the grid;
    None if a hook of Triton's keeps from its caller what was compiled.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.plans: dict[tuple[Any, ...], Plan] | None = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(launch, self, grid)


@dataclass
class Recorder:
    """Takes launches for a card that is not used, or not yet; see `recorded`.

    capability, processors: of the card. device: where the card is; None if it is not here. note:
    called with the kernel, the grid, the arguments and the settings of a launch. trial: whether it
    is one that only finds out which way is the fastest.
    """

    capability: int
    processors: int
    device: torch.device | None
    note: Callable[[Kernel, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
    trial: bool = False


_recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """What takes launches in their place."""
    return _recorder


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Inside the block nothing is launched, and tensors stand for those of the recorder's card."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def capability(device: torch.device) -> int:
    """The compute capability of the card that a tensor is on: 75, 80, ..."""
    return _capability(device) if _recorder is None else _recorder.capability


def processors(device: torch.device) -> int:
    """How many multiprocessors the card has that a tensor is on."""
    return count_processors(device) if _recorder is None else _recorder.processors


@cache
def count_processors(device: torch.device) -> int:
    """How many multiprocessors a card has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launchable(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that is launched, rather than called by others."""
    return triton.jit(function) if triton.knobs.runtime.interpret else Kernel(function)


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launches a kernel. All kernels of this package are launched here.

    args: the kernel's arguments but its constants; the first is a tensor. settings: its constants,
    and options of Triton's compiler. The first launch of a kind goes through Triton, which compiles
    the kernel. Later ones give the arguments to what it compiled: Triton would look at each of them
    and at all settings again, which takes several times as long.
    """
    if _recorder is not None:
        _recorder.note(kernel, grid, args, settings)
        return
    if kernel.plans is None:
        kernel.run(*args, grid=grid, warmup=False, **settings, **OPTIONS)
        return
    kinds = [(a.dtype, a.data_ptr() % ALIGNED) if isinstance(a, Tensor) else a for a in args]
    key = args[0].get_device(), grid, *kinds, *settings, *settings.values()
    plan = kernel.plans.get(key)
    if plan is not None:
        again, constants = plan
        again(*args, *constants)
        return
    compiled = kernel.run(*args, grid=grid, warmup=False, **settings, **OPTIONS)
    if compiled is None:
        kernel.plans = None
        return
    if len(kernel.plans) >= MOST_PLANS:
        kernel.plans.clear()
    constants = tuple(settings[name] for name in kernel.arg_names[len(args) :])
    kernel.plans[key] = compiled[grid], constants


def cdiv(count: int, size: int) -> int:
    """count / size, rounded up; Triton's own takes the host a microsecond."""
    return -(-count // size)


def next_power_of_2(size: int) -> int:
    """The least power of 2 that is not below a size."""
    return 1 << (size - 1).bit_length()


def all_registers(warps: int) -> int:
    """How many a thread may have if a multiprocessor runs one program of so many warps.

    To be given as the limit where ptxas would spill some without one, so that two programs fit.
    """
    return min(MOST_REGISTERS, REGISTERS // (WARP * warps))
