"""The command `finetune`: output streams, header and bar, one JSON document, signals."""

import io
import json
import os
import re
import shutil
import signal
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from razorctl.cli.views import common as views
from razorctl.methods import DEFAULT_METHOD
from razorctl.training import run as trainer
from razorctl.training import run_files
from razorctl.training.checkpoints import Checkpoints
from tests import local_hub
from tests.cli.commands import QUICK, finetune, razorctl
from tests.forked import Forked, razorctl_command
from tests.models import registered
from tests.own import photos, texts

EACH = ("--evaluate-every", "1")
FULL = ("--method", "full")  # the soonest prepared, where the method is of no matter


def test_table_goes_to_stdout():
    result = finetune("--ratio", "0.8")
    assert result.exit_code == 0, result.stderr
    assert f"vit-micro on digits: {DEFAULT_METHOD}, ratio 0.8" in result.stdout
    for row in ("stored for backward", "full fine-tuning stores", "step", "epoch", "test accuracy"):
        assert row in result.stdout
    assert "peak" not in result.stdout  # not measured on a CPU, so not shown
    (run,) = Path("runs").iterdir()
    assert result.stderr.splitlines()[:4] == [
        "vit-micro on digits: razor, ratio 0.8, batch 16, 3 steps, on cpu",
        f"run directory: {run}",
        "0.03 epochs, fp32, lr 0.2",
        "activations stored for backward: 807 KiB; full fine-tuning stores 4.6 MiB",
    ]
    assert str(run / "model.safetensors") in result.stdout
    assert (run / "model.safetensors").exists()


def test_a_run_on_a_cpu_never_says_that_it_has_cuda_graphs():
    result = finetune("--dry-run", "--cuda-graphs")
    lines = [line for line in result.stderr.splitlines() if "CUDA graphs" in line]
    assert lines == ["note: CUDA graphs need a CUDA device; steps run without."]


def screen(monkeypatch, term: str) -> io.StringIO:
    """Returns the text that a terminal of 80 columns gets on stderr."""
    shown = io.StringIO()
    monkeypatch.setenv("TERM", term)
    terminal = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(views, "err", terminal)
    return shown


def test_a_terminal_shows_what_is_done_and_then_a_bar_of_80_columns(monkeypatch):
    shown = screen(monkeypatch, "xterm")
    finetune(*EACH)
    lines = [line.strip() for line in re.split(r"[\r\n]", shown.getvalue())]
    parts = ("run directory", "tracing what a step stores ...", "fp32", "3/3")
    seen = [next(i for i, line in enumerate(lines) if part in line) for part in parts]
    assert seen == sorted(seen)
    frame = [line for line in lines if "3/3" in line][-1]
    for part in ("loss ", "acc 0.", "stored 457 KiB", "90 % less", "/s", "00:00"):
        assert part in frame
    assert "…" not in frame


def test_a_dumb_terminal_gets_lines(monkeypatch):
    shown = screen(monkeypatch, "dumb")
    finetune(*FULL)
    assert not {"\x1b", "\r"} & set(shown.getvalue())
    assert re.match(
        r"step 3 of 3: loss \d\.\d\d, accuracy 0\.\d{3}", shown.getvalue().split("\n")[-2]
    )


def test_what_goes_with_a_method_is_a_setting_that_a_run_can_be_repeated_with():
    flags = ["--lora", "--activation-checkpointing", "--ratio", "0.5", "--out", "run"]
    assert finetune(*flags).exit_code == 0
    again = razorctl("--config", "run/config.toml", "finetune", "--json", "--out", "again")
    result = json.loads(again.stdout)
    assert result["recipe"]["lora"] is True
    assert result["recipe"]["activation_checkpointing"] is True
    assert Path("again/adapter/adapter_model.safetensors").exists()
    assert result["saved_bytes"] < 0.5 * result["full_saved_bytes"]


STOPPED = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "terminated"),
    (signal.SIGHUP, 129, "terminated"),
]


@pytest.mark.parametrize(("number", "code", "word"), STOPPED, ids=["SIGINT", "SIGTERM", "SIGHUP"])
class TestSignals:
    """Signals in this process; tests of grids send them to a process of its own."""

    def test_in_training_they_say_what_is_left(self, number, code, word, monkeypatch):
        def note_peak(run: trainer.Run) -> None:
            if len(run.history) == 2:  # in the third step
                signal.raise_signal(number)

        monkeypatch.setattr(trainer.Run, "_note_peak", note_peak)
        result = finetune(*FULL, "--out", "run", "--json", "--steps", "4")
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.splitlines()[-1] == (
            f"error: {word}: step 3 of 4 is saved; continue with "
            "`razorctl finetune --resume --out run --device cpu`."
        )
        assert run_files.steps_taken(Path("run")) == 3

    def test_a_second_one_stops_at_once(self, number, code, word, monkeypatch):
        def note_peak(run: trainer.Run) -> None:
            if len(run.history) == 1:  # in the second step
                signal.raise_signal(number)
                signal.raise_signal(number)

        monkeypatch.setattr("razorctl.training.signals.TOGETHER", 0)
        monkeypatch.setattr(trainer.Run, "_note_peak", note_peak)
        result = finetune(*FULL, "--out", "run", "--steps", "4", "--save-every", "4", *EACH)
        assert result.exit_code == code
        assert (
            f"error: {word}: step 1 of 4 is saved; continue with" in result.stderr.splitlines()[-1]
        )

    def test_before_training_they_leave_nothing(self, number, code, word, monkeypatch):
        traced = "razorctl.training.preparation.full_step"
        monkeypatch.setattr(traced, lambda *_, **__: signal.raise_signal(number))
        result = finetune(*FULL, "--out", "new/run")
        assert result.exit_code == code
        sentence = f"error: {word}: before the first step; nothing was written."
        assert result.stderr.splitlines()[-1] == sentence
        assert not list(Path().iterdir())


def to_a_full_disk(*args: str) -> None:
    """The command, whose messages go to a disk that is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    with registered(shallow=True):
        razorctl_command(*args)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is full")
def test_messages_that_cannot_be_written_end_nothing(tmp_path):
    args = ["finetune", "vit-micro", "digits", *QUICK, *FULL, "--out", "run"]
    code, out, _ = Forked(to_a_full_disk, *args, folder=tmp_path).ended()
    assert code == 0
    assert "loss" in out
    assert Path("run/result.json").exists()


def test_what_fails_between_two_steps_loses_none(monkeypatch):
    def say(text: str) -> None:
        if text.startswith("step 2"):
            raise RuntimeError("no such color")

    monkeypatch.setattr("razorctl.cli.views.common.say", say)
    each = ["--steps", "4", "--evaluate-every", "1", "--save-every", "100"]
    result = finetune(*FULL, "--out", "run", *each)
    assert result.exit_code == 1
    assert "no such color" in result.stderr
    assert [path.name for path in Path("run/checkpoints").iterdir()][-1:] == ["step-00000002"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, shallow) -> Path:
    out = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer.Run,
            "_note_peak",
            lambda run: signal.raise_signal(signal.SIGINT) if len(run.history) == 1 else None,
        )
        assert finetune("--out", str(out), "--steps", "4", "--ratio", "0.5").exit_code == 130
    return out


class TestResume:
    @pytest.fixture
    def stopped(self, interrupted) -> None:
        """A run in the directory `run` that was interrupted after two of four steps."""
        shutil.copytree(interrupted, "run")

    def test_needs_nothing_but_the_directory(self, stopped):
        result = razorctl("finetune", "--resume", "--out", "run", "--json")
        assert result.exit_code == 0, result.stderr
        assert "resuming from step 2 of 4" in result.stderr
        document = json.loads(result.stdout)
        assert (document["steps"], document["recipe"]["ratio"]) == (4, 0.5)
        again = razorctl("finetune", "--resume", "--out", "run", "--json")
        assert (again.exit_code, json.loads(again.stdout)) == (0, document)
        assert "holds a finished run" in again.stderr
        assert not Path("run/checkpoints").exists()

    def test_takes_the_same_settings_again(self, stopped, monkeypatch):
        Path("razorctl.toml").write_text("[job]\nsteps = 9\n")  # was not there at the start
        monkeypatch.setenv("RAZORCTL_SEED", "0")
        flags = ["--steps", "4", "--ratio", "0.5", "--precision", "auto"]
        assert finetune("--out", "run", "--resume", *flags).exit_code == 0
        assert Path("run/model.safetensors").exists()

    def test_takes_a_lower_rate_after_a_step_that_diverged(self, stopped):
        saved = Checkpoints(Path("run"))
        saved.mark(saved.newest, diverged=True)
        result = razorctl("finetune", "--resume", "--out", "run", "--lr", "0.1")
        assert result.exit_code == 0, result.stderr
        assert run_files.read_settings(Path("run"))[0].learning_rate == 0.1

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["--ratio", "0.9", "--steps", "5", "--lr", "0.1"], "steps 4, learning rate 0.2"),
            (["--epochs", "1"], "steps 4; resume it with the same"),
            (["--gpu", "t4"], "gpu left out"),
            (["--accumulate", "2"], "accumulate 1; resume it with the same"),
        ],
    )
    def test_names_all_settings_that_differ(self, flags, sentence, stopped):
        result = razorctl("finetune", "vit-micro", "digits", "--resume", "--out", "run", *flags)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: run was started with ")
        for flag in flags[::2]:
            names = {"--lr": "learning rate", "--epochs": "steps"}
            assert names.get(flag, flag.removeprefix("--")) in line
        assert sentence in line

    def test_without_a_run_starts_one_or_says_what_lacks(self):
        assert razorctl("finetune", "--resume").exit_code == 2
        result = razorctl("finetune", "--resume", "--out", "run")
        assert result.exit_code == 2
        assert "run holds no run to continue; name MODEL and DATASET" in result.stderr
        assert finetune(*FULL, "--resume", "--out", "run").exit_code == 0
        assert Path("run/result.json").exists()

    def test_goes_on_with_what_a_plan_has_chosen(self, monkeypatch):
        planned = ["--gpu", "T4", "--vram", "16GB", "--precision", "fp32", "--out", "run"]
        planned += ["--max-ratio", "0.5"]  # fewer ways to trace
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Run, "_note_peak", lambda _: signal.raise_signal(signal.SIGTERM))
            assert finetune(*planned).exit_code == 143
        document = json.loads(Path("run/plan.json").read_text())
        other = finetune("--resume", *planned, "--vram", "12GB")
        assert other.exit_code == 2
        assert f"vram {15 * 2**30}" in other.stderr  # as a driver says it
        result = finetune("--resume", "--json", *planned)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["predicted"] == document["chosen"]["predicted"]

    def test_finds_ones_own_data_from_any_directory(self, tmp_path, monkeypatch):
        photos(tmp_path / "data" / "photos")
        monkeypatch.chdir("data")
        command = ("finetune", "vit-micro", "../data/photos", *QUICK, *FULL, "--batch-size", "4")
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Run, "_note_peak", lambda _: signal.raise_signal(signal.SIGTERM))
            assert razorctl(*command, "--out", "../run").exit_code == 143
        known = tomllib.loads((tmp_path / "run/config.toml").read_text())["job"]["dataset"]
        assert known == str(tmp_path.resolve() / "data" / "photos")
        monkeypatch.chdir(tmp_path)
        other = razorctl("finetune", "vit-micro", "data", "--resume", "--out", "run")
        assert other.exit_code == 2
        assert f"run was started with dataset {known}; resume it" in other.stderr
        result = razorctl("finetune", "vit-micro", "data/photos", "--resume", "--out", "run")
        assert result.exit_code == 0, result.stderr
        assert json.loads(Path("run/result.json").read_text())["dataset"] == known


def configured(folder: Path) -> Path:
    """A model of transformers without its weights."""
    folder.mkdir()
    local_hub.bert(folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("model", ["timm:test_vit", "torchvision:squeezenet1_1", "configured"])
def test_models_train_from_scratch_without_their_weights(model):
    """Without the hub, all three models are missing unless the option is given."""
    small = ("--batch-size", "4", "--steps", "1", "--device", "cpu", "--out", "run", *FULL)
    data, size = (texts(Path("t.csv")), "8") if model == "configured" else (photos(Path("d")), "64")
    if model == "configured":
        configured(Path(model))
    command = ("finetune", model, str(data), *small, "--input-size", size)
    result = razorctl(*command)
    assert result.exit_code == (5 if model == "configured" else 6), result.stderr
    result = razorctl(*command, "--from-scratch")
    assert result.exit_code == 0, result.stderr
    assert f"note: {model} starts from random weights" in result.stderr
    assert razorctl("evaluate", "run", "--device", "cpu").exit_code == 0
