"""The choice of kernels for ops: fused ones if a device has them, else PyTorch bodies.

RAZORCTL_KERNELS=torch disables fused kernels. A kernel that fails is not tried again in the
process: after one warning its op runs the PyTorch body. Out-of-memory errors and errors that leave
the card unusable are raised, since bodies would fail too.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from razorctl.errors import reason_of
from razorctl.ops.op import Op, P, R, first_tensor

log = logging.getLogger(__name__)

SETTING = "RAZORCTL_KERNELS"
CHOICES = ("auto", "torch")

_ran: set[tuple[str, str]] = set()  # (op, kind of device)
_failed: dict[tuple[str, str], str] = {}  # (op, kind of device) -> why
_off: dict[str, str] = {}  # kind of device -> why no kernel is tried there
_failed_ways: dict[tuple[str, str], str] = {}  # ("op by way", kind of device) -> why


def _setting() -> bool:
    setting = os.environ.get(SETTING, "auto") or "auto"
    if setting not in CHOICES:
        log.warning("%s=%s is unknown, so it counts as auto; set auto or torch.", SETTING, setting)
    return setting != "torch"


_wanted = _setting()  # once: a compiled program takes it as a constant


def wanted() -> bool:
    """Whether fused kernels may run."""
    return _wanted


_assumed: bool | None = None


@contextmanager
def assumed(dot: bool) -> Iterator[None]:
    """Inside the block, CPU tensors stand for tensors on a card with fused kernels.

    dot: whether Triton's products run on the card's tensor cores, from compute capability 8.0 on.
    """
    global _assumed
    before, _assumed = _assumed, dot
    try:
        yield
    finally:
        _assumed = before


def assumed_dot() -> bool | None:
    """The `dot` of the innermost `assumed` block; None outside."""
    return _assumed


def fused(device: torch.device) -> bool:
    """Whether a device runs one fused op faster than several operations."""
    return wanted() and (device.type == "cuda" or _assumed is not None)


def on_cpu(device: torch.device) -> bool:
    """Whether tensors are on a CPU and do not stand for a card's."""
    return device.type == "cpu" and _assumed is None


def failures() -> dict[tuple[str, str], str]:
    """(op, kind of device) -> why its kernel is not tried again in this process.

    Some ops have several ways to the same result; a failed way is named "op by way".
    """
    return _failed | _failed_ways


def replaced() -> dict[tuple[str, str], str]:
    """The `failures` after which ops run as PyTorch operations."""
    return dict(_failed)


def outcomes(device: torch.device) -> dict[str, str | None]:
    """Op whose kernel was called in this process, or failed way -> why it failed, or None."""
    failed = failures()
    called = sorted(op for op, where in {*_ran, *failed} if where == device.type)
    return {op: failed.get((op, device.type)) for op in called}


def note_failed_way(op: str, way: str, error: Exception) -> None:
    """Records a way to compute an op on CUDA that is no longer chosen since it failed."""
    why = f"{type(error).__name__}: {error}"
    if (key := (f"{op} by {way}", "cuda")) not in _failed_ways:
        log.warning("%s fails here, so another way is taken: %s", key[0], why.splitlines()[0])
    _failed_ways[key] = why


def give_up(error: Exception, device: str = "cuda") -> bool:
    """Whether an error of a kernel means that no kernel runs here; then none is tried again.

    Errors of imports and of files, such as a cache that cannot be written, mean that. After any
    other error the smallest kernel is launched. If that fails too, the cause is not the first
    kernel, but Triton, or an unsupported card or driver.
    """
    if device != "cuda" or device in _off:
        return device in _off
    cause: Exception | None = error
    if not isinstance(error, OSError | ImportError):
        cause = _probe()
    if cause is None:
        return False
    _off[device] = f"{type(cause).__name__}: {reason_of(cause)}"
    for key in REGISTERED:
        if key[1] == device:
            _failed.setdefault(key, _off[device])
    log.warning(
        "no kernel of Triton runs here, so all ops run as PyTorch operations, slower: %s",
        _off[device],
    )
    return True


def _probe() -> Exception | None:
    """The error of the smallest kernel on the current CUDA device; None if it runs."""
    try:
        if torch.cuda.is_available():
            import_module("razorctl.ops.triton.probe").run()
    except Exception as error:
        return None if out_of_memory(error) else error
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether an error of torch, Triton's launcher or cuBLAS means out of memory."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def fatal(error: Exception, x: Any) -> Exception | None:
    """The error that left the card of `x` unusable; None if the card still works.

    torch raises AcceleratorError for that. After any other error, for example Triton's, the card is
    synchronized, except during the capture of a CUDA graph, which that would break.
    """
    if isinstance(error, torch.AcceleratorError):
        return error
    return None if capturing(x) else unusable(x.device)


def unusable(device: torch.device) -> Exception | None:
    """The error of synchronizing an unusable card; None if the card works."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.AcceleratorError as error:
        return error
    return None


def capturing(x: Any) -> bool:
    """Whether launches for `x` are being captured in a CUDA graph."""
    return getattr(x, "is_cuda", False) and torch.cuda.is_current_stream_capturing()


def _error_for_user(op: str, error: Exception, x: Any) -> Exception | None:
    """The error to raise if the body of `op` would fail too; None if it would not."""
    if out_of_memory(error):
        return torch.OutOfMemoryError(f"the kernel of {op}: {error}")
    dead = fatal(error, x)
    if dead is None:
        return None
    return torch.AcceleratorError(
        f"the kernel of {op}, or one before it, left the card unusable "
        f"({reason_of(dead)}); run again with {SETTING}=torch, which runs PyTorch operations "
        "instead"
    )


def state(device: torch.device) -> str:
    """How ops run on a device, and why, as a phrase."""
    if not wanted():
        return f"PyTorch operations, as {SETTING}=torch says"
    if device.type == "cpu":
        return str(import_module("razorctl.ops.cpu.library").state())
    if device.type != "cuda" or find_spec("triton") is None:
        return "PyTorch operations: no Triton here"
    if device.type in _off:
        return f"PyTorch operations: {_off[device.type]}"
    failed = sorted(op for op, where in _failed if where == device.type)
    but = f", but PyTorch operations for {', '.join(failed)}" if failed else ""
    return f"fused kernels, by Triton{but}"


@dataclass(frozen=True)
class Registered:
    """The kernel and the body of an op on a kind of device; see `register`."""

    kernel: Callable[..., Any]
    takes: Callable[..., bool]
    body: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Calls the kernel, or the body if the kernel does not take the arguments."""
        return self.kernel(*args) if self.takes(*args) else self.body(*args)


REGISTERED: dict[tuple[str, str], Registered] = {}  # by (op, kind of device)


def register(
    op: Op[P, R],
    device: str,
    takes: Callable[..., bool] = lambda *args: True,
    body: Callable[..., R] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers the decorated kernel for `op` on a kind of device.

    Triton launches on the current CUDA device, wherever the tensors are. So the device of the first
    argument is made the current one while the kernel runs.

    Args:
        op: The op.
        device: "cpu" or "cuda".
        takes: Whether the kernel takes the given arguments.
        body: Runs for other arguments, if kernels are disabled, and after the kernel has failed;
            None for the op's body.
    """
    fallback: Callable[..., R] = op.body if body is None else body
    key = op.name, device

    def registered(kernel: Callable[P, R]) -> Callable[P, R]:
        if device in _off:
            _failed[key] = _off[device]
        REGISTERED[key] = Registered(kernel, takes, fallback)
        direct: Callable[..., R] = kernel
        launched = direct
        if device == "cuda" and torch.cuda.device_count() > 1:

            def launched(*args: Any) -> R:
                with torch.cuda.device_of(first_tensor(args)):  # type: ignore[no-untyped-call]
                    return direct(*args)

        def run(*args: Any) -> R:
            if _wanted and key not in _failed and takes(*args):
                try:
                    result = launched(*args)
                    _ran.add(key)
                    return result
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    _note_failure(key, error, first_tensor(args))
            return fallback(*args)

        op.register(device, run)
        return kernel

    return registered


def _note_failure(key: tuple[str, str], error: Exception, x: Tensor) -> None:
    """Records that a kernel has failed on x's device; raises if its op's body would fail too."""
    if capturing(x):
        raise error  # a kernel that cannot be captured has not failed
    if raised := _error_for_user(key[0], error, x):
        raise raised from error
    if give_up(error, key[1]):
        return
    _failed[key] = f"{type(error).__name__}: {error}"
    log.warning(
        "the kernel of %s failed, so it runs as PyTorch operations, slower: %s",
        key[0],
        _failed[key].splitlines()[0],
    )


def attach(module: str) -> None:
    """Imports the kernels of an ops file from the files of its name in ops.cpu and ops.triton.

    Triton's are imported only on machines with Triton and a card that CUDA sees. If one file cannot
    be imported, for example because Triton is too old, no later one is.
    """
    package, name = module.rsplit(".", 1)
    if find_spec(f"{package}.cpu.{name}") is not None:
        import_module(f"{package}.cpu.{name}")
    triton = torch.cuda.is_available() and find_spec("triton") is not None
    if triton and "cuda" not in _off and find_spec(f"{package}.triton.{name}") is not None:
        try:
            import_module(f"{package}.triton.{name}")
        except Exception as error:
            give_up(ImportError(f"{module}: {reason_of(error)}"))
