"""Which kernels the ops run: fused ones where a device has them, else their PyTorch bodies.

RAZORCTL_KERNELS=torch turns fused kernels off. A kernel that fails is not tried again in the
process: its op runs the PyTorch body from then on, after one warning.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

log = logging.getLogger(__name__)

SETTING = "RAZORCTL_KERNELS"
CHOICES = ("auto", "torch")

_failed: dict[tuple[str, str], str] = {}


def _read() -> bool:
    setting = os.environ.get(SETTING, "auto") or "auto"
    if setting not in CHOICES:
        log.warning("%s=%s is unknown, so it counts as auto; set auto or torch.", SETTING, setting)
    return setting != "torch"


_wanted = _read()  # once: a compiled program takes it as a constant


def wanted() -> bool:
    """Whether fused kernels may run."""
    return _wanted


_assumed = False


@contextmanager
def assumed() -> Iterator[None]:
    """Inside the block, `fused` says of CPU tensors what it says of a card's, as planning needs."""
    global _assumed
    before, _assumed = _assumed, True
    try:
        yield
    finally:
        _assumed = before


def fused(device: torch.device) -> bool:
    """Whether one op that does the work of several is faster there, and so worth taking."""
    return wanted() and (device.type == "cuda" or _assumed)


def failures() -> dict[tuple[str, str], str]:
    """(Op, device) -> why its kernel is not tried again in this process."""
    return dict(_failed)


def register(
    op: CustomOpDef,
    device: str,
    kernel: Callable[..., Any],
    takes: Callable[..., bool] = lambda *args: True,
    body: Callable[..., Any] | None = None,
) -> None:
    """Makes `kernel` what `op` runs on a kind of device.

    takes: whether the kernel takes these arguments; for others, and where kernels are not wanted
    or the kernel has failed, the op runs `body`; None is the op's default body.
    """
    fallback = op._init_fn if body is None else body
    key = op._name, device

    def run(*args: Any) -> Any:
        if wanted() and key not in _failed and takes(*args):
            try:
                return kernel(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                _failed[key] = f"{type(error).__name__}: {error}"
                log.warning(
                    "the kernel of %s failed, so it runs as PyTorch operations, slower: %s",
                    key[0],
                    _failed[key].splitlines()[0],
                )
        return fallback(*args)

    op.register_kernel(device)(run)
