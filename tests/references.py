"""Naive twins of ops, which tests compare ops with."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import quantize as quantize_op
from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.int8 import LEVELS, inverse, scale_of
from razorctl.ops.int8_operand import column_scales
from razorctl.ops.op import FewBitCopy, Op
from razorctl.ops.packing import pack, unpacked
from razorctl.ops.pixel_cross_entropy import upsample
from razorctl.ops.quantize import CLIP, PARTS, _normalized, _scales_of, affine
from razorctl.ops.random import uniform
from razorctl.ops.topk import _from, magnitude_keys


def copied(x: Tensor, bits: int, tile_rows: int) -> FewBitCopy:
    """The copy that the op makes."""
    return FewBitCopy(*quantize_op.quantize(x, bits, tile_rows), bits, tile_rows)


def opcheck(op: Op[..., Any], args: tuple[Any, ...], **options: Any) -> None:
    """The checks of torch for an op that takes these arguments."""
    torch.library.opcheck(op.definition, op.flat(args), **options)


def quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
) -> FewBitCopy:
    x = _normalized(x, mean, rstd)
    scales = _scales_of(x, bits, tile_rows, clip=bits in CLIP and seed is None)
    zero_point, _, factor = (t.repeat_interleave(tile_rows, 0)[: len(x)] for t in scales)
    scaled = x.to(factor.dtype) * factor + zero_point / PARTS
    noise = 0.5 if seed is None else uniform(seed, 0, scaled.numel()).view(scaled.shape)
    codes = pack((scaled + noise).clamp(0, 2**bits - 0.5).to(torch.uint8), bits)
    return FewBitCopy(codes, scales[0].to(torch.int16), scales[1], bits, tile_rows)


def dequantize(copy: FewBitCopy, rows: int, dtype: torch.dtype) -> Tensor:
    offset, scale = (t.repeat_interleave(copy.tile_rows, 0)[:rows] for t in affine(copy))
    values = torch.empty_like(offset)
    for part, codes in unpacked(copy, rows):
        values[part.rows] = codes.to(scale.dtype)
    return torch.addcmul(offset, values, scale).to(dtype)


def activation_grad(dy: Tensor, copy: FewBitCopy, function: str) -> Tensor:
    return FUNCTIONS[function].backward(dy, dequantize(copy, len(dy), dy.dtype))


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale = scale_of(x, 1)
    codes = (x * inverse(scale)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    by_roots = x * inverse(scale) * scale.nan_to_num(0).sqrt()
    return codes, scale, x.to(scale.dtype).sum(0), by_roots.abs().amax(0)


def int8_columns(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    codes, scale, *_ = int8_rows((x if factor is None else x * factor).t())
    return codes, scale.squeeze(1)


def int8_operand(
    copy: FewBitCopy, row_scale: Tensor, function: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    center, reach = column_scales(copy, function)
    x = applied(function, dequantize(copy, len(row_scale), center.dtype))
    relative = row_scale * inverse(row_scale.max())
    operand = (x - center) * inverse(reach / LEVELS) * relative
    return operand.round().to(torch.int8).t(), reach / LEVELS * row_scale.max(), center


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    product = (a.double() @ b.double().t()) * b_scale
    product = product if a_scale is None else product * a_scale
    if left is not None and right is not None:
        product += left.double().outer(right.double())
    return product.to(dtype)


def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    keys = magnitude_keys(x.reshape(-1))
    return _from(x.reshape(-1), keys, k, keys.kthvalue(keys.numel() - k + 1).values)


def _losses_and_gradients(
    logits_of: Callable[..., Tensor],
    leaves: list[Tensor],
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    factor: Tensor | None,
) -> tuple[Tensor, ...]:
    """In double precision, by autograd."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    losses = F.cross_entropy(
        *(logits_of(*leaves), target),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )
    total = losses.sum() if factor is None else (losses * factor.double()).sum()
    return losses.detach(), *torch.autograd.grad(total, leaves)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    leaves = [x, weight] if bias is None else [x, weight, bias]
    return _losses_and_gradients(F.linear, leaves, target, *others)


def pixel_cross_entropy(
    x: Tensor,
    target: Tensor,
    align_corners: bool,
    scale_h: float | None,
    scale_w: float | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    def enlarged(x: Tensor) -> Tensor:
        return upsample(x, target.shape[1:], align_corners, scale_h, scale_w)

    return _losses_and_gradients(enlarged, [x], target, *others)
