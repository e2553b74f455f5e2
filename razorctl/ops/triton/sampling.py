"""The bandit's projection and a systematic draw, each one launch of one program."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import sampling as op
from razorctl.ops.triton.variants import Variant

LARGEST = 2**14  # entries, all of which a program holds
STAGES = 1
WIDEST = constexpr(op.WIDEST)
GOLDEN = constexpr(op.GOLDEN)
HALVINGS = constexpr(36)  # of up to 2 * WIDEST to 1e-6
ROUGH = constexpr(1e-4)  # how far off log_c may be that single precision found
STEPS = constexpr(8)


@triton.jit
def project_kernel(
    log_w, p, size, total: tl.float64, smallest: tl.float64, SIZE: tl.constexpr
):  # fmt: skip
    """p = clip(exp(log_w + log_c), p_min, 1) with the log_c for which it sums to `total`."""
    p_min = tl.full((), smallest, tl.float64)
    log_p_min = tl.log(p_min)
    entry = tl.arange(0, SIZE)
    inside = entry < size
    given = tl.load(log_w + entry, inside, 0).to(tl.float64)
    given = tl.where(given == given, given, 0)
    given = tl.where(given == float("inf"), WIDEST, given)
    given = tl.where(given == float("-inf"), -WIDEST, given)
    highest = tl.max(tl.where(inside, given, float("-inf")), 0)
    given = tl.maximum(given, highest - WIDEST)
    lowest = tl.min(tl.where(inside, given, float("inf")), 0)

    # Cards have few units for doubles, so single precision finds log_c as far as it can.
    low, high, floor = log_p_min - highest, -lowest, log_p_min.to(tl.float32)
    for _ in range(HALVINGS):
        log_c = (low + high) / 2
        shifted = (given + log_c).to(tl.float32)
        ones = tl.sum((inside & (shifted >= 0)).to(tl.int32), 0)
        least = tl.sum((inside & (shifted <= floor)).to(tl.int32), 0)
        between = tl.where(
            inside & (shifted < 0) & (shifted > floor), tl.exp(tl.minimum(shifted, 0)), 0
        )
        above = ones + least * p_min + tl.sum(between, 0) >= total
        low, high = tl.where(above, low, log_c), tl.where(above, log_c, high)

    # Between two entries that reach a bound the sum is linear in c, so a step there is exact.
    log_c = high
    low, high = low - ROUGH, high + ROUGH
    for _ in range(STEPS):
        shifted = given + log_c
        part = tl.maximum(tl.exp(tl.minimum(shifted, 0)), p_min)
        slope = tl.sum(tl.where(inside & (shifted < 0) & (part > p_min), part, 0), 0)
        missing = total - tl.sum(tl.where(inside, part, 0), 0)
        low, high = tl.where(missing > 0, log_c, low), tl.where(missing > 0, high, log_c)
        ratio = missing / tl.where(slope > 0, slope, 1)
        exact = log_c + tl.log(tl.maximum(1 + ratio, 0.5))  # less than half of c is out of bounds
        known = (slope > 0) & (exact >= low) & (exact <= high)
        step = tl.where(known, exact, (low + high) / 2)
        log_c = tl.where(missing == 0, log_c, step)
    part = tl.maximum(tl.exp(tl.minimum(given + log_c, 0)), p_min)
    tl.store(p + entry, tl.where(total < size, part, 1), inside)


@triton.jit
def draw_kernel(p, phase, index, drawn, size, count, SIZE: tl.constexpr):
    """Entry d is drawn for each point u + i in [ends[d - 1], ends[d])."""
    u = tl.load(phase) + GOLDEN
    u -= tl.floor(u)
    tl.store(phase, u)
    entry = tl.arange(0, SIZE)
    inside = entry < size
    chance = tl.load(p + entry, inside, 0)
    ends = tl.cumsum(chance, 0)
    ends = ends * (count / tl.max(ends, 0))
    points = tl.ceil(ends - u)  # so many are below an end, but for the rounding of ends - u
    points = tl.where(u + (points - 1) >= ends, points - 1, points)
    points = tl.where(u + points < ends, points + 1, points)
    points = tl.minimum(tl.maximum(points, 0), count).to(tl.int32)
    points = tl.where(entry < size - 1, points, count)
    first = tl.where(entry > 0, tl.gather(points, tl.maximum(entry - 1, 0), 0), 0)
    # Rounding may put two points into the stretch of an entry whose p is 1.
    for at in tl.static_range(2):
        place = points - 1 if at else first
        here = inside & (points > first)
        tl.store(index + place, entry.to(tl.int64), here)
        tl.store(drawn + place, chance.to(tl.float32), here)


def takes_project(log_w: Tensor, total: float, p_min: float) -> bool:
    """Whether one program can hold all entries; what is infeasible is refused by the op's body."""
    size = len(log_w)
    return 0 < size <= LARGEST and size * p_min <= total <= size


def takes_draw(p: Tensor, phase: Tensor, count: int) -> bool:
    """Whether one program can hold all entries; both tensors are float64."""
    return 0 < len(p) <= LARGEST and {p.dtype, phase.dtype} == {torch.float64}


def _constants(size: int) -> tuple[int, int]:
    """The entries of a program for `size` of them, and its warps."""
    entries = max(128, 1 << (size - 1).bit_length())
    return entries, min(16, max(4, entries // 256))


def project(log_w: Tensor, total: float, p_min: float) -> Tensor:
    """See `razorctl.ops.sampling.project`."""
    p = log_w.new_empty(len(log_w), dtype=torch.float64)
    size, warps = _constants(len(log_w))
    project_kernel[(1,)](
        log_w.contiguous(), p, len(log_w), total, p_min, size, num_warps=warps, num_stages=STAGES
    )
    return p


def draw(p: Tensor, phase: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `razorctl.ops.sampling.draw`."""
    index = p.new_empty(count, dtype=torch.int64)
    drawn = p.new_empty(count, dtype=torch.float32)
    size, warps = _constants(len(p))
    draw_kernel[(1,)](
        p.contiguous(), phase, index, drawn, len(p), count, size,
        num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return index, drawn


def variants(capability: int) -> Iterator[Variant]:
    """What the launches above ask for, for some sizes up to the largest."""
    for size in (768, 3072, LARGEST):
        entries, warps = _constants(size)
        signature = {"log_w": "*fp32", "p": "*fp64", "size": "i32"}
        yield Variant(
            project_kernel, signature | {"total": "fp64", "smallest": "fp64"}, {"SIZE": entries},
            warps, STAGES, f"project {entries}",
        )  # fmt: skip
        signature = {"p": "*fp64", "phase": "*fp64", "index": "*i64", "drawn": "*fp32"}
        yield Variant(
            draw_kernel, signature | {"size": "i32", "count": "i32"}, {"SIZE": entries},
            warps, STAGES, f"draw {entries}", unaligned=("count",),
        )  # fmt: skip
