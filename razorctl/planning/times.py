"""Predicted seconds of a traced step, as a range wherever nothing was measured.

A step takes as long as the card or the host needs, whichever is longer, since the host runs ahead
of the card. The card needs the sum over its kernels. Each takes the time of its arithmetic or of
its memory traffic, whichever is longer, and a launch, at the shares of the card's peaks that
published measurements reach. The host needs so much for each call and each launch.

Kernels of razorctl have been timed on an H200 and an H100, so the time of each is a range. So is
that of the host, since it is not known which one is beside a card.
"""

import math
from typing import NamedTuple

from razorctl.memory.trace_cache import KernelWork, Trace
from razorctl.planning.gpus import LONG, Gpu

LAUNCH = 5e-6  # least seconds of a kernel on a card

# Shares of the bandwidth of copies that kernels of razorctl may reach: at most all of it, or where
# they reduce what tuned norms reach (NVIDIA/apex pull request 1037: 1,258 of 1,382 GB/s on an
# A100); at least that of a kernel with half of the bytes in flight that the bandwidth wants. An
# H200, which has most bandwidth for its arithmetic, reached 0.38: 30.0 GB of a ViT-B/16 step in
# 18.7 ms. Cards of less bandwidth are bound by it.
MOST, MOST_REDUCING, LEAST = 1.0, 0.91, 0.5

# `ops.triton.gemm` splits the terms of a sum of an int8 product among at most so many programs of
# at least so many terms each: the fewest that keep this share of multiprocessors busy.
MOST_PARTS, FEWEST_TERMS, BUSY = 8, 1024, 0.8
SPLITS = 2  # more launches of such a product: one sets its int32 sums to zero, one applies scales

# Seconds of the host for a call of an operation of PyTorch and of an op of razorctl, each with the
# modules and autograd around it: by scripts/bench/host.py on a core of an AMD EPYC of 2024, where a
# step of full took 16.0 ms for 1,444 calls, one of razor 42.3 ms for 1,258 and 280 ops.
CALL, OP = 11.1e-6, 101e-6
# Of the driver for a launch, and of the replay of a CUDA graph with what it copies before: guesses,
# since the measurement leaves both out.
DRIVER, GRAPH = 3e-6, 50e-6
# The time of the host beside a card over that of the measured one, at least and at most: a guess,
# that a desktop's clock is higher by a fourth, and a server's core of 2022 slower by 1.6.
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
        """So many of this time."""
        return Seconds(*(count * seconds for seconds in self))


def step_seconds(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """Predicted seconds of a traced step.

    graphs: how many CUDA graphs the host replays for all that comes before the optimizer's update,
    one for each micro-batch; 0 if it launches each kernel.
    """
    return Seconds(*map(max, on_card(trace, gpu), on_host(trace, gpu, graphs)))


def split_products(trace: Trace, gpu: Gpu) -> int:
    """How many int8 products of a step have sums that several programs share on that card."""
    return sum(count for kernel, count in trace.kernels.items() if _parts(kernel, gpu) > 1)


def launch_count(trace: Trace, gpu: Gpu) -> int:
    """How many kernels a step runs on that card."""
    return sum(trace.kernels.values()) + SPLITS * split_products(trace, gpu)


def on_card(trace: Trace, gpu: Gpu) -> Seconds:
    """The seconds that the kernels of a step take one after the other."""
    each = [_kernel(kernel, gpu).times(count) for kernel, count in trace.kernels.items()]
    launching = LAUNCH * launch_count(trace, gpu)
    return Seconds(*(launching + sum(ends) for ends in zip(*each, strict=True)))


def on_host(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """The seconds that the host takes for the calls and launches of a step; see `step_seconds`."""
    (aten, ops), launched = trace.calls, launch_count(trace, gpu)
    aten += split_products(trace, gpu)  # PyTorch sets the sums to zero
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

    At best its rate is that of long sums, and all memory traffic goes on beside the arithmetic. At
    worst the rate is that of short sums, nothing else goes on while results are written, and each
    program that shares a sum writes. Both leave multiprocessors idle that get no program.
    """
    parts = _parts(kernel, gpu)
    filled = gpu.filled(parts * kernel.programs)
    peak = gpu.int8_per_second(LONG), gpu.int8_per_second(kernel.terms)
    fast, slow = (kernel.operations / (rate * filled) for rate in peak)
    moving, writing = (size / gpu.bytes_per_second for size in (kernel.bytes, kernel.written))
    return Seconds.between(max(fast, moving), max(slow, moving - writing) + parts * writing)


def _parts(kernel: KernelWork, gpu: Gpu) -> int:
    """Among how many programs each sum of an int8 product is split; only Triton's are."""
    most = min(MOST_PARTS, kernel.terms // FEWEST_TERMS) if kernel.own else 1
    busy = {parts: gpu.filled(parts * kernel.programs) for parts in range(1, max(most, 1) + 1)}
    enough = [parts for parts, share in busy.items() if share >= BUSY]
    return enough[0] if enough else max(busy, key=busy.__getitem__)
