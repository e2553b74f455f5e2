"""The kernels of a step are compiled before it, once; a fake stands in for the card."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from triton.compiler.errors import CompilationError

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops import kernels
from razorctl.ops.triton import compiled, recorded
from razorctl.planning import job_trace
from razorctl.training.precompiled import precompile

CARD = torch.device("cuda", 0)
RECIPE = Recipe("razor", 0.9)


@pytest.fixture
def job():
    found = Job("vit-micro", "random", batch_size=32, precision="bf16")
    return found.resolved({"learning_rate": 1e-3, "weight_decay": 0.0}, 100)


@pytest.fixture
def card(shallow, tmp_path, monkeypatch):
    """The compilations, each as (variants, capability)."""
    done = []
    monkeypatch.setattr("razorctl.system.folders.cache", lambda: tmp_path)
    monkeypatch.setattr(recorded.Card, "of", lambda device: recorded.Card(89))
    monkeypatch.setattr(compiled, "compile_all", lambda *args: done.append(args[:2]))
    return done


def test_a_job_is_compiled_once(card, job):
    lines = []
    for _ in range(2):
        precompile(job, RECIPE, 10, CARD, lines.append)
    ((variants, capability),) = card
    assert capability == 89
    assert lines == [f"compiling {len(variants)} kernels"]
    names = {variant.kernel.__name__ for variant in variants}
    assert {"quantize_bytes", "norm_grad_kernel"} <= names
    precompile(job, Recipe("razor", 0.5), 10, CARD)
    assert len(card) == 2


def test_what_fails_is_one_warning(card, job, monkeypatch, caplog):
    def fails(*args, **settings):
        raise RuntimeError("no such instruction\nmore")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(compiled, "compile_all", fails)
        precompile(job, RECIPE, 10, CARD)
        assert not caplog.records  # an op will say so
        monkeypatch.setattr(job_trace, "launches", fails)
        precompile(job, RECIPE, 10, CARD)
    (record,) = caplog.records
    assert record.getMessage().endswith("not all before it: no such instruction")


@pytest.mark.parametrize("without", ["card", "kernels"])
def test_nothing_is_compiled_without_kernels(without, card, job, monkeypatch):
    monkeypatch.setattr(kernels, "_wanted", without != "kernels")
    precompile(job, RECIPE, 10, torch.device("cpu") if without == "card" else CARD)
    assert not card


@pytest.mark.parametrize("faults", [1, 9])
def test_a_kernel_is_compiled_again_if_a_parser_failed_in_several_threads(faults, monkeypatch):
    """Python before 3.13 counts the depth of a tree for all threads together."""
    left, done = [faults], []

    def compiling(source, **_):
        if left[0]:
            left[0] -= 1
            raise CompilationError(None, None, "no") from SystemError("depth mismatch")
        done.append(source)
        return SimpleNamespace(src=None, metadata=None)

    monkeypatch.setattr(compiled.triton, "compile", compiling)
    variant = SimpleNamespace(source=lambda target: "kernel", options={})
    with pytest.raises(CompilationError) if faults > 4 else nullcontext():
        compiled.compile_all([variant], 80, threads=1)
    assert done == ["kernel"] * (faults < 5)
