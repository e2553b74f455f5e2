"""Tests of the kernel that shows whether any kernel runs."""

import pytest
from triton import knobs

from razorctl.ops import kernels
from razorctl.ops.triton import probe
from razorctl.ops.triton.variants import Variant
from scripts.bench.cubins import compiled
from tests.launches import CARDS

VARIANT = Variant(probe.probe_kernel, {"x": "*fp32"}, {"N": 32}, 1, 3, "probe")


@pytest.mark.parametrize("card", CARDS)
def test_it_compiles(card):
    assert compiled(VARIANT, card).stack == 0


def test_a_cache_that_cannot_be_written_is_an_error_of_files(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="file") as raised:
        compiled(VARIANT, 89)
    assert kernels.give_up(raised.value)
    kernels._failed.clear()
