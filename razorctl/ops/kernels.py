"""Which kernels the ops run: fused ones where a device has them, else their PyTorch bodies.

RAZORCTL_KERNELS=torch turns fused kernels off. A kernel that fails is not tried again in the
process: its op runs the PyTorch body from then on, after one warning. No error is passed over that
leaves the card unusable, or for which memory is too short: bodies could not run either.
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

from razorctl.ops.op import Op, P, R, first_tensor

log = logging.getLogger(__name__)

SETTING = "RAZORCTL_KERNELS"
CHOICES = ("auto", "torch")

_ran: set[tuple[str, str]] = set()  # (op, kind of device), as below
_failed: dict[tuple[str, str], str] = {}
_off: dict[str, str] = {}  # kind of device -> why no kernel is tried there
_failed_ways: dict[tuple[str, str], str] = {}  # ("op by way", kind of device), as below


def _read() -> bool:
    setting = os.environ.get(SETTING, "auto") or "auto"
    if setting not in CHOICES:
        log.warning("%s=%s is unknown, so it counts as auto; set auto or torch.", SETTING, setting)
    return setting != "torch"


_wanted = _read()  # once: a compiled program takes it as a constant


def wanted() -> bool:
    """Whether fused kernels may run."""
    return _wanted


_assumed: bool | None = None


@contextmanager
def assumed(dot: bool) -> Iterator[None]:
    """Inside the block, CPU tensors stand for those of a card on which fused kernels run.

    dot: whether Triton's products run on the card's tensor cores, as from compute capability 8.0
    on.
    """
    global _assumed
    before, _assumed = _assumed, dot
    try:
        yield
    finally:
        _assumed = before


def assumed_dot() -> bool | None:
    """The `dot` of the innermost `assumed` block, None outside."""
    return _assumed


def fused(device: torch.device) -> bool:
    """Whether one op that does the work of several is faster there, and so worth taking."""
    return wanted() and (device.type == "cuda" or _assumed is not None)


def on_cpu(device: torch.device) -> bool:
    """Whether tensors are on a CPU, and stand for no others."""
    return device.type == "cpu" and _assumed is None


def failures() -> dict[tuple[str, str], str]:
    """(Op, device) -> why its kernel is not tried again in this process.

    Of an op that has several ways to the same result, those that failed are named as "op by way".
    """
    return _failed | _failed_ways


def replaced() -> dict[tuple[str, str], str]:
    """`failures`, but only of ops that run as PyTorch operations for it."""
    return dict(_failed)


def outcomes(device: torch.device) -> dict[str, str | None]:
    """Op whose kernel was called in this process -> why it failed, or None; and failed ways."""
    failed = failures()
    called = sorted(op for op, where in {*_ran, *failed} if where == device.type)
    return {op: failed.get((op, device.type)) for op in called}


def note_failed_way(op: str, way: str, error: Exception) -> None:
    """Names one of several ways to compute an op on CUDA, which is not chosen since it fails."""
    why = f"{type(error).__name__}: {error}"
    if (key := (f"{op} by {way}", "cuda")) not in _failed_ways:
        log.warning("%s fails here, so another way is taken: %s", key[0], why.splitlines()[0])
    _failed_ways[key] = why


def give_up(error: Exception, device: str = "cuda") -> bool:
    """Whether an error of a kernel says that none runs here; then none is tried again.

    An error of files, such as a cache that cannot be written, says so, and one of imports. After
    any other the least kernel there is is launched: what it fails for is no fault of the other one,
    but that of a card or a driver that Triton does not know, or of Triton.
    """
    if device != "cuda" or device in _off:
        return device in _off
    cause: Exception | None = error
    if not isinstance(error, OSError | ImportError):
        cause = _probe()
    if cause is None:
        return False
    _off[device] = f"{type(cause).__name__}: {_line(cause)}"
    for key in REGISTERED:
        if key[1] == device:
            _failed.setdefault(key, _off[device])
    log.warning(
        "no kernel of Triton runs here, so all ops run as PyTorch operations, slower: %s",
        _off[device],
    )
    return True


def _probe() -> Exception | None:
    """The error of the least kernel on the current CUDA device; None if it runs."""
    try:
        if torch.cuda.is_available():
            import_module("razorctl.ops.triton.probe").run()
    except Exception as error:
        return None if out_of_memory(error) else error
    return None


def out_of_memory(error: Exception) -> bool:
    """Whether memory was too short, as torch, Triton's launcher and cuBLAS say it."""
    words = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def fatal(error: Exception, x: Any) -> Exception | None:
    """The error after which the card of `x` can run nothing any more; None if it can.

    torch says so itself in an error of its own; after any other, of Triton for instance, the card
    is asked, unless a CUDA graph is being captured, which that would break.
    """
    if isinstance(error, torch.AcceleratorError):
        return error
    return None if _capturing(x) else unusable(x.device)


def unusable(device: torch.device) -> Exception | None:
    """The error by which a card says that it can run nothing any more; None if it can."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.AcceleratorError as found:
        return found
    return None


def _capturing(x: Any) -> bool:
    """Whether what is launched for `x` becomes part of a CUDA graph now."""
    return getattr(x, "is_cuda", False) and torch.cuda.is_current_stream_capturing()


def _told(op: str, error: Exception, x: Any) -> Exception | None:
    """What a user is told in place of an error after which the body of `op` would fail too."""
    if out_of_memory(error):
        return torch.OutOfMemoryError(f"the kernel of {op}: {error}")
    dead = fatal(error, x)
    if dead is None:
        return None
    return torch.AcceleratorError(
        f"the kernel of {op}, or one before it, left the card unusable "
        f"({_line(dead)}); run again with {SETTING}=torch, which runs PyTorch operations instead"
    )


def _line(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def state(device: torch.device) -> str:
    """What ops run as on a device, and why, in a phrase."""
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
    """What an op runs as on a kind of device; see `register`."""

    kernel: Callable[..., Any]
    takes: Callable[..., bool]
    body: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """The op by its kernel, or by its body if the kernel does not take the arguments."""
        return self.kernel(*args) if self.takes(*args) else self.body(*args)


REGISTERED: dict[tuple[str, str], Registered] = {}  # by (op, kind of device)


def register(
    op: Op[P, R],
    device: str,
    takes: Callable[..., bool] = lambda *args: True,
    body: Callable[..., R] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes the kernel that it decorates what `op` runs on a kind of device.

    takes: whether the kernel takes these arguments; for others, and where kernels are not wanted
    or the kernel has failed, the op runs `body`; None is the op's default body. The CUDA device of
    the first argument is the current one while the kernel runs, since Triton launches on the
    current device, wherever the tensors are.
    """
    instead: Callable[..., R] = op.body if body is None else body
    key = op.name, device

    def registered(kernel: Callable[P, R]) -> Callable[P, R]:
        if device in _off:
            _failed[key] = _off[device]
        REGISTERED[key] = Registered(kernel, takes, instead)
        own: Callable[..., R] = kernel
        launched = own
        if device == "cuda" and torch.cuda.device_count() > 1:

            def launched(*args: Any) -> R:
                with torch.cuda.device_of(first_tensor(args)):  # type: ignore[no-untyped-call]
                    return own(*args)

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
            return instead(*args)

        op.register(device, run)
        return kernel

    return registered


def _note_failure(key: tuple[str, str], error: Exception, x: Tensor) -> None:
    """Notes that a kernel has failed on the device of x; raises if its op's body would fail too."""
    if _capturing(x):
        raise error  # a kernel that cannot be captured has not failed
    if told := _told(key[0], error, x):
        raise told from error
    if give_up(error, key[1]):
        return
    _failed[key] = f"{type(error).__name__}: {error}"
    log.warning(
        "the kernel of %s failed, so it runs as PyTorch operations, slower: %s",
        key[0],
        _failed[key].splitlines()[0],
    )


def attach(module: str) -> None:
    """Imports the kernels of an ops file, which lie in files of its name in ops.cpu and ops.triton.

    Those in Triton only where it runs, on a machine with a card that CUDA sees. If one of them
    cannot be imported, with a Triton that lacks what it needs for instance, no other one is.
    """
    package, name = module.rsplit(".", 1)
    if find_spec(f"{package}.cpu.{name}") is not None:
        import_module(f"{package}.cpu.{name}")
    triton = torch.cuda.is_available() and find_spec("triton") is not None
    if triton and "cuda" not in _off and find_spec(f"{package}.triton.{name}") is not None:
        try:
            import_module(f"{package}.triton.{name}")
        except Exception as error:
            give_up(ImportError(f"{module}: {_line(error)}"))
