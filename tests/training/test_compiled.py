"""Training through torch.compile: as the eager model trains, or eagerly after one warning."""

from dataclasses import replace
from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from razorctl import Recipe, restore, sparsify
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.models.timm.micro import VIT_MICRO
from razorctl.ops.op import OPS
from razorctl.optimizer import build_optimizer
from razorctl.step import ByLogits, train_step
from razorctl.training.compiled import EAGER, JUDGED, Compiled, Trial
from razorctl.training.payoff import Payoff
from razorctl.training.profiler import profile
from razorctl.training.run import Run, finetune
from tests.training.runs import said

JOB = Job("vit-micro", "digits", batch_size=16, steps=JUDGED, evaluate_every=99, learning_rate=0.01)
COMPILED = replace(JOB, compile=True)
RAZOR = Recipe("razor", 0.5)
GRAPHS = replace(COMPILED, cuda_graphs=True)

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture
def one_block(monkeypatch):
    """vit-micro has one block, where what is compiled is compared with nothing."""
    monkeypatch.setitem(VIT_MICRO, "depth", 1)


@pytest.fixture
def no_codegen(monkeypatch):
    """torch.compile traces and runs its graphs, but compiles no C++, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def broken(monkeypatch):
    """torch.compile on a machine where Inductor finds no compiler."""

    def compiler(*_):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))


def train(job: Job, out, recipe: Recipe = RAZOR) -> Run:
    run = finetune(job, recipe, out=out, device="cpu")
    list(run)
    return run


def test_a_compiled_run_trains_as_an_eager_one(no_codegen, tmp_path):
    counters.clear()
    runs = [train(replace(JOB, compile=c), tmp_path / str(c)) for c in (False, True)]
    eager, compiled = (run.result() for run in runs)
    timed = [[step.seconds for step in run.history] for run in runs]
    assert eager["step_seconds"] == median(timed[0])
    assert compiled["step_seconds"] == median(timed[1][EAGER + 1 :])
    assert (eager["job"]["compile"], eager["compiled"], eager["payoff"]) == (False, False, None)
    assert compiled["job"]["compile"]
    assert compiled["compiled"]
    assert compiled["payoff"]["compile_seconds"] > compiled["payoff"]["step_seconds"] > 0
    assert compiled["epoch_seconds"] < compiled["payoff"]["compile_seconds"] * 1437 // 16 / JUDGED
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 1  # evaluation is eager, and nothing else differs
    for key in ("saved_bytes", "full_saved_bytes"):
        assert compiled[key] == eager[key]
    weights, want = (load_file(tmp_path / str(c) / "model.safetensors") for c in (True, False))
    assert weights.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-2, atol=1e-3)


def test_a_run_without_a_compiler_is_the_eager_one(broken, tmp_path, caplog):
    job = replace(JOB, steps=5, accumulate=2)
    eager, failed = (
        train(replace(job, compile=c), tmp_path / str(c), Recipe("full")) for c in (False, True)
    )
    assert failed.result()["job"]["compile"]
    assert not failed.result()["compiled"]
    assert [step.loss for step in failed.history] == [step.loss for step in eager.history]
    short, reason = said(caplog)
    assert short == "compiling does not pay off in a run of 5 steps."
    assert reason.startswith("training continues without compiling: ")
    assert "no working C++ compiler" in reason


def test_a_failure_in_a_later_micro_batch_leaves_no_gradient_behind(monkeypatch, caplog):
    class Fails(nn.Module):
        def __init__(self, model, **_) -> None:
            super().__init__()
            self.calls, self.model = 0, model

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise BackendCompilerFailed(self.forward, RuntimeError("broken"), None)
            return self.model(x)

    monkeypatch.setattr(torch, "compile", Fails)
    model, x = nn.Linear(3, 1), torch.ones(2, 3)

    def take(forward: nn.Module) -> None:
        for _ in range(2):
            forward(x).sum().backward()

    Compiled(model, COMPILED).step(take)
    assert model.weight.grad.tolist() == [[4.0] * 3]
    assert len(said(caplog)) == 1


def test_dropout_of_attention_compiles(no_codegen, caplog):
    model, x = nn.MultiheadAttention(32, 2, dropout=0.5, batch_first=True), torch.randn(4, 9, 32)
    sparsify(model, Recipe("half"))

    def loss(forward: nn.Module, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return forward(x, x, x, need_weights=False)[0].square().sum()

    compiled = Compiled(model, COMPILED)
    first = compiled.step(loss, 1)
    assert first == compiled.step(loss, 1) != compiled.step(loss, 2)
    assert compiled.works
    assert said(caplog) == []


def test_a_joint_budget_is_refused_before_anything_is_written(tmp_path):
    for joint in ("weights", "branches"):
        recipe = Recipe(joint_budget=0.5, joint=joint)
        with pytest.raises(UsageError, match="leave --compile out"):
            finetune(COMPILED, recipe, out=tmp_path / "run", device="cpu")
        with pytest.raises(UsageError, match="leave --compile out"):
            profile("vit-micro", recipe, compile=True, device="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["int2", "prebackrazor++"])
def test_a_compiled_step_draws_anew(method, no_codegen):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(9, 64)
    sparsify(model, Recipe(method, 0.5))

    def gradient(forward: nn.Module) -> torch.Tensor:
        model.zero_grad()
        forward(x).square().sum().backward()
        return model[0].weight.grad.clone()

    compiled = Compiled(model, COMPILED)
    steps = [compiled.step(gradient) for _ in range(3)]
    assert compiled.works
    assert not torch.equal(steps[0], steps[1])
    assert not torch.equal(steps[1], steps[2])
    restore(model)


def test_an_activation_memory_budget_is_kept_by_compiled_steps(monkeypatch):
    backend = "aot_eager_decomp_partition"  # which chooses what is saved as Inductor does
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())))
    x, saved, gradients = torch.randn(64, 32), [], []

    def take(forward: nn.Module) -> None:
        held: dict[int, int] = {}
        resident = {parameter.data_ptr() for parameter in (*model.parameters(), x)}

        def note(t: torch.Tensor) -> torch.Tensor:
            if t.data_ptr() not in resident:
                held[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = forward(x)
        y.square().sum().backward()
        saved.append(sum(held.values()))

    for budget in (None, 0.2):
        model.zero_grad()
        Compiled(model, replace(COMPILED, activation_memory_budget=budget)).step(take)
        gradients.append(model[0].weight.grad.clone())
    assert saved[1] < 0.5 * saved[0]
    torch.testing.assert_close(*gradients)
    assert torch._functorch.config.activation_memory_budget == 1


def test_programs_stored_for_other_schemas_are_not_found(monkeypatch):
    tags = []

    def backend(graph, _):
        tags.append(torch.compiler.config.cache_key_tag)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for schema in ("f(Tensor x)", "f(Tensor x, int n=0)"):
        monkeypatch.setitem(OPS, "f", SimpleNamespace(overload=SimpleNamespace(_schema=schema)))
        Compiled(nn.Linear(3, 1), COMPILED).step(lambda forward: forward(torch.ones(2, 3)))
    assert len({*tags, torch.compiler.config.cache_key_tag}) == 3


class TestGraphs:
    """CUDA graphs as far as they can be tested without a card."""

    error: Exception = RuntimeError("CUDA error: stream is capturing\nmore")  # of the graphs

    @pytest.fixture
    def compilations(self, monkeypatch):
        """The modes that torch.compile was called with; the result for a mode fails."""
        modes = []

        def fails(_):
            raise TestGraphs.error

        def fake(model, *, fullgraph, mode):
            modes.append(mode)
            return model if mode is None else fails

        monkeypatch.setattr(torch, "compile", fake)
        return modes

    def test_that_fail_leave_a_compiled_step(self, compilations, caplog):
        model = nn.Linear(3, 1)
        trained = Compiled(model, GRAPHS)
        for _ in range(2):
            model.weight.grad = torch.ones(1, 3)  # of a micro-batch before the failure
            trained.step(lambda forward: forward(torch.ones(2, 3)).sum().backward())
        assert compilations == ["reduce-overhead", None]
        assert trained.works
        assert model.weight.grad.tolist() == [[3.0] * 3]
        assert said(caplog) == [
            "training continues without CUDA graphs: CUDA error: stream is capturing"
        ]

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
    def test_do_not_hide_other_errors(self, error, compilations, monkeypatch):
        monkeypatch.setattr(TestGraphs, "error", error())
        with pytest.raises(error):
            Compiled(nn.Linear(3, 1), GRAPHS).step(lambda forward: forward(torch.ones(3)))
        assert compilations == ["reduce-overhead"]

    def test_a_profile_of_graphs_needs_a_card(self):
        with pytest.raises(UsageError, match="CUDA graphs need a CUDA device"):
            profile("vit-micro", compile=True, cuda_graphs=True, device="cpu")

    def test_do_not_write_their_outputs_into_gradients(self):
        """A present gradient is added to; otherwise torch would take a graph's output for it."""
        model, rows = nn.Linear(2, 3), [(torch.ones(2, 2), torch.zeros(2).long())] * 2
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        held = {}
        for job in (replace(GRAPHS, accumulate=2), replace(COMPILED, accumulate=2), GRAPHS):
            job = replace(job, precision="fp32").resolved({}, 1000)
            micro = rows[: job.accumulate]
            optimizer = build_optimizer(model, job)
            train_step(model, ByLogits(lambda net, x: net(x), job), micro, optimizer, job, scaler)
            held[bool(job.cuda_graphs), job.accumulate] = model.weight.grad is not None
            optimizer.zero_grad()
        assert held == {(True, 2): True, (False, 2): False, (True, 1): False}


class TestPayoff:
    def test_is_the_first_step_that_has_made_up_for_compiling(self):
        assert Payoff.of(first=10.25, eager=0.5, compiled=0.25) == Payoff(10.0, 0.5, 0.25, 40)
        assert Payoff.of(first=10.0, eager=0.5, compiled=0.5).steps is None

    @pytest.mark.parametrize(
        ("steps", "after", "level", "end"),
        [
            (43, 0.25, "INFO", "so it pays off after 40 steps."),
            (42, 0.25, "WARNING", "so it pays off after 40 steps, and the run has only 42."),
            (42, 0.75, "WARNING", "so it does not pay off; leave --compile out."),
        ],
    )
    def test_is_said_once(self, steps, after, level, end, no_codegen, caplog):
        caplog.set_level("INFO")
        trial = Trial(nn.Linear(2, 2), replace(COMPILED, steps=steps))
        for seconds in (9, 0.5, 0.5, 10 + after, 3, after, after, after, 7, 7):
            trial.note(seconds)
        (record,) = caplog.records
        assert record.levelname == level
        assert record.getMessage() == (
            f"compiling took 10 s; a step takes {1000 * after:.0f} ms instead of 500 ms, {end}"
        )


def test_a_resumed_run_is_compiled_again(no_codegen, one_block, tmp_path):
    job = replace(JOB, compile=True, save_every=JUDGED, steps=JUDGED + 6)
    run = finetune(job, Recipe("full"), out=tmp_path / "run", device="cpu")
    for _ in range(JUDGED):
        next(run)
    first = run.trial.compile_seconds
    run.lock.release()
    again = finetune(job, Recipe("full"), out=tmp_path / "run", device="cpu", resume=True)
    assert again.trial.compile_seconds == first > 0
    list(again)
    result = again.result()
    assert (result["steps"], result["compiled"]) == (JUDGED + 6, True)
    assert len(again.trial._seconds) == 6  # too few to be judged, so the first payoff stands
    assert result["payoff"]["compile_seconds"] == first
