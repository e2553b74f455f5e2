"""Gradient norms of blocks, averaged over the processes of a data-parallel training."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def mean_over_processes(
    norms: Mapping[int, Tensor], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The blocks that any process has a norm for, and the mean of the norms of each.

    Returns indices [n, int64] below `size` in ascending order and means [n, float32], on the host,
    the same in every process. Collective if torch.distributed is initialized: processes without
    norms must call it too. device: where the torch.distributed backend takes tensors. The host
    waits for the device once.
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
