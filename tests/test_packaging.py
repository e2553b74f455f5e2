import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_all_that_runs_without_network(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    for name in (
        "razorctl/py.typed",
        "razorctl/models/vit_micro/model.safetensors",
        "razorctl/models/vit_micro/pretraining.json",
        "razorctl/ops/cpu/common.h",
        "razorctl/ops/cpu/quantize.c",
        "razorctl/data/scene_parse_150/classes.txt",
        "razorctl/data/digits/README.md",
        "razorctl/data/digits/train.parquet",
        "razorctl/data/digits/test.parquet",
    ):
        assert name in names
    presets = {f"razorctl/{p.relative_to(ROOT).as_posix()}" for p in ROOT.glob("presets/*/*.toml")}
    assert presets
    assert presets <= names
    assert not {name for name in names if name.startswith(("tests/", "scripts/"))}

    # Unpacked somewhere else, it finds its own presets and data.
    code = (
        "import razorctl; from razorctl import data; from razorctl.models.timm import micro\n"
        "from razorctl.config import presets; from razorctl.planning import gpus\n"
        f"assert razorctl.__file__.startswith({str(tmp_path)!r})\n"
        f"assert str(presets.SHIPPED).startswith({str(tmp_path)!r})\n"
        "assert gpus.names(); data.find('digits').load(); assert micro.WEIGHTS.exists()"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, check=True
    )
