"""Draws by inclusion probabilities, and the projection of weights to such probabilities.

project: p = clip(c w, p_min, 1) [size], with c such that sum p = total. draw: the indices d [count]
whose interval in the running sum of p contains one of u, u + 1, ... Neither has a backward pass.
They are ops so that each is one kernel launch, and no compiler takes them apart.
"""

import math

import torch
from torch import Tensor

from razorctl.ops.op import Fused, op

GOLDEN = (math.sqrt(5) - 1) / 2
WIDEST = 1e4  # range of log weights that `project` distinguishes


def systematic(p: Tensor, count: int, u: Tensor) -> Tensor:
    """`count` indices in ascending order [count, int64]; d is among them with probability p[d].

    `p` [size] holds inclusion probabilities that sum to `count`; `u` is a uniform number in [0, 1).
    Index d is drawn if its interval in the running sum of p contains one of u, u + 1, ...,
    u + count - 1. It contains at most one of them because p[d] <= 1.
    """
    ends = p.cumsum(0)
    ends = ends * (count / ends[-1])  # so that rounding cannot exclude the last coordinate
    points = u + torch.arange(count, dtype=p.dtype, device=p.device)
    return torch.searchsorted(ends, points, right=True).clamp_(max=len(p) - 1)


@op(
    empty=lambda p, phase, count: (
        p.new_empty(count, dtype=torch.int64),
        p.new_empty(count, dtype=torch.float32),
    ),
    fused=Fused(),
    mutates=("phase",),
)
def draw(p: Tensor, phase: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The next `systematic` draw of `count` from `p` [size], and the probabilities of its indices.

    `phase` [] is the u of the last draw, and is set to the u of this one. It grows by the golden
    ratio modulo 1. That covers [0, 1) evenly over any number of draws and uses none of torch's
    generators. Returns indices [count, int64] and probabilities [count, float32].
    """
    index = systematic(p, count, phase.add_(GOLDEN).frac_())
    return index, p[index].float()


def projected(log_w: Tensor, total: float, p_min: float) -> Tensor:
    """`project` for a total that is possible."""
    log_w = log_w.double().nan_to_num(posinf=WIDEST, neginf=-WIDEST)
    log_w = log_w.clamp(min=log_w.max() - WIDEST)

    def p(log_c: Tensor) -> Tensor:
        return (log_w + log_c).clamp(max=0).exp().clamp(min=p_min)

    low, high = math.log(p_min) - log_w.max(), -log_w.min()
    sections = torch.linspace(0, 1, 33, dtype=log_w.dtype, device=log_w.device)
    for _ in range(8):
        grid = torch.lerp(low, high, sections)
        above = p(grid[:, None]).sum(1) >= total
        above[-1] = True  # by construction of `high`; rounding may deny it
        first = above.to(torch.uint8).argmax(keepdim=True)
        low, high = grid[(first - 1).clamp(min=0)], grid[first]
    return p(high)


@op(
    empty=lambda log_w, *_: torch.empty_like(log_w, dtype=torch.float64),
    fused=Fused(),
)
def project(log_w: Tensor, total: float, p_min: float) -> Tensor:
    """The KL projection of weights exp(log_w) [size] on {sum p = total, p_min <= p <= 1}, float64.

    The minimizer is p = clip(c w, p_min, 1). log c is found by bisection, 32 ways at a time,
    without a host synchronization and without leaving log space. Raises ValueError unless
    size * p_min <= total <= size.
    """
    if not len(log_w) * p_min <= total <= len(log_w):
        raise ValueError(f"no p in [{p_min}, 1] of size {len(log_w)} sums to {total}")
    return projected(log_w, total, p_min)
