"""Several processes train as one would: each test starts two, as torchrun does, through Gloo."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from razorctl.cli.app import app
from razorctl.errors import UsageError
from razorctl.job import Job
from razorctl.recipe import Recipe
from razorctl.training.run import finetune

WORLD = 2
JOB = Job("vit-micro", "digits", batch_size=16, steps=3, evaluate_every=3, warmup_steps=0)
ROOT = Path(__file__).parents[2]


def start(*args: str, folder: Path) -> list[subprocess.Popen[str]]:
    """A process for each rank, which runs Python with `args`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    return [
        subprocess.Popen(
            [sys.executable, *args],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            | world
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    both = [process.communicate(timeout=240) for process in started]
    return [(p.returncode, *texts) for p, texts in zip(started, both, strict=True)]


CASES = {
    "full ddp": (Recipe("full"), {"strategy": "ddp", "accumulate": 2}),
    "razor fsdp": (Recipe("razor", 0.5), {"strategy": "fsdp"}),
    "lora fsdp": (Recipe("lora"), {"strategy": "fsdp"}),
    "joint ddp": (Recipe("prebackrazor++", joint_budget=0.5), {"accumulate": 2}),
}
SCRIPT = """
import shutil, sys, torch
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_processes as tests
from razorctl import processes
from razorctl.cli.app import run
from razorctl.errors import DataError, ElsewhereError
from razorctl.training.run import finetune

from tests.models import registered

first, cpu = processes.first(), torch.device("cpu")
processes.join(cpu=True)

def fail(ranks):
    if processes.rank() in ranks:
        raise DataError(f"of {processes.rank()}")
    return "made"

def together(ranks):
    with processes.together():
        fail(ranks)

for call, wanted in (
    (lambda: processes.of_first(lambda: fail([0])), DataError if first else ElsewhereError),
    (lambda: together([0, 1]), DataError if first else ElsewhereError),
    (lambda: together([1]), ElsewhereError),
):
    try:
        call()
    except DataError as error:
        assert wanted is DataError and str(error) == "of 0"
    except ElsewhereError as error:
        assert wanted is ElsewhereError and error.exit_code == DataError.exit_code
    else:
        raise AssertionError
together([])
assert processes.of_first(lambda: fail([1])) == "made"
assert processes.every(processes.rank()) == [0, 1]
assert processes.most(7 + processes.rank(), cpu) == 8
assert processes.mean(torch.tensor(1.0 + processes.rank())) == 1.5

def train(name, recipe, settings):
    job = replace(tests.JOB, processes=2, **settings)
    resumes = name != "full ddp"  # which has nothing that the others do not go on with
    run = finetune(job, recipe, out=name, device="cpu")
    next(run), run.save()
    if first and resumes:
        shutil.copytree(name, f"{name}, stopped")
    next(run), next(run)
    weights = {k: getattr(v, "full_tensor", lambda: v)() for k, v in run.model.state_dict().items()}
    torch.save(weights, f"{name}.{processes.rank()}.pt")
    for _ in run:
        pass
    if resumes:
        resumed = finetune(job, recipe, out=f"{name}, stopped", device="cpu", resume=True)
        assert len(resumed.history) == 1
        for _ in resumed:
            pass

with registered(shallow=True):
    for name, case in tests.CASES.items():
        train(name, *case)
    sys.argv[1:] = sys.argv[2:]
    print("the command", file=sys.stderr, flush=True)  # after what libraries have warned of
    run()  # which leaves
"""
RUN = ("finetune", "vit-micro", "digits", "--device", "cpu", "--json")


def alone(recipe: Recipe, out: Path, **settings) -> dict[str, torch.Tensor]:
    job = Job(**{**vars(JOB), **settings})
    run = finetune(job, recipe, out=out, device="cpu")
    for _ in run:
        pass
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder where two processes have trained, and how they ended, at last a command."""
    folder = tmp_path_factory.mktemp("processes")
    command = (*RUN, "--out", "run", "--strategy", "fsdp", "--ratio", "0.5")
    command += ("--steps", "2", "--batch-size", "128")
    return folder, ended(start("-c", SCRIPT, str(Path(__file__).parent), *command, folder=folder))


def test_two_processes_train_as_one(both, shallow):
    tmp_path, processes = both
    for code, _, errors in processes:
        assert code == 0, errors
    for name in CASES:
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(WORLD))
        assert first
        assert all(torch.equal(first[key], second[key]) for key in first), name
        if name == "full ddp":
            continue
        resumed = load_file(tmp_path / f"{name}, stopped/model.safetensors")
        once = load_file(tmp_path / name / "model.safetensors")
        assert resumed.keys() == once.keys()
        assert all(torch.equal(resumed[key], once[key]) for key in once), name
    # What razor packs depends on the rows that it packs together.
    for name, micro_batches in (("full ddp", 1), ("lora fsdp", 1), ("razor fsdp", 2)):
        one = alone(CASES[name][0], tmp_path / "one" / name, accumulate=micro_batches)
        two = load_file(tmp_path / name / "model.safetensors")
        assert one.keys() == two.keys()
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=3e-4, msg=key)
        folders = tmp_path / "one" / name, tmp_path / name
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        assert results[0]["accuracy"] == pytest.approx(results[1]["accuracy"], abs=1 / 360)
        assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)
    assert (tmp_path / "lora fsdp/adapter/adapter_model.safetensors").exists()


def test_the_first_process_speaks_for_all(both):
    _, ((code, out, errors), other) = both
    assert code == 0, errors
    assert json.loads(out)["job"]["processes"] == WORLD
    assert "2 processes (fsdp)" in errors
    assert (*other[:2], other[2].partition("the command\n")[2]) == (0, "", "")


def test_an_error_is_said_once(tmp_path):
    (first, _, errors), other = ended(
        start("-m", "razorctl", *RUN, "--batch-size", "33", folder=tmp_path)
    )
    assert first == 2
    assert errors.count("cannot be split over 2 processes") == 1
    assert other == (2, "", "")


def test_what_several_processes_cannot_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    job = Job("vit-micro", "digits", processes=WORLD, compile=True)
    with pytest.raises(UsageError, match="steps of several processes are not compiled"):
        finetune(job, device="cpu")
    with pytest.raises(
        UsageError, match=r"for 4 processes, and 2 .*torchrun --nproc-per-node 4 -m"
    ):
        finetune(replace(JOB, processes=4), device="cpu")
    with pytest.raises(UsageError, match="adamw8bit cannot be sharded"):
        replace(JOB, processes=WORLD, strategy="fsdp", optimizer="adamw8bit")
    result = CliRunner().invoke(app, ["plan", "vit-micro", "digits", "--vram", "11GB"])
    assert result.exit_code == 2
    assert "only finetune runs in several processes" in result.stderr
