"""The launches recorded for a card are those that Triton would compile and launch there."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops import gemm, kernels, norm, quantize
from razorctl.ops.triton import launch, tuning
from razorctl.ops.triton.recorded import Card, Recording, distinct
from razorctl.planning import job_trace
from scripts.bench.cubins import compiled

CARD = GPUTarget("cuda", 89, 32)
ADA = Card(89)


@pytest.fixture
def card(monkeypatch):
    """A driver with the answers that Triton needs to compile."""
    stand_in = SimpleNamespace(
        get_current_target=lambda: CARD,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", stand_in)


def shapes(tensors):
    return [(t.shape, t.stride(), t.dtype) for t in tensors]


def test_ops_note_launches_and_return_what_they_return():
    with FakeTensorMode(), kernels.assumed(True):
        x, weight = torch.empty(300, 64), torch.empty(64)
        want = norm.norm_quantize(x, weight, weight, 1e-6, True, 2, 300, torch.bfloat16)
        with Recording(ADA) as recording:
            got = norm.norm_quantize(x, weight, weight, 1e-6, True, 2, 300, torch.bfloat16)
            torch.relu(x)
    assert shapes(got) == shapes(want)
    names = [one.variant.kernel.__name__ for one in recording.launches[ADA]]
    assert names == ["statistics_kernel", "quantize_long_tile"]
    last = recording.launches[ADA][1]
    assert (last.op, last.grid) == ("norm_quantize", (1,))
    assert last.arguments["x"] == (300, 64)
    assert last.variant.signature["y"] == "*bf16"
    assert last.variant.unaligned == ("rows", "tile_rows")
    assert launch.recorder() is None


def test_an_op_whose_kernel_does_not_take_its_arguments_notes_what_its_body_launches():
    with FakeTensorMode(), kernels.assumed(True), Recording(ADA) as recording:
        quantize.quantize(torch.empty(40, 12), 4, 40)
    assert recording.launches == {ADA: []}


@pytest.mark.parametrize(("capability", "tiles"), [(75, 0), (89, 5)])
def test_all_ways_that_a_card_would_time_are_noted(capability, tiles):
    with FakeTensorMode(), kernels.assumed(bool(tiles)), Recording(Card(capability)) as recording:
        a, b = torch.empty(64, 128, dtype=torch.int8), torch.empty(32, 128, dtype=torch.int8)
        gemm.scaled_gemm(a, b, torch.empty(64, 1), torch.empty(32), torch.float32)
    launches = recording.launches[Card(capability)]
    names = [one.variant.kernel.__name__ for one in launches]
    assert names == ["scaled_gemm_kernel"] * tiles + ["epilogue_kernel"]
    assert [one.trial for one in launches] == [i > 0 for i in range(tiles + 1)]
    assert len(distinct(launches * 2)) == tiles + 1


def forget(kernel, monkeypatch):
    """Lets a kernel ask the driver again, and compile again."""
    monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))


def test_of_several_ways_only_that_is_noted_which_a_card_has_chosen(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(tuning, "_card", str)

    def chosen(card):
        return {"scaled_gemm 64x32x128 4": "cublas"} if card == str(device) else {}

    monkeypatch.setattr(tuning, "_chosen", chosen)
    with FakeTensorMode(), kernels.assumed(True), Recording(ADA, device=device) as recording:
        a, b = torch.empty(64, 128, dtype=torch.int8), torch.empty(32, 128, dtype=torch.int8)
        gemm.scaled_gemm(a, b, torch.empty(64, 1), torch.empty(32), torch.float32)
    names = [one.variant.kernel.__name__ for one in recording.launches[ADA]]
    assert names == ["epilogue_kernel"]


@pytest.fixture(scope="module")
def step():  # vit-micro needs no file
    """The launches of a step of razor for a ViT of two blocks, with arguments for Triton."""
    launches, note = [], Recording._note

    def noted(self, kernel, grid, args, settings):
        note(self, kernel, grid, args, settings)
        stand_ins = [triton.MockTensor(a.dtype) if torch.is_tensor(a) else a for a in args]
        launches.append((self._current[-1].variant, stand_ins, settings))

    job = Job("vit-micro", "random", batch_size=32, precision="bf16", optimizer="sgd")
    job = replace(job, learning_rate=1e-3, weight_decay=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "_note", noted)
        job_trace.launches(job, Recipe("razor", 0.8), 10, ADA)
    return launches


def test_what_is_noted_is_what_triton_would_compile(step, card, monkeypatch):
    compilations = []

    def note(source, target, options):
        compilations.append((source.hash(), target, options))

    monkeypatch.setattr("triton.compiler.compile", note)
    variants = {}
    for variant, args, settings in step:
        if variant.key in variants or set(variant.unaligned) & {"a_scale", "left"}:
            continue  # pointers to later rows, which MockTensor does not have
        variants[variant.key] = variant
        forget(variant.kernel, monkeypatch)
        variant.kernel.run(*args, grid=(1,), warmup=True, **settings, **launch.OPTIONS)
    assert len(variants) == 10  # each kind of launch of this step
    for variant, (source, target, options) in zip(variants.values(), compilations, strict=True):
        assert variant.source(CARD).hash() == source
        assert target == CARD
        wanted = triton.compiler.make_backend(CARD).parse_options(variant.options)
        assert wanted.__dict__ == options


def test_a_launch_finds_what_was_compiled_before(step, card, tmp_path, monkeypatch):
    variant, args, settings = step[0]
    hits = []
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda cache_hit, **rest: hits.append(cache_hit)
    )
    forget(variant.kernel, monkeypatch)
    compiled(variant, CARD.arch)
    variant.kernel.run(*args, grid=(1,), warmup=True, **settings, **launch.OPTIONS)
    assert hits == [False, True]
