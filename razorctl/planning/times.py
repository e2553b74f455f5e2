"""Predicted seconds of a traced step, as a range.

The host runs ahead of the card, so a step takes the longer one of their times. The card needs the
sum over its kernels. Each kernel takes the longest of four times: of its arithmetic, of its memory
traffic, of issuing its instructions, and of a launch. Rates are shares of the card's peaks that
measurements reach. The host needs a fixed time per call and per launch.
"""

import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

from razorctl.memory.trace_cache import FUSED, KernelWork, Trace
from razorctl.planning.gpus import LONG, Gpu
from razorctl.system import documents

# Shares that kernels of razorctl reach of the rate of instructions and of the bandwidth of copies.
ISSUED, MOVED = 0.75, 0.85
# Seconds of a kernel at least; and of the second kernel of an op, which waits for all of the first.
# On an H100 PyTorch's smallest took 2 us, sums of columns and scales 7.8 and 11.1 us.
LAUNCH, SECOND = 2e-6, 9.4e-6
# Seconds in which a multiprocessor fills and drains the pipeline of 128 x 128 sums: on an H100
# products of 768 and 3,072 terms took 1.36 and 1.24 us per 1,000 terms.
TURN = 0.5e-6
# Seconds between two kernels that the host launches one by one; in a CUDA graph there are none.
GAP = 1.3e-6
# The time of a kernel relative to the predicted one, at least and at most.
SPREAD = 0.88, 1.14
INSTRUCTIONS = Path(__file__).parents[1] / "ops" / "triton" / "instructions.json"
# Instructions per element of PyTorch's kernels that an H100 runs slower than their bytes and
# products take, from their times there: attention by cuDNN (per score), copies that change the
# order of dimensions, which divide for each, and norms, whose sums wait.
PYTORCH = {"attention": 19, "attention gradient": 51, "strided copy": 94, "layer norm": 86}

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
    return Seconds(*map(max, on_card(trace, gpu, graphs), on_host(trace, gpu, graphs)))


def split_products(trace: Trace, gpu: Gpu) -> int:
    """The number of int8 products of a step whose sums several programs share on that card."""
    return sum(count for kernel, count in trace.kernels.items() if _parts(kernel, gpu) > 1)


def launch_count(trace: Trace, gpu: Gpu) -> int:
    """The number of kernels that a step runs on that card."""
    return sum(trace.kernels.values()) + SPLITS * split_products(trace, gpu)


def on_card(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """The seconds of the kernels of a step, one after the other; see `step_seconds`."""
    each = [_kernel(kernel, gpu).times(count) for kernel, count in trace.kernels.items()]
    gaps = 0 if graphs else GAP * launch_count(trace, gpu)
    return Seconds(*(gaps + sum(ends) for ends in zip(*each, strict=True)))


def on_host(trace: Trace, gpu: Gpu, graphs: int = 0) -> Seconds:
    """The seconds of the host for the calls and launches of a step; see `step_seconds`."""
    (aten, ops), launched = trace.calls, launch_count(trace, gpu)
    aten += split_products(trace, gpu)  # PyTorch zeroes the sums
    if graphs:
        (aten, ops), launched = trace.update, trace.update.aten
    likely = GRAPH * graphs + CALL * aten + OP * ops + DRIVER * launched
    fast, slow = HOSTS
    return Seconds(fast * likely, likely, slow * likely)


@cache
def instructions() -> dict[str, dict[str, float]]:
    """Name of a pass -> compute capability, such as "90" -> instructions of an element."""
    counted: dict[str, dict[str, float]] = documents.parse(documents.read_bytes(INSTRUCTIONS))[
        "per_element"
    ]
    return counted


def _issued(kernel: KernelWork, gpu: Gpu) -> float:
    """The seconds of issuing the instructions of a kernel; 0 if they are not counted."""
    if not kernel.own or not kernel.op:
        issued = PYTORCH.get(kernel.op, 0) * float(kernel.elements)
    else:
        issued = _per_element(kernel.op, gpu) * (kernel.elements - kernel.plain)
        if kernel.plain:
            issued += _per_element(kernel.op.split()[0], gpu) * kernel.plain
    return issued / (ISSUED * gpu.instructions_per_second)


def _per_element(name: str, gpu: Gpu) -> float:
    """The instructions of an element in a pass of razorctl; 0 if they are not counted."""
    other = f"{name.split()[0]} gelu"  # of another function, as many as of GELU
    counted = instructions().get(name) or instructions().get(other, {})
    card = int(gpu.compute_capability.replace(".", ""))
    return next((counted[c] for c in sorted(counted, key=int)[::-1] if int(c) <= card), 0)


def _kernel(kernel: KernelWork, gpu: Gpu) -> Seconds:
    """The seconds of a kernel with its launch."""
    if kernel.precision == "int8":
        return _int8(kernel, gpu)
    moved = gpu.reduced_per_second if kernel.reduces else gpu.bytes_per_second
    if kernel.op == FUSED:
        most = (kernel.bytes + kernel.written) / (MOVED * moved)
        return Seconds.between(max(LAUNCH, kernel.bytes / moved), max(LAUNCH, most))
    if kernel.own:
        moved = MOVED * gpu.bytes_per_second
    turns = TURN * math.ceil(kernel.programs / (gpu.multiprocessors or kernel.programs or 1))
    likely = max(
        kernel.operations / gpu.operations_per_second(kernel.precision) + turns,
        kernel.bytes / moved,
        _issued(kernel, gpu),
        SECOND if kernel.own and not kernel.bytes else LAUNCH,
    )
    fast, slow = SPREAD
    return Seconds(fast * likely, likely, slow * likely)


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
    least = LAUNCH * (1 if parts == 1 else 1 + SPLITS)
    ends = max(fast, moving), max(slow, moving - writing) + parts * writing
    return Seconds.between(*(max(least, end) for end in ends))


def _parts(kernel: KernelWork, gpu: Gpu) -> int:
    """The number of programs that share each sum of an int8 product; 1 except in Triton."""
    most = min(MOST_PARTS, kernel.terms // FEWEST_TERMS) if kernel.own else 1
    busy = {parts: gpu.filled(parts * kernel.programs) for parts in range(1, max(most, 1) + 1)}
    enough = [parts for parts, share in busy.items() if share >= BUSY]
    return enough[0] if enough else max(busy, key=busy.__getitem__)
