"""Errors of every command: one sentence, the exit code, and the files that a stop leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from razorctl.cli import app
from razorctl.system import hub
from razorctl.training import run as trainer
from tests.cli.commands import assert_ends_with_an_error, razorctl


def test_a_reader_that_has_read_enough_is_no_error():
    command = [sys.executable, "-m", "razorctl", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


BAD = {
    "negative seed": (["--seed", "-1"], 2, "seed -1 is outside [0, 2**32)"),
    "unknown model": (["finetune", "vit-mikro", "digits"], 2, "did you mean 'vit-micro'?"),
    "sparse-flash of full": (
        ["--method", "full", "--attention", "sparse-flash"],
        2,
        "choose attention 'flash'",
    ),
    "large batch": (["--batch-size", "1438"], 2, "larger than the 1,437 training examples"),
    "directory in a file": (["--out", "file/run"], 2, "cannot write file/run"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(case):
    args, code, sentence = BAD[case]
    Path("file").touch()
    if args[0].startswith("--"):
        args = ["finetune", "vit-micro", "digits", *args]
    result = razorctl(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert_ends_with_an_error(result, sentence)
    assert sorted(p.name for p in Path().iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("finetune", "error: MODEL or DATASET is missing; name both"),
        ("evaluate", "Missing argument 'RUN'."),
        ("compare vit-micro", "name either MODEL and DATASET, or only such directories"),
        ("finetune a b c d", "Too many arguments: c d"),
        ("finetune vit-micro digits --ratio much", "'--ratio': it takes a number."),
        ("finetune vit-micro digits --steps 1.5", "'--steps': it takes a whole number."),
        ("profile vit-micro --batch-size auto", "'--batch-size': it takes a whole number."),
        ("predict run new --top 0", "'--top': it takes 1 or more."),
        ("predict run new --seed 9999999999", "'--seed': it takes 4294967295 or less."),
        ("trainn", "No such command 'trainn'."),
    ],
)
def test_usage_errors_exit_with_2(words, sentence):
    result = razorctl(*words.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--learning-rate", "(Possible options: --lr)"),
        ("--batchsize", "(Possible options: --batch-size)"),
        ("--leraning-rate", "(Possible options: --lr)"),
        ("--bs", None),
    ],
)
def test_an_unknown_option_gets_the_nearest(option, near):
    result = razorctl("finetune", "vit-micro", "digits", option, "8")
    assert result.exit_code == 2
    assert f"No such option: {option}" in result.stderr
    assert "Possible options" not in result.stderr if near is None else near in result.stderr


@pytest.mark.parametrize("name", ["LR", "LEARNING_RATE"])
def test_a_variable_is_named_as_the_flag_or_the_setting(name, monkeypatch):
    monkeypatch.setenv(f"RAZORCTL_{name}", "0.123")
    document = json.loads(razorctl("plan", "vit-micro", "digits", "--gpu", "t4", "--json").stdout)
    assert document["job"]["learning_rate"] == 0.123


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 4, "raise --ratio or lower --batch-size"),
        (RuntimeError("it broke\nat length"), 1, "it broke (razorctl --debug shows the traceback)"),
        (BrokenPipeError(32, "Broken pipe"), 1, "Broken pipe"),
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
    if code not in (4, 130) and not isinstance(error, BrokenPipeError):  # typer takes that one
        assert isinstance(
            razorctl("--debug", "finetune", "vit-micro", "digits").exception, type(error)
        )


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, app.SPINS),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_wait_shortly_unless_the_user_says_otherwise(given, want, monkeypatch):
    monkeypatch.setattr(os, "environ", environment := dict(given))
    monkeypatch.setattr(app, "app", lambda: None)
    app.run()
    assert environment.get("GOMP_SPINCOUNT") == want


LACKS = {
    "torch": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    "threads": RuntimeError("can't start new thread"),
    "system": OSError(12, "Cannot allocate memory"),
    "python": MemoryError(),
    "safetensors": ValueError("Cannot allocate memory (os error 12)"),
}


@pytest.mark.parametrize("error", LACKS.values(), ids=LACKS)
def test_memory_that_runs_out_has_a_code_of_its_own_where_files_are_read_too(error, monkeypatch):
    def target(*_):
        with hub.reading("m", Path("m")):
            raise error

    monkeypatch.setattr("razorctl.planning.detect.target", target)
    result = razorctl("plan", "vit-micro", "digits")
    assert result.exit_code == 4
    assert_ends_with_an_error(result, "the machine is out of memory; raise --ratio or lower")
