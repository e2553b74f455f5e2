"""Which kernels the ops run: fused ones where a device has them, else their PyTorch bodies.

RAZORCTL_KERNELS=torch turns fused kernels off. A kernel that fails is not tried again in the
process: its op runs the PyTorch body from then on, after one warning.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

log = logging.getLogger(__name__)

SETTING = "RAZORCTL_KERNELS"
CHOICES = ("auto", "torch")

_failed: dict[tuple[str, str], str] = {}


@cache
def wanted() -> bool:
    """Whether fused kernels may run; an unknown setting is warned of once, and counts as auto."""
    setting = os.environ.get(SETTING, "auto") or "auto"
    if setting not in CHOICES:
        log.warning("%s=%s is unknown, so it counts as auto; set auto or torch.", SETTING, setting)
    return setting != "torch"


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
