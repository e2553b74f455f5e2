"""The benches of whole steps: what they refuse to time, what they measure, and their cases."""

import importlib
import json
import time
from dataclasses import replace

import pytest
import torch

from razorctl import Recipe
from razorctl.layers.kinds.linear import Linear
from razorctl.methods import METHODS

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


@pytest.fixture
def budgets(monkeypatch):
    """The memory budget under which each graph was compiled, without compiling any C++."""
    compiled_under = []

    def compiler(graph, inputs):
        compiled_under.append(torch._functorch.config.activation_memory_budget)
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiler)
    return compiled_under


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


def test_compiled_cases_have_graphs_and_budgets_of_their_own(module, bench, budgets):
    torch.compiler.reset()
    for name, budget in (("a", 1.0), ("b", 0.1)):
        run = module("step").Run(name, module("step").Case(compiled=True, budget=budget), "fp32")
        for _ in range(2):
            run.attempt(bench.time)
        run.attempt(bench.measure)
        assert run.error is None
        assert len(run.seconds) == 2
    assert budgets == [1.0, 0.1]


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


def test_turns_end_with_the_seconds_and_say_so(module, bench, budgets, tmp_path):
    case, turns = module("step"), module("record")
    bench.workload = replace(bench.workload, turns=3)
    names = ("full", "full, compiled")
    for late, taken, error in ((1, 3, "not compiled"), (3, 1, "not timed")):
        group = [case.Run(name, case.Case(compiled=name != "full"), "fp32") for name in names]
        result = turns.Result(tmp_path / "out.json", {"about": "this"}, [group], case.as_row)
        turns.take_turns(bench, result, time.monotonic() - 1e5 * late, 1.5e5)
        document = json.loads(result.out.read_text())
        full, compiled = document["rows"]
        assert (document["about"], full["error"], full["step_time_vs_full"]) == ("this", None, 1)
        assert len(group[0].seconds) == taken
        assert compiled["error"] == f"{error} in the seconds given"
    assert not budgets


def test_times_are_ratios_of_the_same_turn(module):
    case = module("step")
    seconds = {"full": [1.0, 2.0], "full, compiled": [2.0, 1.0], "razor, compiled": [1.0, 1.0]}
    group = [case.Run(n, case.Case(compiled="," in n), "fp32", s) for n, s in seconds.items()]
    full, _, razor = (case.as_row(run, group) for run in group)
    assert (razor["step_time_vs_full"], razor["step_time_vs_full_compiled"]) == (0.75, 0.75)
    assert full["step_time_vs_full_compiled"] is None


def test_the_frontier_has_every_method_at_every_ratio_that_it_meets(module, bench):
    cases = module("frontier").cases(bench, "fp32")
    assert next(iter(cases)) == "full"
    names = {}
    for name, case in cases.items():
        plain = ", " not in name
        names.setdefault((case.recipe.method, plain), []).append(name)
    ratios = len(module("frontier").RATIOS)
    for name, method in METHODS.items():
        if method.prunes:
            most = ratios if method.has_ratio else 1
            assert len(names[name, True]) == most, name
    assert len(names["razor", False]) == 3 * ratios
    assert {name for name, case in cases.items() if not case.exact} == {
        name for name, case in cases.items() if case.recipe.int8_forward
    }
    assert names["full", True] == ["full", "accumulate 4", "accumulate 2", "accumulate 1"]


def test_the_summary_of_gpu_sh_names_what_failed(module):
    case = module("step")
    group = [case.Run("full", case.Case(), "fp32", [0.1]), case.Run("razor", case.Case(), "fp32")]
    group[0].peak, group[1].error = 3 << 20, "ArithmeticError: differs"
    about = {"device": "a card"}
    step = {"case": "razor", "cosine to full, fp32": 0.98, "second_seconds": 0.5, "error": None}
    ended = {"a": {"outcome": "passed", "error": None}, "b": {"outcome": "failed", "error": "2\n"}}
    parts = {
        "first": {"rows": [step | {"finite": True, "failed": {"gemm by cublas": "no"}}]},
        "layers": {"rows": ended},
        "linear": {
            "rows": [
                {"method": method, "ratio": 0.5, "precision": "fp32", "both_vs_full": time}
                | {"error": None if time else "too large"}
                for method, time in (("full", 1.0), ("razor", 0.5), ("int8", None))
            ]
        },
        "step": about | {"rows": [case.as_row(run, group) for run in group]},
    }
    text = module("summary").text
    lines = [line.split() for part in parts.items() for line in text(*part)]
    assert ["razor", "0.9800", "-", "0.500", "gemm", "by", "cublas:", "no"] in lines
    assert ["layers:", "1", "passed,", "1", "failed"] in lines
    assert ["b:", "2"] in lines
    assert ["a", "card"] in lines
    assert ["razor", "at", "0.5", "fp32", "0.50"] in lines
    assert ["int8", "at", "0.5", "fp32", "-", "too", "large"] in lines
    assert ["full", "fp32", "1.00", "-", "100.0", "3"] in lines
    assert ["razor", "fp32", *"----", "ArithmeticError:", "differs"] in lines
