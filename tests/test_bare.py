"""On a GPU machine with little beside torch the benches start, and a step of razor runs."""

import os
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from razorctl.system import c_compiler

ROOT = Path(__file__).parents[1]
# A compiler that takes what this process has compiled, which takes seconds.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "fake 1.0" && exit
while [ "$1" != -o ]; do shift; done
cp "{library}" "$2"
"""
# Such a machine has these, and what they bring.
INSTALLED = (
    *("torch", "triton", "timm", "transformers", "peft", "accelerate", "pytest", "pytest-xdist"),
)
# Runs the arguments after the first, scripts, in a process that can import no package of the first.
WITHOUT = """
import gc, importlib.abc, importlib.util, runpy, sys
gc.disable()  # which would look through all that is imported
missing, spec = set(sys.argv[1].split(",")), importlib.util.find_spec

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
importlib.util.find_spec = lambda name, *rest: None if name in missing else spec(name, *rest)
sys.path[:0] = [".", "scripts/bench"]
exec(sys.argv[2])
"""


def missing() -> set[str]:
    """The packages that are installed here and not there."""
    there, installed = list(INSTALLED), set[str]()
    while there:
        name = canonicalize_name(there.pop())
        if name in installed:
            continue
        installed.add(name)
        for each in map(Requirement, distribution(name).requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                there.append(each.name)
    ours = packages_distributions().items()
    return {name for name, by in ours if not installed & set(map(canonicalize_name, by))}


STARTS = """
import io, json, pytest
from contextlib import redirect_stdout
file = sys.argv[3]
for script in ("first", "phases", "step", "linear", "frontier"):
    sys.argv = [script, "--help"]
    try:
        with redirect_stdout(io.StringIO()):
            runpy.run_path(f"scripts/bench/{script}.py", run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, (script, stop.code)
quiet = "-p", "xdist.plugin", "-p", "no:cacheprovider", "-n", "0", "-q"
assert pytest.main([*quiet, "--co", "tests/gpu"]) == 0
# As gpu.sh runs tests: two cases of one, and a file that says how they ended.
test = "tests/ops/test_topk.py::test_bits_round_trip"
assert pytest.main([*quiet, "--few", "2", "--rows", file, test]) == 0
rows = json.loads(open(file).read())["rows"]
assert [(name.partition("[")[0], row["outcome"]) for name, row in rows.items()] == [
    (test, "passed"), (test, "passed")
], rows
"""
STEP = """
from razorctl.ops.triton import tuning
tuning._store("card", "key", "way")
assert tuning._chosen("card") == {}
import first
from dataclasses import replace
small = replace(first.WORKLOAD, **first.SMOKE, batch_size=8)
steps, found = first.Steps(first.Bench(small, first.torch.device("cpu"))), {}
for run in first.runs():
    if run.name in ("full, fp32", "full", "razor"):
        steps.take(run, found.setdefault(run.name, {}))
assert all(row["finite"] for row in found.values()), found
assert found["razor"]["logits_distance"] == 0, found
assert 0.9 < found["razor"]["cosine to full, fp32"] < found["full"]["cosine to full, fp32"], found
"""


def test_a_bare_machine(tmp_path):
    blocked = ",".join(missing() - {"razorctl"} | {"pydantic"})  # some bring it, some do not
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    if library := c_compiler.built().path:
        compiler = tmp_path / "cc"
        compiler.write_text(COMPILER.format(library=library))
        compiler.chmod(0o755)
        environment["CC"] = str(compiler)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, blocked, STEP + STARTS, str(tmp_path / "rows.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert not library or list(tmp_path.glob("razorctl/kernels/*.so"))


def test_gpu_sh_runs_what_matters_first_and_goes_on_after_a_failure(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\n')
    python.chmod(0o755)
    calls = tmp_path / "calls"
    environment = {**os.environ, "PYTHON": str(python), "CALLS": str(calls)}
    script = str(ROOT / "scripts/bench/gpu.sh")

    def parts(*flags: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs it; the parts whose results are shown, each after what wrote them."""
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", script, *flags, "--smoke", "out"],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        ran = [line.split() for line in calls.read_text().splitlines()]
        names = [Path(words[-1]).stem.removesuffix("_cpu") for words in ran[1::2]]
        assert all("summary" in words[0] for words in ran[1::2])
        for name, words in zip(names, ran[::2], strict=True):
            assert any(word.endswith(f"out/{name}_cpu.json") for word in words)
            assert name in words or Path(words[0]).stem in (name, "-m")
        return done, names

    done, names = parts()
    assert done.returncode == 0, done.stderr
    assert names == ["first", "products", "phases", "kernels", "large", "finetune"]
    assert parts("--more")[1] == ["layers", "step", "linear", "frontier"]
    python.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\n[ "$1" != scripts/bench/first.py ]\n')
    done, again = parts()
    assert done.returncode == 1
    assert "first failed" in done.stderr
    assert again == names
