"""The rule that saves all elements in few bits, in copies that layers can share."""

import torch
from torch import Tensor

from razorctl.ops.activation import FUNCTIONS, activation_grad
from razorctl.ops.quantize import dequantize, quantize
from razorctl.rules.base import Product, Rule, Shareable
from razorctl.rules.packed import PackedCodes


class Quantized(Rule, Shareable):
    """All elements, in few bits: codes with a zero point and a scale for each column.

    Each block of an activation [blocks, rows, columns] has its own zero points and scales. This is
    the group quantization of ActNN (Chen et al., 2021) and Mesa (Pan et al., 2021) with columns as
    groups, because columns of activations differ more than rows do. stochastic: rounds at random,
    so that the mean is exact. rows: cuts [rows, columns] into blocks of at least this many rows,
    whose codes are more exact; None makes one block.
    """

    prunes = False

    def __init__(self, bits: int, stochastic: bool = False, rows: int | None = None) -> None:
        self.bits, self.stochastic, self.rows = bits, stochastic, rows

    def pack(self, x: Tensor) -> PackedCodes:
        # From torch's default generator, so that checkpointing draws it again.
        seed = torch.randint(2**31, (), device=x.device) if self.stochastic else None
        packed, zero_point, scale = quantize(x.view(self._tiles(x.shape)), self.bits, seed)
        return PackedCodes(x.shape, x.dtype, packed, zero_point, scale, self.bits)

    def unpack(self, packed: PackedCodes) -> Tensor:
        scale = packed.scale
        rows = packed.shape[:-1].numel() // max(1, len(scale))
        codes = packed.packed, packed.zero_point, scale, packed.bias, packed.bits
        x: Tensor = dequantize(*codes, rows, packed.dtype).view(packed.shape)
        return x if packed.function is None else FUNCTIONS[packed.function].forward(x)

    def weight_grad(self, product: Product, packed: PackedCodes) -> Tensor:
        grad = product.of_codes(packed)
        return super().weight_grad(product, packed) if grad is None else grad

    def function_grad(self, function: str, dy: Tensor, packed: PackedCodes) -> Tensor:
        tiles = dy.reshape(len(packed.scale), -1, packed.shape[-1])
        codes = packed.packed, packed.zero_point, packed.scale, packed.bits
        dx: Tensor = activation_grad(tiles, *codes, function)
        return dx.view(dy.shape)

    def of_affine(
        self, packed: PackedCodes, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> PackedCodes:
        scale = packed.scale if weight is None else packed.scale.float() * weight
        return packed.replaced(dtype=like.dtype, scale=scale, bias=bias)

    def of_function(self, packed: PackedCodes, function: str) -> PackedCodes:
        return packed.replaced(function=function)

    def _tiles(self, shape: torch.Size) -> list[int]:
        """`shape` as [blocks, rows, columns], with as many equal blocks as `self.rows` allows."""
        if len(shape) == 3:
            return list(shape)
        rows, columns = shape
        most = max(1, rows // (self.rows or max(1, rows)))
        blocks = next(n for n in range(most, 0, -1) if rows % n == 0)
        return [blocks, rows // blocks, columns]
