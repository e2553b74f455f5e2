"""The checks of doctor, on this machine and on fake ones with faults."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from razorctl.ops import kernels
from razorctl.planning import detect
from razorctl.planning.detect import Detected
from razorctl.system import c_compiler, folders
from razorctl.training import doctor
from tests.cli.commands import razorctl

CARD = Detected("NVIDIA GeForce RTX 2080 Ti", 11 << 30, 10 << 30, "7.5", ())


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch, hub):
    """A machine without cards and with an empty cache, where no kernel has run."""
    monkeypatch.setattr(detect, "cards", lambda: ())
    monkeypatch.setattr(kernels, "_ran", set())
    monkeypatch.setattr(folders, "cache", lambda: tmp_path / "razorctl")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick(monkeypatch):
    """Without the trial of kernels, which takes seconds."""
    monkeypatch.setattr(doctor, "_kernels", lambda device: iter(()))


def found(group, name):
    return next(c for c in doctor.diagnose() if (c.group, c.name) == (group, name))


def test_a_machine_that_is_well():
    result = razorctl("doctor", "--json")
    document = json.loads(result.stdout)
    states = {(c["group"], c["name"]): c["state"] for c in document["checks"]}
    assert (result.exit_code, document["problems"]) == (0, 0)
    assert states["kernels, cpu", "gradient"] == "ok"
    if c_compiler.built().path is not None:
        for op in ("quantize", "norm_grad", "topk_pack", "scaled_gemm", "int8_operand"):
            assert states["kernels, cpu", op] == "ok"
    assert states["gpu", "card"] == states["hub", "network"] == "note"


def test_a_kernel_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_gradient", lambda *args: torch.ones(3))
    monkeypatch.setattr(kernels, "_ran", {("quantize", "cpu"), ("balance", "cuda")})
    monkeypatch.setitem(kernels._failed, ("topk_pack", "cpu"), "RuntimeError: no\nway")
    result = razorctl("doctor")
    kernels._failed.clear()
    rows = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert ["ok", "kernels,", "cpu", "quantize"] in rows
    assert any(
        row[:6] == ["bad", "kernels,", "cpu:", "topk_pack", "RuntimeError:", "no;"] for row in rows
    )


def test_a_gradient_that_is_wrong_is_a_problem(monkeypatch):
    gradients = iter([torch.tensor([1.0, 0.0]), *[torch.tensor([0.0, 1.0])] * len(doctor.RECIPES)])
    monkeypatch.setattr(doctor, "_gradient", lambda *args: next(gradients))
    assert found("kernels, cpu", "gradient").state == "problem"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("card", "state", "words"),
    [
        (CARD, "ok", ("11.0 GiB, 10.0 GiB free", "compute capability 7.5, so fp16")),
        (
            Detected("Card of tomorrow", 80 << 30, 1 << 30, "13.0", (detect.Process(7, None),)),
            "note",
            ("1 process on it", "so bf16", "it has no preset"),
        ),
    ],
)
def test_cards(card, state, words, monkeypatch):
    monkeypatch.setattr(detect, "cards", lambda: (card,))
    check = found("gpu", "card 0")
    assert check.state == state
    for each in words:
        assert each in check.found
    if not torch.cuda.is_available():  # so no torch here computes on the fake
        assert found("gpu", "CUDA").state == "problem"


@pytest.mark.usefixtures("quick")
def test_a_gpu_of_another_maker_is_told(monkeypatch):
    assert found("gpu", "card").mend is None
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    check = found("gpu", "card")
    assert (check.state, check.mend is None) == ("note", False)
    assert "an Apple GPU (mps): razorctl was tried on NVIDIA GPUs" in check.found


@pytest.mark.usefixtures("quick")
def test_folders_and_switches(monkeypatch, tmp_path):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(kernels, "_wanted", False)
    check = found("files", "this directory")
    assert (check.state, str(Path.cwd()) in check.found) == ("problem", True)
    assert "RAZORCTL_KERNELS=torch" in found("cpu", "kernels").found
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("without", "state", "found", "mend"),
    [
        (None, "ok", "compiled by ", None),
        ("triton", "note", "no Triton, so PyTorch operations run", "install triton"),
        ("compiler", "problem", "no C compiler", "install gcc or clang"),
        ("CC", "problem", "no-such-cc cannot be run", "name a compiler with CC"),
        ("headers", "problem", "Python.h: No such file", f"(python3.{sys.version_info[1]}-dev"),
    ],
)
def test_what_triton_launches_by_is_compiled(without, state, found, mend, monkeypatch, tmp_path):
    if c_compiler.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(detect, "cards", lambda: (CARD,))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if without == "triton" else name)
    monkeypatch.setenv("CC", "no-such-cc" if without == "CC" else "")
    if without == "compiler":
        monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    if without == "headers":
        monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda scheme: {"include": tmp_path})
    check = next(c for c in doctor._gpus() if c.name == "Triton's launcher")
    assert check.state == state
    assert found in check.found
    assert check.mend is None if mend is None else mend in check.mend


@pytest.mark.usefixtures("quick")
def test_what_was_tested_is_said_of_libraries(monkeypatch):
    monkeypatch.setitem(doctor.TESTED, "timm", ("0.9", "1.0.2"))
    checks = json.loads(razorctl("doctor", "--json").stdout)["checks"]
    libraries = {c["name"]: c for c in checks if c["group"] == "software"}
    assert libraries["torch"]["tested"] == [*doctor.TESTED["torch"]]
    assert libraries["python"]["tested"] == []
    timm = libraries["timm"]
    assert (timm["state"], timm["mend"]) == (
        "note",
        "if something fails, install 'timm>=0.9,<=1.0.2'",
    )
    assert timm["found"].startswith("razorctl's tests ran with timm 0.9 to 1.0.2, and 1.")


@pytest.mark.parametrize(
    ("installed", "state"),
    [
        *(("2.11.0", "ok"), ("2.15.0+cu130", "ok"), ("2.13.1", "ok")),
        *(("2.10.2", "note"), ("2.16.0", "note"), ("2.15.1", "note"), ("2.11.0.dev3", "note")),
    ],
)
def test_releases_outside_of_what_was_tested(monkeypatch, installed, state):
    monkeypatch.setitem(doctor.TESTED, "torch", ("2.11", "2.15.0"))
    assert doctor.library("torch", installed).state == state


def test_what_was_tested_is_what_is_declared_and_pinned():
    """scripts/setup.sh --oldest installs the first, scripts/setup.sh the second."""
    root = Path(__file__).parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(line.split(">=") for line in declared)
    pinned = dict(line.split("==") for line in (root / "constraints.txt").read_text().split())
    known = re.search(r'known="(.*)"', (root / "scripts/setup.sh").read_text())[1].split("|")
    assert {name: (oldest[name], pinned[name]) for name in known} == doctor.TESTED
