"""The values that trackers get of a run; TensorBoard's reader reads its files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.training import trackers
from razorctl.training.run import Run
from razorctl.training.trackers import check_trackers, tracked
from tests.forked import Forked, razorctl_command
from tests.own import photos
from tests.training import runs

pytestmark = pytest.mark.usefixtures("shallow")


def scalars(out: Path) -> dict[str, dict[int, float]]:
    """The charts in a run directory: name -> step -> value."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(out / "tensorboard"))
    reader.Reload()
    charts = {}
    for name in reader.Tags()["scalars"]:
        events = reader.Scalars(name)
        charts[name] = {event.step: event.value for event in events}
        assert len(charts[name]) == len(events)  # no step is there twice
    return charts


def test_tensorboard_has_every_step_and_evaluation(tmp_path):
    run = runs.begin(tmp_path / "run")
    assert [*tracked(run, check_trackers(["tensorboard"]))] == run.history
    charts = scalars(run.out)
    names = ("loss", "learning_rate", "grad_norm", "samples_per_second", "epoch")
    for name in names:
        known = {step.step: getattr(step, name) for step in run.history}
        assert charts.pop(f"train/{name}") == pytest.approx(known)
    last = run.history[-1]
    known = {f"test/{name}": {4: value} for name, value in last.metrics.items()}
    assert charts == {name: pytest.approx(values) for name, values in known.items()}
    (settings,) = (run.out / "tensorboard").glob("*/hparams.yml")
    assert "learning_rate: 0.2\n" in settings.read_text()
    assert "method: full\n" in settings.read_text()


def test_the_test_split_is_told_at_the_end(tmp_path):
    for split in ("train", "val", "test"):
        photos(tmp_path / "d" / split)
    job = Job("vit-micro", str(tmp_path / "d"), batch_size=4, steps=2, evaluate_every=1)
    run = runs.begin(tmp_path / "run", job)
    list(tracked(run, ["tensorboard"]))
    found = scalars(run.out)
    assert found["test/accuracy"] == {2: pytest.approx(run.tested["accuracy"])}
    assert [*found["validation/accuracy"]] == [1, 2]


def test_a_resumed_run_goes_on_in_the_same_charts(tmp_path):
    out = tmp_path / "run"
    first = runs.begin(out, replace(runs.JOB, save_every=2))
    steps = tracked(first, ["tensorboard"])
    lost = [next(steps) for _ in range(3)][-1]  # its checkpoint is of step 2
    steps.close()
    runs.stop(first)
    run = runs.resume(out, replace(runs.JOB, save_every=2))
    assert len(run.history) == 2
    assert check_trackers([], out) == ("tensorboard",)
    list(tracked(run, check_trackers([], out)))
    found = scalars(out)["train/loss"]
    assert found == pytest.approx({step.step: step.loss for step in run.history})
    assert found[3] == pytest.approx(lost.loss)
    assert len([*(out / "tensorboard").glob("*/hparams.yml")]) == 1


def test_a_tracker_that_comes_later_gets_the_steps_before(tmp_path):
    runs.stop(runs.begin(tmp_path / "run", steps=2))
    run = runs.resume(tmp_path / "run")
    list(tracked(run, ["tensorboard"]))
    assert [*scalars(run.out)["train/loss"]] == [1, 2, 3, 4]


class Broken:
    """A tracker of accelerate's kind, which fails in the method named `fails`."""

    fails = ""

    def __init__(self, project: str, **settings: object) -> None:
        self.calls.append(f"init {project}")
        self.settings.append(settings)

    def __getattr__(self, name):
        def call(*_, **__):
            self.calls.append(name)
            if name == self.fails:
                raise OSError("no route to host")

        return call


@pytest.fixture
def broken(monkeypatch):
    from accelerate import tracking

    monkeypatch.setattr(tracking, "WandBTracker", Broken)
    monkeypatch.setattr(Broken, "calls", [], raising=False)
    monkeypatch.setattr(Broken, "settings", [], raising=False)
    return Broken


def test_one_that_fails_is_left_out_after_a_warning(tmp_path, monkeypatch, broken, caplog):
    monkeypatch.setattr(broken, "fails", "log")
    run = runs.begin(tmp_path / "run")
    assert len([*tracked(run, ["wandb"])]) == 4
    assert caplog.messages == ["wandb fails (no route to host); training continues without."]
    assert broken.calls == ["init razorctl", "start", "store_init_configuration", "log"]


def test_one_that_cannot_be_started_ends_the_run_before_training(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(broken, "fails", "start")
    monkeypatch.setattr(Run, "_step", lambda *_: pytest.fail("it trains"))
    run = runs.begin(tmp_path / "run")
    sentence = r"wandb cannot be started \(no route to host\); .* `razorctl finetune --resume"
    with pytest.raises(UsageError, match=sentence):
        next(tracked(run, ["wandb"]))


def test_a_resumed_run_is_the_same_one_of_wandb(tmp_path, broken):
    run = runs.begin(tmp_path / "run")
    steps = tracked(run, ["wandb"])
    next(steps)
    steps.close()
    assert broken.calls[-1] == "finish"
    runs.stop(run)
    list(tracked(runs.resume(tmp_path / "run"), ["wandb"]))
    first, second = broken.settings
    assert first == second
    assert first["id"] == json.loads((tmp_path / "run/trackers.json").read_text())["id"]
    assert (first["name"], first["dir"]) == ("run", str(tmp_path / "run"))


def test_names_are_checked_before_anything_is_loaded(monkeypatch):
    assert check_trackers([]) == ()
    assert check_trackers(["tensorboard,tensorboard", "tensorboard"]) == ("tensorboard",)
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord'; did you mean 'tensorb"):
        check_trackers(["tensorbord"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: name == "accelerate" or None)
    with pytest.raises(UsageError, match="tensorboard and wandb are not installed; run `pip inst"):
        check_trackers(["tensorboard", "wandb"])


def test_the_command_line_writes_lines_to_stderr_alone(tmp_path):
    """stdout and stderr are files, as in a job of a cluster."""
    pytest.importorskip("tensorboard")
    words = "finetune vit-micro digits --steps 4 --batch-size 8 --evaluate-every 2 --device cpu"
    more = ("--method", "full", "--out", "run", "--json", "--tracker", "tensorboard")
    code, out, errors = Forked(razorctl_command, *words.split(), *more, folder=tmp_path).ended()
    assert code == 0, errors
    assert json.loads(out)["steps"] == 4
    lines = dict(line.split(": ", 1) for line in errors.splitlines() if ": loss" in line)
    for evaluated in ("step 2 of 4", "step 4 of 4"):  # others are told if they take long
        assert ", accuracy 0." in lines[evaluated]
        assert "/s" in lines[evaluated]
    assert [*scalars(tmp_path / "run")["train/loss"]] == [1, 2, 3, 4]


def test_a_missing_package_is_told_before_the_run_begins(tmp_path, monkeypatch):
    from tests.cli.commands import assert_ends_with_an_error, razorctl

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    result = razorctl("finetune", "vit-micro", "digits", "--out", "run", "--tracker", "wandb")
    assert result.exit_code == 2
    assert_ends_with_an_error(result, "run `pip install accelerate wandb`, or leave --tracker out")
    assert not Path("run").exists()
