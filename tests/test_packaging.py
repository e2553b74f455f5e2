"""The wheel and the sdist, installed into an environment that has razorctl's libraries."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Two commands in a process, which imports libraries once; collections would look through them.
BOTH = """
import gc, sys
gc.disable()
from razorctl.cli.app import run
for command in ["doctor", "--json"], sys.argv[1:]:
    sys.argv[1:] = command
    try:
        run()
    except SystemExit as end:
        assert not end.code
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist and the wheel, as scripts/build.sh makes them."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_all_that_runs_without_network_and_its_licenses(built):
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
    for name in (
        "razorctl/py.typed",
        "razorctl/models/vit_micro/model.safetensors",
        "razorctl/models/vit_micro/pretraining.json",
        "razorctl/ops/cpu/common.h",
        "razorctl/ops/cpu/quantize.c",
        "razorctl/data/scene_parse_150/classes.txt",
        "razorctl/data/digits/train.parquet",
        "razorctl/data/digits/test.parquet",
    ):
        assert name in names
    presets = {f"razorctl/{p.relative_to(ROOT).as_posix()}" for p in ROOT.glob("presets/*/*.toml")}
    assert presets
    assert presets <= names
    assert not {name for name in names if name.startswith(("tests/", "scripts/", "."))}
    licenses = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    others = "razorctl/data/digits/README.md", "razorctl/models/vit_micro/README.md"
    assert licenses == {"LICENSE", *others}


def test_a_wheel_of_the_sdist_is_the_same_and_trains_where_it_is_installed(built, tmp_path, traces):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(traces)  # with compiled kernels

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
        return done.stdout

    offline = "--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    pip = sys.executable, "-m", "pip"
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path / "again", sdist)
    assert (tmp_path / "again" / wheel.name).read_bytes() == wheel.read_bytes()

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    python, razorctl = (tmp_path / "venv/bin" / name for name in ("python", "razorctl"))
    folder = "--find-links", tmp_path / "again", "--ignore-installed"
    run(python, "-m", "pip", "install", *offline, *folder, "razorctl")
    found = run(python, "-c", "import razorctl; print(razorctl.__file__)")
    assert Path(found).is_relative_to(site)
    assert wheel.name.split("-")[1] in run(razorctl, "--version")
    assert "rtx-4090" in run(razorctl, "list", "gpus")
    settings = "--steps", "2", "--evaluate-every", "2", "--device", "cpu", "--json", "--out", "run"
    said = run(python, "-c", BOTH, "finetune", "vit-micro", "digits", *settings)
    found, end = json.JSONDecoder().raw_decode(said)
    assert found["problems"] == 0
    assert json.loads(said[end:])["steps"] == 2
    assert (tmp_path / "run/model.safetensors").exists()
