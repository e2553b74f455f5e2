"""The benches of whole steps: what they refuse to time, what they measure, and their cases."""

import importlib
from dataclasses import replace

import pytest
import torch

from razorctl import Recipe
from razorctl.layers.kinds.linear import Linear

CPU = torch.device("cpu")


@pytest.fixture
def module():
    """Imports a script of scripts/bench."""
    return importlib.import_module


@pytest.fixture
def bench(module):
    return small(module, image_size=64, depth=1)


def small(module, **changes):
    workload = replace(module("step").WORKLOADS["cpu"], **module("step").SMOKE)
    return module("step").Bench(replace(workload, **changes), CPU)


def checked(module, bench, **case):
    """A run of a case, checked against full."""
    runs = [
        module("step").Run(str(n), module("step").Case(**c), "fp32")
        for n, c in ((0, {}), (1, case))
    ]
    exact = []
    for run in runs:
        run.attempt(bench.check, exact)
    assert runs[0].error is None
    return runs[1]


def test_a_case_has_the_weights_of_full_and_leaves_it_as_it_is(module, bench):
    run = checked(module, bench, recipe=Recipe("razor", 0.5))
    assert run.error is None
    ours, theirs = bench.model(run), bench.full
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert any(isinstance(m, Linear) for m in ours.modules())
    assert not any(isinstance(m, Linear) for m in theirs.modules())
    assert all(p.grad is None for p in theirs.parameters())
    before = theirs.head.bias.detach().clone()
    run.attempt(bench.time)
    assert len(run.seconds) == 1
    assert torch.equal(before, theirs.head.bias)  # so that the next case finds the same


def test_a_wrong_output_gets_no_time(module, bench, monkeypatch):
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: 1.01 * forward(self, x))
    run = checked(module, bench, recipe=Recipe("razor", 0.5))
    run.attempt(bench.time)
    assert run.error == "ArithmeticError: differs from full where it must not"
    assert not run.seconds


@pytest.mark.parametrize(
    ("noise", "error"),
    [
        (0, "ArithmeticError: nothing ran in int8: the logits are those of full"),
        (0.05, None),
        (1, "ArithmeticError: the logits have cosine"),
    ],
)
def test_a_forward_pass_in_int8_is_near_full_and_not_the_same(
    module, bench, monkeypatch, noise, error
):
    forward = Linear.forward

    def rough(self, x):
        y = forward(self, x)
        return y + noise * y.detach().std() * torch.randn_like(y)

    monkeypatch.setattr(Linear, "forward", rough)
    why = checked(module, bench, recipe=Recipe("razor", 0.5), exact=False).error
    assert why is None if error is None else why.startswith(error)


@pytest.mark.parametrize("case", [{}, {"rows": 2}, {"recipe": Recipe("razor", 0.5)}])
def test_the_measured_peak_is_the_traced_one(module, case):
    bench = small(module, image_size=224)  # so that activations make it
    run = module("step").Run("any", module("step").Case(**case), "fp32")
    bench.measure_peak(run)
    with bench.running(run) as model:
        assert bench.allocated(run, model) == pytest.approx(run.peak, rel=0.01)


@pytest.mark.parametrize(
    ("razor", "name", "rows"),
    [
        (45, "accumulate 4, at razor's peak", 4),
        (39, "accumulate 2, at razor's peak", 2),
        (9, "accumulate 1, above razor's peak", 1),
    ],
)
def test_micro_batches_of_razors_peak(module, bench, monkeypatch, razor, name, rows):
    def peak(self, run):
        run.peak = razor if run.case.recipe.method == "razor" else 10 * run.case.rows

    monkeypatch.setattr(module("step").Bench, "measure_peak", peak)
    cases = module("step").at_peak(bench, "fp32", Recipe("razor", 0.5))
    assert cases == {name: module("step").Case(rows=rows)}


def test_times_are_ratios_of_the_same_turn(module):
    case = module("step")
    seconds = {"full": [1.0, 2.0], "full, compiled": [2.0, 1.0], "razor, compiled": [1.0, 1.0]}
    group = [case.Run(n, case.Case(compiled="," in n), "fp32", s) for n, s in seconds.items()]
    full, _, razor = (case.as_row(run, group) for run in group)
    assert (razor["step_time_vs_full"], razor["step_time_vs_full_compiled"]) == (0.75, 0.75)
    assert full["step_time_vs_full_compiled"] is None
