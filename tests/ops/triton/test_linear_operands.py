"""The joint kernels against the body, for each height of tiles and sizes that no block divides."""

import pytest
import torch

from razorctl.ops.linear_operands import linear_operands
from tests.ops.test_linear_operands import operands

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("rows", "tile_rows", "weight", "function"),
    [(32, 32, True, None), (70, 70, True, "gelu"), (150, 48, False, None), (300, 128, True, None)],
)
def test_linear_operands(rows, tile_rows, weight, function, interpreted):
    from razorctl.ops.triton import linear_operands as module

    args = operands(rows, weight, function is None, function, tile_rows)
    args[1][3] = torch.nan
    assert module.takes(*args)
    got = interpreted(module).linear_operands(*args)
    want = linear_operands.body(*args)
    assert not got[0][:, rows:].any()
    for mine, theirs in zip((got[0], got[2][:, :rows]), (want[0], want[2][:, :rows]), strict=True):
        assert (mine.int() - theirs).abs().max() <= 1
        assert (mine != theirs).float().mean() < 1e-3
    for mine, theirs in zip((got[1], *got[3:]), (want[1], *want[3:]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
