"""The option --streaming of older releases, which is refused, and runs that had it."""

from pathlib import Path
from typing import Any

import pytest

from razorctl.cli.app import COMMANDS, loaded
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.training.run import finetune
from tests.cli.commands import razorctl
from tests.own import CLASSES, photos, table
from tests.training.runs import edit_result

SENTENCE = (
    "error: rows are not streamed any more, since data larger than memory are read from "
    "memory-mapped files; leave --streaming out."
)
HAVING = [name for name in COMMANDS if "streaming" in {each.name for each in loaded(name).params}]
GIVEN = {"plan": ["--vram", "8GB"], "finetune": ["--out", "run"], "compare": ["--out", "run"]}


@pytest.mark.parametrize("name", HAVING)
def test_it_is_refused_and_not_shown(name):
    photos(Path("photos"))
    result = razorctl(name, "vit-micro", "photos", "--streaming", *GIVEN.get(name, ()))
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, SENTENCE)
    assert not Path("run").exists()
    assert "streaming" not in razorctl(name, "--help").stdout


def test_it_is_refused_in_a_file_and_from_python():
    Path("razorctl.toml").write_text("[job]\nstreaming = true\n")
    result = razorctl("plan", "vit-micro", "digits", "--vram", "8GB")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, SENTENCE)
    with pytest.raises(UsageError, match="leave --streaming out"):
        finetune(Job("vit-micro", "digits", streaming=True), out="run", device="cpu")
    assert not Path("run").exists()


def older(result: dict[str, Any]) -> None:
    result["job"]["streaming"] = True
    del result["checksums"]


def test_a_run_that_streamed_is_not_resumed_but_is_used_when_it_is_finished():
    photos(Path("d"))
    for split in ("train", "test"):
        rows = [f"{name}/{i}.jpg,{name}" for name in CLASSES for i in range(4)]
        table(Path(f"d/{split}.csv"), rows, "image,label")
    settings = ["--device", "cpu", "--steps", "2", "--batch-size", "4", "--validation", "0"]
    assert razorctl("finetune", "vit-micro", "d", *settings, "--out", "run").exit_code == 0
    config = Path("run/config.toml")
    assert "streaming = false" in config.read_text()  # as older releases have written it
    config.write_text(config.read_text().replace("streaming = false", "streaming = true"))
    Path("run/split.json").unlink()
    edit_result(Path("run"), older)
    for command in (["evaluate", "run"], ["evaluate", "run", "d"], ["predict", "run", "d/bus"]):
        assert razorctl(*command).exit_code == 0, command
    Path("run/result.json").rename("run/.lock")  # which a run has until it is finished
    resumed = razorctl("finetune", "--resume", "--out", "run")
    assert (resumed.exit_code, resumed.stderr.splitlines()[-1]) == (2, SENTENCE)
