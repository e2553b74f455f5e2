"""Predicted seconds of a traced step, as a range unless they rest on measurements.

The host runs ahead of the card, so a step takes the longer one of their times. The card needs the
sum over its kernels. Each kernel takes the time of its arithmetic or of its memory traffic, the
longer one, at the shares of the card's peaks that published measurements reach, and a launch. The
host needs a fixed time per call and per launch.

Kernels of razorctl were timed on an H200 and an H100 only, so the time of each is a range. So is
the time of the host, since the host beside a card is unknown.
"""

import math
from typing import NamedTuple

from razorctl.memory.trace_cache import KernelWork, Trace
from razorctl.planning.gpus import LONG, Gpu

LAUNCH = 5e-6  # least seconds of a kernel on a card

# Shares of the bandwidth of copies that kernels of razorctl may reach. At most: all of it, or for
# reductions what tuned norms reach (NVIDIA/apex pull request 1037: 1,258 of 1,382 GB/s on an A100).
# At least: the share of a kernel with half of the bytes in flight that the bandwidth needs. An
# H200, with the most bandwidth for its arithmetic, reached 0.38: 30.0 GB of a ViT-B/16 step in
# 18.7 ms. Cards with less bandwidth are bound by it.
MOST, MOST_REDUCING, LEAST = 1.0, 0.91, 0.5

# `ops.triton.gemm` splits each sum of an int8 product among at most MOST_PARTS programs of at least
# FEWEST_TERMS terms each: as few programs as keep the share BUSY of multiprocessors busy.
MOST_PARTS, FEWEST_TERMS, BUSY = 8, 1024, 0.8
SPLITS = 2  # extra launches of such a product: one zeroes its int32 sums, one applies scales

# Seconds of the host per call of a PyTorch operation and per razorctl op, each with the modules and
# autograd around it: by scripts/bench/host.py on a core of an AMD EPYC of 2024. There a step of
# full took 16.0 ms for 1,444 calls, a step of razor 42.3 ms for 1,258 calls and 280 ops.
CALL, OP = 11.1e-6, 101e-6
# Seconds of the driver per launch, and of the replay of a CUDA graph with the copies before it:
# guesses, since the measurement leaves both out.
DRIVER, GRAPH = 3e-6, 50e-6
# The time of the host beside a card relative to the measured host, at least and at most. A guess: a
# desktop's clock is a fourth higher, and a server's core of 2022 slower by 1.6.
HOSTS = 0.8, 1.6


class Seconds(NamedTuple):
    """A predicted time: the least, the likely one, and the most."""

    low: float
    likely: float
    high: float

    @classmethod
    def between(cls, low: float, high: float) -> "Seconds":
        """From the least to the most; the likely time is their geometric mean."""
        return cls(low, math.sqrt(low * high), high)

    def times(self, count: float) -> "Seconds":
        """This time, multiplied."""
        return Seconds(*(count * seconds for seconds in self))


def step_seconds(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """Predicted seconds of a traced step.

    graphs: the number of CUDA graphs that the host replays before the optimizer's update, one per
    micro-batch; 0 if it launches each kernel.
    """
    return Seconds(*map(max, on_card(trace, gpu), on_host(trace, gpu, graphs)))


def split_products(trace: Trace, gpu: Gpu) -> int:
    """The number of int8 products of a step whose sums several programs share on that card."""
    return sum(count for kernel, count in trace.kernels.items() if _parts(kernel, gpu) > 1)


def launch_count(trace: Trace, gpu: Gpu) -> int:
    """The number of kernels that a step runs on that card."""
    return sum(trace.kernels.values()) + SPLITS * split_products(trace, gpu)


def on_card(trace: Trace, gpu: Gpu) -> Seconds:
    """The seconds of the kernels of a step, one after the other."""
    each = [_kernel(kernel, gpu).times(count) for kernel, count in trace.kernels.items()]
    launching = LAUNCH * launch_count(trace, gpu)
    return Seconds(*(launching + sum(ends) for ends in zip(*each, strict=True)))


def on_host(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """The seconds of the host for the calls and launches of a step; see `step_seconds`."""
    (aten, ops), launched = trace.calls, launch_count(trace, gpu)
    aten += split_products(trace, gpu)  # PyTorch zeroes the sums
    if graphs:
        (aten, ops), launched = trace.update, trace.update.aten
    likely = GRAPH * graphs + CALL * aten + OP * ops + DRIVER * launched
    fast, slow = HOSTS
    return Seconds(fast * likely, likely, slow * likely)


def _kernel(kernel: KernelWork, gpu: Gpu) -> Seconds:
    """The seconds of a kernel without its launch."""
    if kernel.precision == "int8":
        return _int8(kernel, gpu)
    moving = kernel.bytes / gpu.bytes_per_second
    if kernel.own:
        return Seconds.between(moving / (MOST_REDUCING if kernel.reduces else MOST), moving / LEAST)
    if kernel.reduces:
        moving = kernel.bytes / gpu.reduced_per_second
    taken = max(kernel.operations / gpu.operations_per_second(kernel.precision), moving)
    return Seconds(taken, taken, taken)


def _int8(kernel: KernelWork, gpu: Gpu) -> Seconds:
    """The seconds of an int8 product.

    At best it has the rate of long sums, and all memory traffic overlaps the arithmetic. At worst
    it has the rate of short sums, nothing overlaps the writing of results, and each program that
    shares a sum writes. Both leave multiprocessors idle if they get no program.
    """
    parts = _parts(kernel, gpu)
    filled = gpu.filled(parts * kernel.programs)
    peak = gpu.int8_per_second(LONG), gpu.int8_per_second(kernel.terms)
    fast, slow = (kernel.operations / (rate * filled) for rate in peak)
    moving, writing = (size / gpu.bytes_per_second for size in (kernel.bytes, kernel.written))
    return Seconds.between(max(fast, moving), max(slow, moving - writing) + parts * writing)


def _parts(kernel: KernelWork, gpu: Gpu) -> int:
    """The number of programs that share each sum of an int8 product; 1 except in Triton."""
    most = min(MOST_PARTS, kernel.terms // FEWEST_TERMS) if kernel.own else 1
    busy = {parts: gpu.filled(parts * kernel.programs) for parts in range(1, max(most, 1) + 1)}
    enough = [parts for parts, share in busy.items() if share >= BUSY]
    return enough[0] if enough else max(busy, key=busy.__getitem__)
