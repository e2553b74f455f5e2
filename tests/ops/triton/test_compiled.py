"""What the default jobs launch compiles for every card, without a spill, by every Triton.

With --every-variant the installed Triton compiles instead all that kernels may be launched as.
"""

import importlib
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import triton

import razorctl.ops.triton
from razorctl import folders
from razorctl.ops.triton.compiled import compiled
from razorctl.ops.triton.launch import Kernel
from tests.launches import CARDS, compilations
from tests.ops.triton import releases

ROOT = Path(__file__).parents[3]
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB that a block may have
INT8_DOT = r"mma\.sync[\w.]*\.s32\.s8\.s8|wgmma\.mma_async[\w.]*\.s32\.s8\.s8|tcgen05\.mma[\w.:]*i8"
# Each release of Triton that a supported torch brings compiles for one card, the installed one for
# the others and sm_89 again; sm_86 has the tiles and instructions of sm_89.
RELEASES = {"3.6.0": 89, "3.7.0": 90, "3.8.0": 80}
INSTALLED = (75, 89, 100, 120)
MODULES = {
    name: module
    for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__)
    if hasattr(module := importlib.import_module(f"razorctl.ops.triton.{name}"), "variants")
}


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-variant")
    if metafunc.function is test_compiles_without_spilling:
        found = [
            pytest.param(card, lambda variant=variant: [variant], id=f"sm_{card} {variant.label}")
            for card in CARDS
            for module in MODULES.values()
            for variant in module.variants(card, every=True)
        ]
        usual = [
            pytest.param(card, lambda card=card: compilations(card), id=f"sm_{card}")
            for card in INSTALLED
        ]
        metafunc.parametrize(("card", "variants"), found if every else usual)


def test_compiles_without_spilling(card, variants):
    wrong = {}
    for variant in variants():
        assert isinstance(variant.kernel, Kernel)  # so that it is launched with the same options
        found = compiled(variant, card)
        # Before sm_80 tl.dot on int8 does not compile, on fp16 it is scalar and spills.
        dot, wanted = "tt.dot " in found.ttir, bool(found.instructions(INT8_DOT))
        if (
            found.stack
            or found.shared > 1024 * SHARED[card]
            or dot != wanted
            or (dot and card < 80)
        ):
            wrong[variant.label] = variant.constexprs, found.stack, found.shared, dot, wanted
    assert not wrong


@pytest.mark.parametrize("release", RELEASES)
def test_compiles_under_every_triton(release):
    """That it is of another version than the installed one is seen to in the process itself."""
    card = RELEASES[release]
    given = pickle.dumps([releases.named(variant) for variant in compilations(card)])
    paths = os.pathsep.join((str(unpacked(release)), str(ROOT)))
    command = [sys.executable, "-m", "tests.ops.triton.releases", release, str(card)]
    done = subprocess.run(
        command, input=given, capture_output=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}
    )
    assert (done.returncode, done.stdout.decode()) == (0, ""), done.stderr.decode()[-2000:]


def unpacked(release: str) -> Path:
    """The folder of another Triton, from the registry or from the user's cache.

    A developer's machine without a network skips what needs it; CI fails.
    """
    if triton.__version__ == release:
        return ROOT
    folder = folders.cache() / "triton" / f"{release}-{sys.implementation.cache_tag}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(dir=folder.parent)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", part]
        done = subprocess.run([*command, f"triton=={release}"], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(part)
            why = f"Triton {release} cannot be fetched: {done.stderr.strip()[-500:]}"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
        Path(part).rename(folder)
    return folder
