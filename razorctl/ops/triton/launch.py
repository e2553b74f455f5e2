"""Launches of kernels, with explicit options for Triton's compiler, whose defaults change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

# a * b + c is rounded once, as by torch.addcmul in the PyTorch bodies and by the C kernels.
OPTIONS = {"enable_fp_fusion": True}
# Registers of a multiprocessor, and the most of a thread, of all cards since sm_70.
REGISTERS, MOST_REGISTERS = 2**16, 255
WARP = 32
ALIGNED = 16  # Triton's launcher specializes on pointers and numbers that are multiples of this
MOST_PLANS = 4096  # of a kernel, then all are dropped: texts may have new sizes in each step


Plan = tuple[Callable[..., object], tuple[Any, ...]]


class Kernel(JITFunction[Any]):  # type: ignore[misc]
    """A jitted function whose launches go through `launch`.

    plans: key of a launch -> Triton's launcher of the compiled kernel, and the constants; None if a
    hook of Triton hides compiled kernels from callers.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.plans: dict[tuple[Any, ...], Plan] | None = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(launch, self, grid)


@dataclass
class Recorder:
    """Receives launches for a card that is not used, or not yet; see `recorded`.

    Args:
        capability: The compute capability of the card.
        processors: The multiprocessors of the card.
        device: The card, None if it is not in this machine.
        note: Called with the kernel, the grid, the arguments and the settings of a launch.
        trial: Whether launches only serve to find the fastest of several ways.
    """

    capability: int
    processors: int
    device: torch.device | None
    note: Callable[[Kernel, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
    trial: bool = False


_recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """The recorder that receives launches now, None if kernels are launched."""
    return _recorder


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Inside the block nothing is launched; tensors stand for tensors on the recorder's card."""
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
    """The number of multiprocessors of the card that a tensor is on."""
    return count_processors(device) if _recorder is None else _recorder.processors


@cache
def count_processors(device: torch.device) -> int:
    """The number of multiprocessors of a card that is in this machine."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launchable(function: Callable[..., None]) -> Any:
    """`triton.jit` for a kernel that is launched, not called by other kernels."""
    return triton.jit(function) if triton.knobs.runtime.interpret else Kernel(function)


def launch(kernel: Kernel, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launches a kernel. All kernels of this package are launched here.

    The first launch of a kind goes through Triton, which compiles the kernel. Later ones call the
    compiled kernel directly: Triton would inspect all arguments and settings again, which takes
    several times as long.

    Args:
        kernel: The kernel.
        grid: The numbers of programs.
        args: The kernel's arguments without its constants; the first is a tensor.
        settings: The kernel's constants, and options of Triton's compiler.
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
    kernel.plans[key] = compiled[(*grid, 1, 1)[:3]], constants  # which takes all three numbers


def cdiv(count: int, size: int) -> int:
    """count / size, rounded up; Triton's own takes the host a microsecond."""
    return -(-count // size)


def next_power_of_2(size: int) -> int:
    """The least power of 2 that is not below a size."""
    return 1 << (size - 1).bit_length()


def all_registers(warps: int) -> int:
    """The most registers of a thread if a multiprocessor runs one program of `warps`.

    To be set as the limit where ptxas would otherwise spill so that two programs fit.
    """
    return min(MOST_REGISTERS, REGISTERS // (WARP * warps))
