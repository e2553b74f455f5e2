"""The dtypes in which stock layers compute under autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that stock autocast would compute with."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context without autocast, for a backward pass.

    The forward pass has settled the dtypes, even if a user runs the backward pass under autocast.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
