"""Kernels of ops.sampling: the bandit's projection and a draw, each one launch of one program.

p = clip(c w, p_min, 1) with sum p = total; and the entries whose interval of the running sum of p
holds one of u, u + 1, ...
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels
from razorctl.ops import sampling as op
from razorctl.ops.triton.launch import launchable
from razorctl.ops.triton.variants import Variant

BLOCK = 2048  # entries that a program holds; more of them are read again from the cache
WARPS, STAGES = 8, 1
WIDEST = constexpr(op.WIDEST)
GOLDEN = constexpr(op.GOLDEN)
HALVINGS = constexpr(36)  # of up to 2 * WIDEST to 1e-6
ROUGH = constexpr(1e-4)  # the largest error of log_c in single precision
STEPS = constexpr(8)


@triton.jit
def _weights(log_w, entry, size, least):
    """A block of log weights, made finite and at least `least`, and its mask."""
    inside = entry < size
    weights = tl.load(log_w + entry, inside, 0).to(tl.float64)
    weights = tl.where(weights == weights, weights, 0)
    weights = tl.where(weights == float("inf"), WIDEST, weights)
    weights = tl.where(weights == float("-inf"), -WIDEST, weights)
    return tl.maximum(weights, least), inside


@triton.jit
def _rough_sum(log_w, log_c, size, least, p_min, BLOCK: tl.constexpr):
    """The sum of p for a log_c; its exponentials are in single precision."""
    floor = tl.log(p_min).to(tl.float32)
    between, bounds = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        weights, inside = _weights(log_w, start + tl.arange(0, BLOCK), size, least)
        shifted = (weights + log_c).to(tl.float32)
        free = (shifted < 0) & (shifted > floor)
        between += tl.where(inside & free, tl.exp(tl.minimum(shifted, 0)), 0)
        bounds += tl.where(inside & (free == 0), tl.where(shifted < 0, p_min, 1), 0)
    return tl.sum(between, 0).to(tl.float64) + tl.sum(bounds, 0)


@triton.jit
def _exact_sum(log_w, log_c, size, least, p_min, BLOCK: tl.constexpr):
    """The sum of p for a log_c, and the sum of the p that are at neither bound."""
    parts, free = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        weights, inside = _weights(log_w, start + tl.arange(0, BLOCK), size, least)
        shifted = weights + log_c
        part = tl.maximum(tl.exp(tl.minimum(shifted, 0)), p_min)
        parts += tl.where(inside, part, 0)
        free += tl.where(inside & (shifted < 0) & (part > p_min), part, 0)
    return tl.sum(parts, 0), tl.sum(free, 0)


@launchable
def project_kernel(
    log_w, p, size, total: tl.float64, smallest: tl.float64, BLOCK: tl.constexpr
):  # fmt: skip
    """p = clip(exp(log_w + log_c), p_min, 1) with the log_c for which it sums to `total`."""
    p_min = tl.full((), smallest, tl.float64)
    highest = tl.full((), float("-inf"), tl.float64)
    lowest = tl.full((), float("inf"), tl.float64)
    for start in range(0, size, BLOCK):
        weights, inside = _weights(log_w, start + tl.arange(0, BLOCK), size, float("-inf"))
        highest = tl.maximum(highest, tl.max(tl.where(inside, weights, float("-inf")), 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(inside, weights, float("inf")), 0))
    least = highest - WIDEST

    # Cards have few units for doubles, so log_c is found roughly in single precision first.
    low, high = tl.log(p_min) - highest, -tl.maximum(lowest, least)
    for _ in range(HALVINGS):
        log_c = (low + high) / 2
        above = _rough_sum(log_w, log_c, size, least, p_min, BLOCK) >= total
        low, high = tl.where(above, low, log_c), tl.where(above, log_c, high)

    # Between the c at which entries reach a bound the sum is linear in c, so a step is exact.
    log_c = high
    low, high = low - ROUGH, high + ROUGH
    for _ in range(STEPS):
        parts, free = _exact_sum(log_w, log_c, size, least, p_min, BLOCK)
        missing = total - parts
        low, high = tl.where(missing > 0, log_c, low), tl.where(missing > 0, high, log_c)
        ratio = missing / tl.where(free > 0, free, 1)
        exact = log_c + tl.log(tl.maximum(1 + ratio, 0.5))  # less than half of c is out of bounds
        valid = (free > 0) & (exact >= low) & (exact <= high)
        next_log_c = tl.where(valid, exact, (low + high) / 2)
        log_c = tl.where(missing == 0, log_c, next_log_c)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        weights, inside = _weights(log_w, entry, size, least)
        part = tl.maximum(tl.exp(tl.minimum(weights + log_c, 0)), p_min)
        tl.store(p + entry, tl.where(total < size, part, 1), inside)


@launchable
def draw_kernel(p, phase, index, drawn, size, count, BLOCK: tl.constexpr):
    """Entry d is drawn for each point u + i in [ends[d - 1], ends[d])."""
    u = tl.load(phase) + GOLDEN
    u -= tl.floor(u)
    sums = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        sums += tl.load(p + entry, entry < size, 0)
    factor = count / tl.sum(sums, 0)

    end = tl.full((), 0, tl.float64)  # of the blocks so far
    before = tl.full((), 0, tl.int32)  # points in them
    for start in range(0, size, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        chance = tl.load(p + entry, entry < size, 0)
        ends = (end + tl.cumsum(chance, 0)) * factor
        points = tl.ceil(ends - u)  # the points below an end, but for the rounding of ends - u
        points = tl.where(u + (points - 1) >= ends, points - 1, points)
        points = tl.where(u + points < ends, points + 1, points)
        points = tl.minimum(tl.maximum(points, 0), count).to(tl.int32)
        points = tl.where(entry < size - 1, points, count)
        first = tl.gather(points, tl.maximum(tl.arange(0, BLOCK) - 1, 0), 0)
        first = tl.where(entry > start, first, before)
        # Rounding may put two points into the interval of an entry whose p is 1.
        for second in tl.static_range(2):
            place = points - 1 if second else first
            here = (entry < size) & (points > first)
            tl.store(index + place, entry.to(tl.int64), here)
            tl.store(drawn + place, chance.to(tl.float32), here)
        end += tl.sum(chance, 0)
        before = tl.max(points, 0)
    tl.store(phase, u)  # all warps have read it: sums wait for them


def takes_project(log_w: Tensor, total: float, p_min: float) -> bool:
    """Whether there is a projection; the op's body raises an error if not."""
    size = len(log_w)
    return size > 0 and size * p_min <= total <= size


def takes_draw(p: Tensor, phase: Tensor, count: int) -> bool:
    """Whether both tensors are float64."""
    return {p.dtype, phase.dtype} == {torch.float64}


OPTIONS = {"BLOCK": BLOCK, "num_warps": WARPS, "num_stages": STAGES}


@kernels.register(op.project, "cuda", takes_project)
def project(log_w: Tensor, total: float, p_min: float) -> Tensor:
    p = log_w.new_empty(len(log_w), dtype=torch.float64)
    project_kernel[(1,)](log_w.contiguous(), p, len(p), total, p_min, **OPTIONS)
    return p


@kernels.register(op.draw, "cuda", takes_draw)
def draw(p: Tensor, phase: Tensor, count: int) -> tuple[Tensor, Tensor]:
    index = p.new_empty(count, dtype=torch.int64)
    drawn = p.new_empty(count, dtype=torch.float32)
    draw_kernel[(1,)](p.contiguous(), phase, index, drawn, len(p), count, **OPTIONS)
    return index, drawn


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    signature = {"log_w": "*fp32", "p": "*fp64", "size": "i32", "total": "fp64", "smallest": "fp64"}
    yield Variant(project_kernel, signature, {"BLOCK": BLOCK}, WARPS, STAGES, "project")
    signature = {"p": "*fp64", "phase": "*fp64", "index": "*i64", "drawn": "*fp32"}
    signature |= {"size": "i32", "count": "i32"}
    yield Variant(
        draw_kernel, signature, {"BLOCK": BLOCK}, WARPS, STAGES, "draw", unaligned=("count",)
    )
