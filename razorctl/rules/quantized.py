"""The rule that stores all elements in few bits, in copies that layers can share."""

import torch
from torch import Tensor

from razorctl.ops.activation import activation_quantize
from razorctl.ops.images import as_they_lie, memory_format, quantize_images
from razorctl.ops.norm import norm_quantize
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import quantize
from razorctl.rules.base import Rule
from razorctl.rules.packed import TILE, Packed, PackedCodes


class Quantized(Rule):
    """All elements in few bits: codes with a zero point and a scale per tile.

    A tile is `rows` rows of a column; for [heads, tokens, columns] and the like, all tokens of a
    column. This is the group quantization of ActNN (Chen et al., 2021) and Mesa (Pan et al., 2021),
    with columns as groups, because columns of activations differ more than rows do. stochastic:
    whether to round at random, so that the expected value is exact.
    """

    prunes = False
    tiled = True

    def __init__(
        self, bits: int, stochastic: bool = False, rows: int = TILE, again: bool = False
    ) -> None:
        self.bits, self.stochastic, self.rows = bits, stochastic, rows
        self.fuses, self.again = not stochastic, again

    def pack(self, x: Tensor) -> PackedCodes:
        # From torch's default generator, so that checkpointing replays it.
        seed = torch.randint(2**31, (), device=x.device) if self.stochastic else None
        tile_rows = self.rows if x.dim() == 2 else max(1, x.shape[-2])
        rows = x.flatten(0, -2)
        tensors = quantize(rows, self.bits, tile_rows, None, None, seed)
        return PackedCodes(x.shape, x.dtype, FewBitCopy(*tensors, self.bits, tile_rows))

    def pack_images(
        self, x: Tensor, dtype: torch.dtype, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Packed:
        if self.stochastic or not as_they_lie(x.device, x.shape, memory_format(x)):
            return super().pack_images(x, dtype, mean, rstd)
        tensors = quantize_images(x.contiguous(), self.bits, self.rows, mean, rstd)
        shape = torch.Size((x.shape[0] * x.shape[2:].numel(), x.shape[1]))
        return self.packed(shape, dtype, *tensors)

    def pack_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centers: bool,
        dtype: torch.dtype,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        form = self.bits, self.rows, dtype
        return norm_quantize(x, weight, bias, eps, centers, *form, mean, rstd)

    def pack_function(self, x: Tensor, function: str) -> tuple[Tensor, ...]:
        return activation_quantize(x, function, self.bits, self.rows)

    def packed(self, shape: torch.Size, dtype: torch.dtype, *tensors: Tensor) -> PackedCodes:
        packed, zero_point, scale = tensors
        copy = FewBitCopy(packed, zero_point, scale, self.bits, self.rows)
        return PackedCodes(shape, dtype, copy)
