"""Folders that no run and no comparison wrote: every command that takes one leaves them alone."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from razorctl.cli.app import COMMANDS, loaded
from razorctl.training.comparing import grid
from tests.cli.commands import QUICK, finetune, razorctl
from tests.comparing import write

STEM = ["vit-micro", "digits", *QUICK]
MODELS = {"metrics.jsonl": "my metrics\n", "model.safetensors": "my model", "config.json": "{}"}
LINE = {"step": 1, "loss": 1.0, "seconds": 1.0}
RESULT = {"run_dir": ".", "model": "vit-micro", "weights": "model.safetensors", "steps": 1}


def files(**contents: str) -> None:
    for name, content in ({**MODELS, **contents}).items():
        path = Path("theirs", name.replace("__", "/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def copied() -> None:
    """A run's config.toml, which a user keeps beside another model."""
    files(**{"metrics.jsonl": json.dumps(LINE), "result.json": "{}", "split.json": "{}"})
    finetune("--out", "run")
    shutil.copy("run/config.toml", "theirs")
    files(checkpoints__last="mine", checkpoints__step="mine")


def linked() -> None:
    files()
    write("other")
    Path("theirs/checkpoints").symlink_to(Path("other").absolute())


# What a folder holds -> what makes it.
FOLDERS: dict[str, Callable[[], object]] = {
    "files of a model": files,
    "a config of another tool": lambda: files(
        **{"config.toml": "[environment]\nx = 1\n", ".lock": ""}
    ),
    "a broken config": lambda: files(**{"config.toml": "\0[", "split.json": "[]"}),
    "results of another tool": lambda: files(**{"result.json": json.dumps(RESULT)}),
    "checkpoints of another tool": lambda: files(**{"checkpoints__step-00000001__a": "mine"}),
    "a lock in use": lambda: files(**{".lock": "1234"}),
    "a comparison of another tool": lambda: files(**{"comparison.toml": "[job]\nmodel = 'x'\n"}),
    "a copy of a config": copied,
    "a link": linked,
    "folders of runs": lambda: files(
        **{"full-0__metrics.jsonl": "mine", "full-0__result.json": "{}"}
    ),
    "one file": lambda: Path("theirs").mkdir() or Path("theirs/notes.txt").write_text("mine"),
}


def commands() -> list[list[str]]:
    """The commands that take the directory of a run or of a comparison, from the registry."""
    found = []
    for name in COMMANDS:
        options = {each.name: each for each in loaded(name).params}
        if "run" in options:
            found.append([name, "theirs", *(["x.png"] if "files" in options else [])])
        if "resume" in options:
            found += [
                [name, *STEM, "--resume", "--out", "theirs"],
                [name, *STEM, "--out", "theirs"],
            ]
            if name == "finetune":
                found.append([name, "--resume", "--out", "theirs"])
        if "what" in options:
            found.append([name, "theirs"])
    return found


def content() -> dict[str, tuple[bytes, float]]:
    paths = (Path(top, name) for top, _, names in os.walk("theirs") for name in names)
    return {str(path): (path.read_bytes(), path.stat().st_mtime) for path in paths}


def test_the_registry_has_the_commands():
    assert {command[0] for command in commands()} == {
        *("finetune", "compare", "evaluate", "predict", "export", "chat")
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_others_wrote_is_left_alone(folder):
    FOLDERS[folder]()
    before, here = content(), sorted(Path().iterdir())
    for command in commands():
        result = razorctl(*command)
        assert result.exit_code == 2, (command, result.stderr)
        assert "theirs" in result.stderr.splitlines()[-1]
        assert (content(), sorted(Path().iterdir())) == (before, here), command


def test_a_comparison_does_not_clear_a_folder_of_others(monkeypatch):
    monkeypatch.setattr(grid, "run_child", lambda *_: None)
    args = ["vit-micro", "digits", "--methods", "full,razor", "--steps", "3", "--out", "theirs"]
    razorctl("compare", *args)
    files(**{"razor-0__metrics.jsonl": "mine", "razor-0__model.safetensors": "mine"})
    Path("theirs/razor-0/failure.json").unlink(missing_ok=True)
    before = content()
    result = razorctl("compare", *args, "--resume")
    assert (result.exit_code, "theirs/razor-0 holds no run" in result.stderr) == (2, True)
    assert content() == before


def test_a_run_that_was_killed_early_is_begun_again():
    Path("run").mkdir()
    for name in (".lock", "metrics.jsonl"):  # of an older razorctl too
        Path("run", name).touch()
    assert finetune("--resume", "--out", "run").exit_code == 0
