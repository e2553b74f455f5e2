"""The command line as a user meets it: output streams, exit codes, one-sentence errors."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from razorctl import models
from razorctl.cli.app import app
from razorctl.cli.views import common as views
from razorctl.cli.views import profile as profile_view
from razorctl.job import Job
from razorctl.methods import DEFAULT_METHOD, METHODS
from razorctl.recipe import Recipe
from razorctl.training import run as trainer

QUICK = ["--batch-size", "16", "--steps", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)


def razorctl(*args: str) -> Result:
    return CliRunner().invoke(app, args)


def finetune(*args: str) -> Result:
    return razorctl("finetune", "vit-micro", "digits", *QUICK, *args)


def profile(*args: str) -> Result:
    return razorctl(
        "profile", "vit-micro", "--batch-size", "4", "--steps", "1", "--device", "cpu", *args
    )


def _options(command: str) -> set[str]:
    return {option.name for option in typer.main.get_command(app).commands[command].params}


def test_what_is_planned_profiled_and_run_takes_every_setting():
    recipe = {field.name for field in fields(Recipe)} - {"seed"}
    for command in ("plan", "profile", "finetune"):
        assert recipe <= _options(command)
    job = {field.name for field in fields(Job)}
    assert job <= _options("finetune")
    assert job - {"accumulate"} <= _options("plan")  # which chooses that
    assert {"batch_size", "input_size", "precision", "optimizer"} <= _options("profile")


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "razorctl", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_another_broken_pipe_is_one(monkeypatch):
    def target(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("razorctl.planning.gpus.target", target)
    result = razorctl("plan", "vit-micro", "digits")
    assert result.exit_code == 1
    assert "Broken pipe" in result.stderr


def test_table_goes_to_stdout():
    result = finetune("--ratio", "0.8")
    assert result.exit_code == 0, result.stderr
    assert f"vit-micro on digits: {DEFAULT_METHOD}, ratio 0.8" in result.stdout
    for row in ("saved for backward", "full fine-tuning saves", "step", "epoch", "test accuracy"):
        assert row in result.stdout
    assert "peak" not in result.stdout  # not measured on a CPU, so not shown
    (run,) = Path("runs").iterdir()
    assert result.stderr.splitlines()[:3] == [
        "vit-micro on digits: razor, ratio 0.8, batch 16, 3 steps, on cpu",
        f"run directory: {run}",
        "fp32, lr 0.2, saves 2.36 MiB, 82% less",
    ]
    assert str(run / "model.safetensors") in result.stdout
    assert (run / "model.safetensors").exists()


def screen(monkeypatch, term: str) -> io.StringIO:
    """What a terminal of 80 columns gets on stderr."""
    shown = io.StringIO()
    monkeypatch.setenv("TERM", term)
    terminal = Console(file=shown, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(views, "err", terminal)
    return shown


def test_a_terminal_shows_what_is_done_and_then_a_bar_of_80_columns(monkeypatch):
    shown = screen(monkeypatch, "xterm")
    finetune("--evaluate-every", "1")
    lines = [line.strip() for line in re.split(r"[\r\n]", shown.getvalue())]
    parts = ("run directory", "tracing what a step saves ...", "fp32", "3/3")
    seen = [next(i for i, line in enumerate(lines) if part in line) for part in parts]
    assert seen == sorted(seen)
    frame = [line for line in lines if "3/3" in line][-1]
    for part in ("loss ", "acc 0.", "saves 1.28 MiB", "90% less", "/s", "00:00"):
        assert part in frame
    assert "…" not in frame


def test_a_dumb_terminal_gets_lines(monkeypatch):
    shown = screen(monkeypatch, "dumb")
    finetune()
    assert not {"\x1b", "\r"} & set(shown.getvalue())
    assert re.match(
        r"step 3 of 3: loss \d\.\d\d, accuracy 0\.\d{3}", shown.getvalue().split("\n")[-2]
    )


def test_the_header_waits_for_no_library():
    code = (
        "import sys; from razorctl.cli.app import app; from razorctl.cli.views import common\n"
        "def waiting(_):\n"
        "    sys.exit(3 if {'torch', 'timm', 'datasets', 'numpy'} & set(sys.modules) else 7)\n"
        "common.waiting = waiting\n"
        "app(['finetune', 'vit-micro', 'digits', '--steps', '1000'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    title, directory = done.stderr.splitlines()
    assert title == "vit-micro on digits: razor, ratio 0.9, 1,000 steps"
    assert directory.startswith("run directory: runs/vit-micro-digits-razor-")
    assert not Path("runs").exists()


def test_json_is_one_document_and_nothing_else():
    result = finetune("--json", "--out", "here")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["run_dir"] == "here"
    assert document["recipe"]["method"] == DEFAULT_METHOD
    assert document["job"]["batch_size"] == 16
    assert document["steps"] == 3
    assert "run directory: here" in result.stderr


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_name(method):
    result = finetune("--json", "--method", method)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["recipe"]["method"] == method
    # An adapter's gradient needs the whole input too.
    dense = method in ("full", "lora")
    assert (document["saved_bytes"] < document["full_saved_bytes"]) == (not dense)


def test_attention_and_mean_correction_are_settings():
    result = finetune(
        "--json", "--method", "backrazor", "--attention", "flash", "--mean-correction"
    )
    recipe = json.loads(result.stdout)["recipe"]
    assert recipe["attention"] == "flash"
    assert recipe["mean_correction"] is True


def test_list_names_everything():
    groups = json.loads(razorctl("list", "--json").stdout)
    assert set(groups) == {"models", "data sets", "methods", "gpus", "recipes"}
    assert set(groups["methods"]) == set(METHODS)
    recipes = groups.pop("recipes")
    names = [name for group in groups.values() for name in group]
    lines = razorctl("list").stdout.splitlines()
    assert len(lines) == len(names) + 1  # which says how to see more, such as recipes
    assert all(f" {name} " in line for name, line in zip(names, lines, strict=False))
    assert all(len(line) <= 80 for line in lines)
    assert "recipes" in lines[-1]
    assert not any(name in line for name in recipes for line in lines)


def test_list_of_one_kind_is_whole():
    groups = json.loads(razorctl("list", "--json").stdout)
    for group, names in groups.items():
        kind = group.replace(" ", "")
        assert json.loads(razorctl("list", kind, "--json").stdout) == {group: names}
        words = razorctl("list", kind).stdout.split()
        assert words == [word for entry in names.items() for text in entry for word in text.split()]
    assert "unknown kind 'modles'; did you mean 'models'?" in razorctl("list", "modles").stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("finetune vit-m", {"vit-micro"}),
        ("plan vit-micro cifar", {"cifar10", "cifar100"}),
        ("profile vit-micro --method prebackrazor", {m for m in METHODS if m.startswith("preb")}),
        ("plan --gpu rtx-20", {"rtx-2080-ti"}),
        ("finetune --recipe sheared-tab1-j", {"sheared-tab1-js50", "sheared-tab1-js70"}),
    ],
)
def test_a_shell_completes_names(typed, offered):
    asked = {
        "_RAZORCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"razorctl {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    result = CliRunner().invoke(app, [], prog_name="razorctl", env=asked)
    assert set(result.stdout.split()) == offered


@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_a_profile_fit(width, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(views, "out", Console(file=screen, width=width))
    result = profile("--ratio", "0.8")
    assert result.exit_code == 0, result.stderr
    table = screen.getvalue()
    assert f"vit-micro: {DEFAULT_METHOD}, ratio 0.8, batch of 4, fp32, sgd, on cpu" in table
    kind = "  linear" if width > 60 else " +\\d"  # which is left out first
    assert re.search(rf"attn\.qkv +6 x{kind}", table)
    for row in ("linear", "head", "total", "sampling", "step"):
        assert row in table
    assert re.search(r"traced +\d", table)
    assert "measured" not in table  # by nothing on a CPU
    assert not re.search(r"\S…", table)  # names alone are cut, at their beginning
    assert max(map(len, table.splitlines())) <= width
    assert result.stderr == ""


def test_long_names_of_modules_keep_their_end(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(views, "out", Console(file=screen, width=80))
    names = [f"model.encoder.layer.{i}.attention.output.dense" for i in range(2)]
    names += [f"{letter}." for letter in "abcdefghijklmnop"] + [""]
    result = {
        "model": "odd",
        "recipe": {"method": "full", "joint_budget": 1.0},
        "batch_size": 1,
        "precision": "bf16",
        "optimizer": "sgd",
        "device": "a GPU",
        "steps": 5,
        "totals": {"saved_bytes": 0, "full_saved_bytes": 19},
        "by_kind": {"linear": 0},
        "by_kind_full": {"linear": 19},
        "rows": [
            {"module": name, "kind": "linear", "saved_bytes": 0, "full_saved_bytes": 1}
            for name in names
        ],
        "peak_bytes": {"traced": 2**20, "measured_allocated": 2**21, "measured_reserved": 2**30},
        "phases": dict.fromkeys(profile_view.PHASES, 0.1),
        "step_s": 0.5,
    }
    profile_view.show(result)
    table = screen.getvalue()
    assert re.search(r"….*\.output\.dense +2 x", table)
    assert "others" in table
    assert re.search(r"measured, allocated +2\.00 MiB", table)
    assert re.search(r"measured, reserved +1\.00 GiB", table)
    assert table.count("20.0%") == len(profile_view.PHASES)


def test_json_of_a_profile_is_one_document_and_nothing_else():
    result = profile("--json", "--method", "backrazor", "--trace", "trace.json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["recipe"]["method"] == "backrazor"
    assert document["totals"]["saved_bytes"] < document["totals"]["full_saved_bytes"]
    assert set(document["phases"]) == set(profile_view.PHASES)
    assert document["peak_bytes"]["measured_allocated"] is None
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert result.stderr == ""


def test_a_profile_takes_the_recipe_and_the_batch_of_a_run_but_not_its_steps():
    Path("run.toml").write_text(
        "[job]\nmodel = 'vit-micro'\nsteps = 1000\nbatch_size = 3\n"
        "[recipe]\nmethod = 'backrazor'\nmean_correction = true\n"
    )
    result = razorctl("--config", "run.toml", "profile", "--device", "cpu", "--json")
    document = json.loads(result.stdout)
    assert (document["batch_size"], document["steps"]) == (3, 5)
    assert document["recipe"]["method"] == "backrazor"
    assert document["recipe"]["mean_correction"] is True


BAD = {
    "negative seed": (["--seed", "-1"], 2, "seed -1 is outside [0, 2**32)"),
    "unknown model": (["finetune", "vit-mikro", "digits"], 2, "did you mean 'vit-micro'?"),
    "unknown data set": (["finetune", "vit-micro", "digit"], 2, "did you mean 'digits'?"),
    "unknown method": (["--method", "backrazer"], 2, "did you mean 'backrazor'?"),
    "ratio of one": (["--ratio", "1"], 2, "ratio 1.0 is outside [0, 1)"),
    "negative ratio": (["--ratio", "-0.1"], 2, "ratio -0.1 is outside [0, 1)"),
    "no ratio at all": (["--ratio", "nan"], 2, "ratio nan is outside [0, 1)"),
    "joint budget of zero": (["--joint-budget", "0"], 2, "joint budget 0.0 is outside (0, 1]"),
    "large joint budget": (["--joint-budget", "1.5"], 2, "joint budget 1.5 is outside (0, 1]"),
    "unknown attention": (["--attention", "flsh"], 2, "did you mean 'flash'?"),
    "sparse-flash of full": (
        ["--method", "full", "--attention", "sparse-flash"],
        2,
        "choose attention 'flash'",
    ),
    "large batch": (["--batch-size", "1438"], 2, "larger than the 1437 training examples"),
    "no batch": (["--batch-size", "0"], 2, "not a positive number"),
    "no pixels": (["--input-size", "0"], 2, "input size 0 is not a positive number"),
    "other pixels": (["--input-size", "30"], 2, "leave the input size out"),
    "text of images": (["finetune", "bert-base", "digits"], 2, "data sets of texts: rte"),
    "no steps": (["--steps", "0"], 2, "not a positive number"),
    "steps and epochs": (["--steps", "1", "--epochs", "1"], 2, "give one of them"),
    "unusable device": (["--device", "warp"], 2, "try cpu"),
    "existing directory": (["--out", "taken"], 2, "taken exists already"),
    "directory in a file": (["--out", "file/run"], 2, "cannot write file/run"),
    "profile of an unknown model": (["profile", "vit-mikro"], 2, "did you mean 'vit-micro'?"),
    **{
        f"profile, {name}": (["profile", "vit-micro", "--device", "cpu", *args], 2, sentence)
        for name, (args, sentence) in {
            "unknown method": (["--method", "backrazer"], "did you mean 'backrazor'?"),
            "ratio of one": (["--ratio", "1"], "ratio 1.0 is outside [0, 1)"),
            "ratio beyond reach": (["--ratio", "0.999", "--batch-size", "4"], "cannot be met"),
            "no batch": (["--batch-size", "0"], "batch size 0 is not a positive number"),
            "no steps": (["--steps", "0"], "steps 0 is not a positive number"),
            "unusable device": (["--device", "warp"], "try cpu"),
            "snapshot on a CPU": (["--snapshot", "new.pickle"], "leave out --snapshot"),
            "trace in a file": (["--trace", "file/trace.json"], "cannot write file/trace.json"),
            "trace over a directory": (["--trace", "taken"], "name another file with --trace"),
        }.items()
    },
}


def assert_ends_with_an_error(result: Result, sentence: str) -> None:
    """One sentence is all there is below the header, if there is one."""
    *header, last = result.stderr.splitlines()
    assert len(header) in (0, 2)
    assert last.startswith("error: ")
    assert sentence in last


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(case):
    args, code, sentence = BAD[case]
    Path("taken").mkdir()
    Path("file").touch()
    if args[0].startswith("--"):
        args = ["finetune", "vit-micro", "digits", *args]
    result = razorctl(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert_ends_with_an_error(result, sentence)
    assert sorted(p.name for p in Path().iterdir()) == ["file", "taken"]


def test_a_model_in_which_nothing_can_be_swapped(monkeypatch):
    micro = models.models()["vit-micro"]
    odd = replace(
        micro,
        name="odd",
        build=lambda classes, _: torch.nn.Sequential(
            torch.nn.Flatten(2), torch.nn.Conv1d(1, classes, 784)
        ),
        transform=lambda _, size: micro.transform(micro.build(2)),
    )
    monkeypatch.setitem(models.models(), "odd", odd)
    result = razorctl("finetune", "odd", "digits", *QUICK)
    assert result.exit_code == 2
    assert_ends_with_an_error(result, "error: no layer of Sequential can be pruned by")
    assert "use method 'full'" in result.stderr
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "args", [["finetune"], ["finetune", "vit-micro", "digits", "--ratio", "much"], ["trainn"]]
)
def test_usage_errors_exit_with_2(args):
    result = razorctl(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 4, "raise --ratio or lower --batch-size"),
        (RuntimeError("it broke\nat length"), 1, "it broke (razorctl --debug shows where)"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_in_training(error, code, sentence, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(trainer, "finetune", fail)
    result = razorctl("finetune", "vit-micro", "digits")
    assert result.exit_code == code
    assert_ends_with_an_error(result, sentence)
    if code not in (4, 130):
        assert isinstance(
            razorctl("--debug", "finetune", "vit-micro", "digits").exception, type(error)
        )


class TestPrecedence:
    def steps_and_ratio(self, *args: str) -> tuple[int, float]:
        result = razorctl("finetune", "vit-micro", "digits", "--json", "--device", "cpu", *args)
        assert result.exit_code == 0, result.stderr
        document = json.loads(result.stdout)
        return document["steps"], document["recipe"]["ratio"]

    def test_flag_over_environment_over_project_file(self, monkeypatch):
        Path("razorctl.toml").write_text("[job]\nsteps = 2\n[recipe]\nratio = 0.5\n")
        assert self.steps_and_ratio() == (2, 0.5)
        monkeypatch.setenv("RAZORCTL_RATIO", "0.6")
        assert self.steps_and_ratio() == (2, 0.6)
        assert self.steps_and_ratio("--ratio", "0.7", "--steps", "1") == (1, 0.7)

    def test_a_runs_config_repeats_it(self):
        first = json.loads(finetune("--json", "--seed", "4", "--out", "one").stdout)
        again = razorctl("--config", "one/config.toml", "finetune", "--json", "--device", "cpu")
        second = json.loads(again.stdout)
        for key in ("recipe", "job", "accuracy", "loss", "saved_bytes"):
            assert first[key] == second[key]
        assert Path(first["weights"]).read_bytes() == Path(second["weights"]).read_bytes()

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("[job]\nstep = 2", "unknown setting in razorctl.toml 'step'; did you mean 'steps'?"),
            ("[job", "razorctl.toml is not TOML"),
            ("job = 3", "job in razorctl.toml is not a table"),
            ("[job]\nmomentum = 'much'", "momentum"),
            ("[recipe]\njoint = 3", "unknown joint '3'"),
        ],
    )
    def test_a_bad_project_file_is_refused(self, text, sentence):
        Path("razorctl.toml").write_text(text)
        result = finetune()
        assert result.exit_code == 2
        assert sentence in result.stderr

    def test_a_missing_config_is_refused(self):
        result = razorctl("--config", "nowhere.toml", "list")
        assert result.exit_code == 2
        assert "cannot read nowhere.toml" in result.stderr


STOPPED = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


@pytest.mark.parametrize(("number", "code", "word"), STOPPED, ids=["SIGINT", "SIGTERM"])
class TestSignals:
    """That they end a process of its own is tested with a grid's."""

    def test_in_training_they_say_what_is_left(self, number, code, word, monkeypatch):
        def note_peak(run: trainer.Run) -> None:
            if len(run.history) == 2:  # in the third step
                signal.raise_signal(number)

        monkeypatch.setattr(trainer.Run, "_note_peak", note_peak)
        result = finetune("--out", "run", "--json")
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr.splitlines()[-1] == (
            f"error: {word}: run holds config.toml and metrics.jsonl up to step 2; "
            "no weights are saved yet."
        )
        assert [path.name for path in sorted(Path("run").iterdir())] == [
            "config.toml",
            "metrics.jsonl",
        ]

    def test_before_training_they_leave_nothing(self, number, code, word, monkeypatch):
        monkeypatch.setattr(trainer, "saved_bytes", lambda *_, **__: signal.raise_signal(number))
        result = finetune("--out", "new/run")
        assert result.exit_code == code
        sentence = f"error: {word}: before the first step; nothing was written."
        assert result.stderr.splitlines()[-1] == sentence
        assert not list(Path().iterdir())


DONE = SimpleNamespace(result=dict)


class TestNotes:
    """Of settings that do nothing; which they are stands in test_effects."""

    def notes(self, result: Result) -> list[str]:
        assert result.exit_code == 0, result.stderr
        return [line for line in result.stderr.splitlines() if line.startswith("note: ")]

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        """Nothing is trained."""
        monkeypatch.setattr("razorctl.cli.progress.train", lambda *_: DONE)

    def test_a_flag_a_variable_and_a_line_of_a_file(self, monkeypatch):
        Path("razorctl.toml").write_text("[recipe]\nmethod = 'full'\njoint = 'branches'\n")
        monkeypatch.setenv("RAZORCTL_RATIO", "0.9")
        assert self.notes(finetune("--unbiased", "--json")) == [
            "note: the ratio does nothing: method full has none.",
            "note: joint branches does nothing without a joint budget below 1.",
            "note: unbiased does nothing: method full draws nothing.",
        ]

    def test_a_default_is_not_given(self):
        Path("razorctl.toml").write_text("[recipe]\nmethod = 'full'\nratio = 0.9\n")
        assert self.notes(finetune("--json")) == []

    def test_a_warmup_longer_than_the_steps_that_are_the_models(self, monkeypatch):
        steps = trainer.Job("vit-micro", "digits", warmup_steps=2000).resolved({"steps": 300}, 99)
        monkeypatch.setattr(trainer, "finetune", lambda *_, **__: SimpleNamespace(job=steps))
        monkeypatch.setattr(
            "razorctl.cli.progress.train", lambda prepare, *_: prepare(print) and DONE
        )
        result = razorctl("finetune", "vit-micro", "digits", "--warmup-steps", "2000", "--json")
        (note,) = self.notes(result)
        assert note.endswith("2,000 steps of warmup are not over after 300.")

    def test_a_variable_that_nothing_reads(self, monkeypatch):
        monkeypatch.setenv("RAZORCTL_RATOI", "0.5")
        monkeypatch.setenv("RAZORCTL_SEEDS", "2")  # of another command
        assert self.notes(finetune("--json")) == [
            "note: RAZORCTL_RATOI does nothing: unknown setting 'ratoi'; did you mean 'ratio'?"
        ]
