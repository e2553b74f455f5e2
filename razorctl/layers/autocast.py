"""The dtypes that stock layers compute in under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Computed once: torch.compile cannot trace this check in torch 2.11.
_HERE = torch.accelerator.current_accelerator() or torch.device("cpu")  # of any plugin of torch
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", _HERE.type)
AVAILABLE = frozenset(name for name in _DEVICES if torch.amp.is_autocast_available(name))


_NOTHING = nullcontext()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that stock autocast would cast `x` to for a GEMM."""
    dtype, device = x.dtype, x.device.type
    if device not in AVAILABLE or dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return dtype
    return torch.get_autocast_dtype(device)


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in its `compute_dtype`."""
    dtype = compute_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context without autocast, for a backward pass.

    The forward pass has fixed the dtypes. A backward pass under autocast must not change them.
    """
    kind = device.type
    if kind not in AVAILABLE or not torch.is_autocast_enabled(kind):
        return _NOTHING
    return torch.autocast(kind, enabled=False)
