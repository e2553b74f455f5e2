"""Predicted times of kernels, of a card and of its host, also against what timm published."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from razorctl.memory.trace_cache import FUSED, NONE, Calls, KernelWork, Trace
from razorctl.planning import gpus, times
from razorctl.planning.times import (
    CALL,
    DRIVER,
    GAP,
    GRAPH,
    ISSUED,
    LAUNCH,
    MOVED,
    OP,
    SECOND,
    launch_count,
    on_card,
    on_host,
    step_seconds,
)
from scripts.bench import planning

GPU = gpus.load("rtx-4090")


def trace(kernels: dict[KernelWork, int], calls: Calls = NONE, update: Calls = NONE) -> Trace:
    return Trace(0, 0, 0, 0, 0, 0, kernels, False, calls=calls, update=update)


def taken(kernel: KernelWork, gpu: gpus.Gpu = GPU) -> times.Seconds:
    """The seconds of a kernel on a card, in a CUDA graph."""
    return on_card(trace({kernel: 1}), gpu, graphs=1)


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    slow = replace(GPU, bandwidth=GPU.bandwidth / 2)
    step = trace(
        {
            KernelWork("fp32", 10**12, 10**9): 2,
            KernelWork("bf16", 10**12, 10**9): 1,
            KernelWork("fp32", 0, 10**9): 3,
        }
    )
    single, half = (GPU.operations_per_second(precision) for precision in ("fp32", "bf16"))
    moving = 3e9 / GPU.bytes_per_second
    want = 2e12 / single + 1e12 / half + moving
    assert on_card(step, GPU, 1).likely == pytest.approx(want)
    assert on_card(step, slow, 1).likely == pytest.approx(want + moving)
    old = replace(GPU, rates={"fp32": GPU.rates["fp32"]})
    assert on_card(step, old, 1).likely == pytest.approx(3e12 / single + moving)
    low, likely, high = on_card(step, GPU)  # one launch after the other
    assert likely == pytest.approx(want + 6 * GAP)
    assert low < likely < high


def test_a_kernel_takes_its_bytes_its_instructions_or_a_launch():
    def likely(size: int = 10**9, gpu: gpus.Gpu = GPU, **work: Any) -> float:
        return taken(KernelWork("fp32", 0, size, **work), gpu).likely

    assert likely() == pytest.approx(1e9 / GPU.bytes_per_second)
    assert likely(reduces=True) == pytest.approx(1e9 / GPU.reduced_per_second)
    assert likely(own=True) == likely(own=True, reduces=True) == pytest.approx(likely() / MOVED)
    assert (likely(1), likely(0, own=True)) == (LAUNCH, SECOND)
    of_gelu = times.instructions()["activation_grad_int8 gelu"]
    grad = {"own": True, "elements": 10**9}
    for name in ("gelu", "silu"):  # of another function, as many as of GELU
        issued = likely(1, op=f"activation_grad_int8 {name}", **grad)
        assert issued == pytest.approx(of_gelu["89"] * 1e9 / (ISSUED * GPU.instructions_per_second))
    plain = times.instructions()["linear_operands"]["89"]  # where no function is applied
    issued = likely(1, op="linear_operands gelu", **grad, plain=10**9)
    assert issued == pytest.approx(plain * 1e9 / (ISSUED * GPU.instructions_per_second))
    ampere = replace(GPU, compute_capability="8.6")  # counted for the next older card
    assert likely(1, ampere, op="quantize", **grad) == pytest.approx(
        times.instructions()["quantize"]["80"] * 1e9 / (ISSUED * GPU.instructions_per_second)
    )
    assert likely(1, own=True, op="unknown", elements=10**9) == LAUNCH
    assert likely(1, op="strided copy", elements=10**9) == pytest.approx(
        times.PYTORCH["strided copy"] * 1e9 / (ISSUED * GPU.instructions_per_second)
    )


def test_what_inductor_fuses_takes_the_bytes_of_ideal_fusion_or_those_of_sums_too():
    low, _, high = taken(KernelWork("fp32", 0, 10**9, written=10**9, op=FUSED))
    assert low == pytest.approx(1e9 / GPU.bytes_per_second)
    assert high == pytest.approx(2 * low / MOVED)


def test_int8_products_are_slower_with_fewer_terms_and_programs():
    def product(terms: int, programs: int = 1280, written: int = 0) -> times.Seconds:
        return taken(KernelWork("int8", 10**12, 10**6, False, True, terms, programs, written))

    rate = GPU.rates["int8"]
    long, short = (product(terms) for terms in (8192, 768))
    assert long == pytest.approx([1e12 / (rate * GPU.achieved.int8)] * 3)
    assert short.low == long.low
    assert short.high == pytest.approx(1e12 / (rate * GPU.achieved.int8_short))
    assert long.high < product(2048).high < short.high
    # 144 programs keep 128 multiprocessors busy once, and 16 of them a second time; in halves they
    # do so twice and 32 of them a third time, in thirds three times and 48 of them a fourth time.
    assert product(2047, 144).low == pytest.approx(long.low * 256 / 144)
    assert product(8192, 144).low == pytest.approx(long.low * 512 / (3 * 144))
    assert product(8192, 144, 10**6).high > product(8192, 144).high
    other = KernelWork("int8", 10**12, 10**6, False, False, 8192, 144)  # by cuBLAS
    assert taken(other).low == pytest.approx(long.low * 256 / 144)
    unknown = replace(GPU, multiprocessors=None)
    assert taken(other, unknown) == pytest.approx(long)
    # At worst nothing is multiplied while results are written.
    kernel = KernelWork("int8", 10**12, 2 * 10**9, False, True, 8192, 1280, 10**9)
    writing = 1e9 / GPU.bytes_per_second
    assert (taken(kernel).low, taken(kernel).high) == pytest.approx(
        (max(long.low, 2 * writing), max(long.high, writing) + writing)
    )


def test_a_step_takes_as_long_as_the_card_or_the_host():
    kernels = {KernelWork("fp32", 0, 10**8, own=True): 100}
    few, many = (trace(kernels, Calls(calls, 10), Calls(5, 0)) for calls in (10, 10**6))
    assert step_seconds(few, GPU) == on_card(few, GPU)
    low, likely, high = step_seconds(many, GPU)
    assert likely == pytest.approx(1e6 * CALL + 10 * OP + 100 * DRIVER)
    assert low < likely < high
    assert step_seconds(many, GPU) == on_host(many, GPU)


def test_with_cuda_graphs_the_host_replays_a_graph_for_each_micro_batch():
    step = trace({KernelWork("fp32", 0, 10**6): 100}, Calls(1000, 100), Calls(5, 0))
    assert on_host(step, GPU, graphs=2).likely == pytest.approx(2 * GRAPH + 5 * (CALL + DRIVER))
    assert on_host(step, GPU, graphs=2).likely < 0.1 * on_host(step, GPU).likely


def test_a_product_whose_sums_are_split_takes_two_more_launches_and_a_call():
    whole, parted = (KernelWork("int8", 10**9, 1, False, True, terms, 16) for terms in (1024, 8192))
    step = trace({whole: 2, parted: 3}, Calls(10, 5))
    cards = GPU, replace(GPU, multiprocessors=None)  # the other one: as if all were filled
    assert [launch_count(step, card) for card in cards] == [11, 5]
    more, few = (on_host(step, card).likely for card in cards)
    assert more - few == pytest.approx(3 * CALL + 6 * DRIVER)
    assert taken(parted._replace(operations=0)).low == 3 * LAUNCH


def test_sums_are_split_as_the_kernels_split_them():
    gemm = pytest.importorskip("razorctl.ops.triton.gemm")
    names = ("MOST_PARTS", "FEWEST_TERMS", "BUSY")
    assert [getattr(times, name) for name in names] == [getattr(gemm, name) for name in names]


def test_what_calls_take_the_host_is_what_was_measured():
    measured = json.loads(Path("scripts/bench/results/host.json").read_text())
    for case in ("full", "razor"):
        calls = Calls(measured[case]["aten_calls"], measured[case]["op_calls"])
        taken = on_host(trace({}, calls), GPU).likely
        assert 1e3 * taken == pytest.approx(measured["host_ms"][case], rel=0.05)


@pytest.mark.parametrize(
    "row",
    [row for row in planning.RATES if row.held],
    ids=lambda row: f"{row.gpu} {row.phase} {row.model}",
)
def test_predicted_rates_are_near_the_published(row):
    assert planning.predicted(row) == pytest.approx(row.rate, rel=planning.BARS[row.phase])


def test_a_t4_does_not_outrun_a_2080_ti():
    trace = planning.traced("vit_base_patch16_224", "train", 192, depth=1)
    t4, ti = (on_card(trace, gpus.load(name)).likely for name in ("t4", "rtx-2080-ti"))
    assert t4 > 1.5 * ti
