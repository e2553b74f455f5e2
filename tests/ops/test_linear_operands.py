"""The joint op has the results of the three ops that it joins."""

import pytest
import torch

from razorctl.ops.int8 import int8_columns, int8_rows, roots
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.linear_operands import linear_operands
from tests.references import copied


def operands(rows, weight=True, bias=True, function=None, tile_rows=32):
    """Arguments for dy of 24 columns and x of 64."""
    dy, row_scale, _, largest = int8_rows(torch.randn(rows, 24) * torch.rand(rows, 1))
    copy = copied(torch.randn(rows, 64), 5, tile_rows)
    copy = copy._replace(bias=torch.randn(64) if bias else None)
    return dy, row_scale, largest, copy, function, torch.randn(24, 64) if weight else None


@pytest.mark.parametrize("rows", [32, 70])
@pytest.mark.parametrize(("weight", "function"), [(True, None), (False, "gelu")])
def test_all_operands(rows, weight, function):
    args = operands(rows, weight, True, function)
    dy, row_scale, largest, copy, _, w = args
    got = linear_operands(*args)
    root = roots(row_scale)
    of_dy, of_x = int8_columns(dy * root, None, largest), int8_operand(copy, root, function)
    of_weight = int8_columns(w) if weight else (dy.new_empty(0), torch.empty(0))
    assert got[0].shape[1] == got[2].shape[1] == -(-rows // 16) * 16
    assert not got[0][:, rows:].any()
    results = got[0][:, :rows], got[1], got[2][:, :rows], *got[3:]
    for mine, theirs in zip(results, (*of_dy, *of_x, *of_weight), strict=True):
        # Whole codes may differ by one where a function was rounded otherwise.
        torch.testing.assert_close(
            mine, theirs, rtol=1e-5, atol=0 if mine.is_floating_point() else 1
        )
