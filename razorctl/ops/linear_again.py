"""The output of a linear layer, recomputed in int8 from a few-bit copy of its input.

y [rows, out] = f(x) W^T + b, for the x [rows, in] of the copy. The product contracts columns, so
f(x) and W [out, in] have a scale per row: scale = max |x| / 127, code = round(x / scale). Columns
of x are divided by r = m ** .25, with m their largest magnitudes in the first tile: x W^T =
(x / r) (r W)^T. A column much larger than the others then does not round these to zero
(SmoothQuant, Xiao et al. 2023, Eq. 4, with another exponent: a larger one coarsens W). Values of
f(x) exist only in the row that is being rounded. If readers of y take codes, the product is rounded
to an 8-bit copy, and y never exists.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from razorctl.ops.functions import applied
from razorctl.ops.gemm import COPY_ROWS, part_rows, scaled_gemm
from razorctl.ops.int8 import int8_rows, inverse, scale_of
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, empty_copy, limit, quantize, widened


def row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    """The codes [rows, columns] and scales [rows, 1] of `int8.int8_rows` for f(x)."""
    codes = copy.packed.new_empty(rows, copy.scale.shape[1], dtype=torch.int8)
    scale = copy.packed.new_zeros(rows, 1, dtype=torch.float32)
    if not codes.numel():
        return codes, scale
    offset, spacing = affine(copy)
    for part, numbers in unpacked(copy, rows):
        values = applied(function, widened(numbers, offset, spacing, part))
        scale[part.rows] = scale_of(values, 1)
        codes[part.rows] = values.mul_(inverse(scale[part.rows])).round_()
    return codes, scale


FLATTEST = 0.125  # of the largest r, at least: a column that is almost 0 at first may grow later


def evened(copy: FewBitCopy, function: str | None, weight: Tensor) -> tuple[FewBitCopy, Tensor]:
    """The copy of x / r, and r W; both unchanged with a function or without rows."""
    if function is not None or not len(copy.scale):
        return copy, weight
    tile = affine(copy._replace(zero_point=copy.zero_point[:1], scale=copy.scale[:1]))
    first, last = tile[0], tile[0] + (2**copy.bits - 1) * tile[1]
    root = torch.maximum(first.abs(), last.abs()).squeeze(0).sqrt_().sqrt_()
    root = root.clamp(min=FLATTEST * root.max())
    root = torch.where((root > 0) & root.isfinite(), root, 1)
    bias = None if copy.bias is None else copy.bias / root
    return copy._replace(scale=copy.scale / root, bias=bias), weight * root


def outer(offset: Tensor | None, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The `left` and `right` of `scaled_gemm` for an offset, given the scales of the rows."""
    if offset is None:
        return None, None
    return torch.ones_like(scale).squeeze(1), offset.to(scale.dtype)


@op(
    empty=lambda copy, rows, function, weight: (
        weight.new_empty(rows, weight.shape[1], dtype=torch.int8),
        weight.new_empty(rows, 1, dtype=torch.float32),
        weight.new_empty(weight.shape, dtype=torch.int8),
        weight.new_empty(len(weight), dtype=torch.promote_types(weight.dtype, torch.float32)),
    ),
    fused=Fused(reduces=True),
)
def row_operands(
    copy: FewBitCopy, rows: int, function: str | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands of the product f(x) W^T, for some rows of it at a time.

    Returns the codes [rows, columns] and the scales [rows, 1] of f(x), then the codes
    [out, columns] and the scales [out] of the weight. It takes the arguments of `linear_again`.
    """
    copy, weight = evened(copy, function, weight)
    outputs, out_scale, *_ = int8_rows.body(weight)
    return *row_operand(copy, rows, function), outputs, out_scale.squeeze(1)


@op(
    empty=lambda copy, rows, function, weight, offset, dtype: weight.new_empty(
        rows, weight.shape[0], dtype=dtype
    ),
    fused=lambda copy, rows, function, weight, *_: Fused(
        operations=2 * rows * weight.numel(),
        rows=part_rows(len(weight)),
        made=(rows, *weight.shape),
        reduces=True,
    ),
)
def linear_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y, in `dtype`.

    Args:
        copy: The copy of x.
        rows: Rows of x.
        function: The name of f in `functions.FUNCTIONS`, None for x itself.
        weight: [out, in].
        offset: b, [out], None for 0.
        dtype: Of y.
    """
    codes, scale, outputs, out_scale = row_operands.body(copy, rows, function, weight)
    return scaled_gemm.body(codes, outputs, scale, out_scale, dtype, *outer(offset, scale))


BITS = 8  # of the codes of y, for int8 GEMMs


def copied(
    like: Tensor,
    rows: int,
    columns: int,
    size: int,
    copy_of: Callable[[slice], tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """The copy of y [rows, columns] on the device of `like`; copy_of: rows -> their copy."""
    whole = empty_copy(like, rows, columns, BITS, COPY_ROWS)
    lines = whole[0].view(rows, columns)
    for start in range(0, rows, size):
        packed, *scales = copy_of(slice(start, start + size))
        lines[start : start + size] = packed.view(-1, columns)
        for every, some in zip(whole[1:], scales, strict=True):
            every[start // COPY_ROWS :][: len(some)] = some
    return whole


@op(
    empty=lambda copy, rows, function, weight, offset, dtype: empty_copy(
        weight, rows, weight.shape[0], BITS, COPY_ROWS
    ),
    fused=lambda copy, rows, function, weight, *_: Fused(
        operations=2 * rows * weight.numel(),
        rows=part_rows(len(weight), COPY_ROWS),
        made=(rows, *weight.shape),
        reduces=True,
    ),
)
def linear_copy_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """An 8-bit copy of y with tiles of COPY_ROWS rows, as `quantize` returns it.

    Args:
        copy: The copy of x.
        rows: Rows of x.
        function: As of `linear_again`.
        weight: [out, in].
        offset: b, [out], None for 0.
        dtype: Of y; its range limits the values.
    """
    codes, scale, outputs, out_scale = row_operands.body(copy, rows, function, weight)
    left, right = outer(offset, scale)

    def copy_of(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        scales = scale[part], out_scale
        some = None if left is None else left[part]
        y = scaled_gemm.body(codes[part], outputs, *scales, torch.float32, some, right)
        return quantize.body(y.clamp_(-limit(dtype), limit(dtype)), BITS, COPY_ROWS)

    return copied(codes, rows, len(weight), part_rows(len(weight), COPY_ROWS), copy_of)
