"""The launches of the default jobs compile for every card, without a spill.

With --every-variant the installed Triton compiles all variants of kernels instead, and the releases
between the oldest Triton and the installed one compile too.
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
from razorctl.ops.triton.gemm_tiles import scaled_gemm_kernel
from razorctl.ops.triton.launch import Kernel
from razorctl.ops.triton.variants import Variant
from razorctl.system import folders
from tests.launches import CARDS, THIRSTIEST, alike, compilations, default_job, demanding
from tests.ops.triton import releases

ROOT = Path(__file__).parents[3]
# Of Triton, the oldest that a supported torch brings: a card for which it compiles.
OLDEST = {"3.6.0": 86}
BETWEEN = {"3.7.0": 90, "3.8.0": 80}
INSTALLED = (75, 80, 89, 90, 100, 120)  # cards for which the installed release compiles
MODULES = {
    name: module
    for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__)
    if hasattr(module := importlib.import_module(f"razorctl.ops.triton.{name}"), "variants")
}


def part(card: int) -> list[Variant]:
    """The variants that are compiled for a card here; each Triton compiles every kernel."""
    return compilations(card, every_kernel=card not in INSTALLED[1:])


def pytest_generate_tests(metafunc):
    every = metafunc.config.getoption("--every-variant")
    if metafunc.function is test_compiles_under_another_triton:
        releases_of = OLDEST | BETWEEN if every else OLDEST
        metafunc.parametrize(("release", "card"), releases_of.items())
    if metafunc.function is test_compiles_without_spilling:
        all_variants = [
            pytest.param(card, lambda variant=variant: [variant], id=f"sm_{card} {variant.label}")
            for card in CARDS
            for module in MODULES.values()
            for variant in module.variants(card, every=True)
        ]
        usual = [
            pytest.param(card, lambda card=card: part(card), id=f"sm_{card}") for card in INSTALLED
        ]
        metafunc.parametrize(("card", "variants"), all_variants if every else usual)


def test_compiles_without_spilling(card, variants):
    some = list(variants())
    assert all(isinstance(variant.kernel, Kernel) for variant in some)  # launched with its options
    assert not [line for variant in some if (line := releases.wrong(variant, card))]


def test_each_variant_but_products_is_compiled_for_a_card():
    assert {*INSTALLED, *OLDEST.values()} == {*CARDS}
    wanted, compiled = (
        {
            alike(variant)
            for card in CARDS
            for variant in of(card)
            if variant.kernel is not scaled_gemm_kernel
        }
        for of in (demanding, part)
    )
    compiled |= {alike(launch.variant) for launch in default_job(THIRSTIEST)} & wanted
    assert compiled == wanted


def test_compiles_under_another_triton(release, card):
    """The process itself checks that its Triton is of that version."""
    pickled = pickle.dumps([releases.named(variant) for variant in part(card)])
    paths = os.pathsep.join((str(unpacked(release)), str(ROOT)))
    command = [sys.executable, "-m", "tests.ops.triton.releases", release, str(card)]
    done = subprocess.run(
        command,
        input=pickled,
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
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
