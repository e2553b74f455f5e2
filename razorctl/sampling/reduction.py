"""Gradient norms of blocks, averaged over the processes of a data-parallel training."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def mean_over_processes(
    norms: Mapping[int, Tensor], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The blocks below `size` that any process has a norm for, and the means of what they have.

    Returns indices [n, int64] in ascending order and means [n, float32], on the host, the same in
    every process. With torch.distributed initialized all processes must call it, those without
    norms too; `device` is where its backend takes tensors. One fetch from the device.
    """
    both = torch.zeros(2, size, device=device)  # sums and counts
    if norms:
        index = torch.tensor(list(norms), device=device)
        fresh = torch.stack([norm.to(device) for norm in norms.values()])
        both[:, index] = torch.stack([fresh, torch.ones_like(fresh)])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(both)
    total, count = both.cpu()
    index = count.nonzero().squeeze(1)
    return index, total[index] / count[index]
