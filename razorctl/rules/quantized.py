"""The rule that keeps all elements in few bits, in copies that layers can share."""

import torch
from torch import Tensor

from razorctl.ops.activation import (
    FUNCTIONS,
    activation_grad,
    activation_grad_int8,
    activation_quantize,
)
from razorctl.ops.images import (
    as_they_lie,
    dequantize_images,
    memory_format,
    quantize_images,
)
from razorctl.ops.norm import norm_grad, norm_grad_int8, norm_quantize
from razorctl.ops.quantize import dequantize, quantize
from razorctl.rules.base import Product, Rule, Shareable
from razorctl.rules.packed import Packed, PackedCodes, PackedGated

TILE = 256  # rows of a tile; a zero point and a scale then take an eighth of a bit per element


class Quantized(Rule, Shareable):
    """All elements, in few bits: codes with a zero point and a scale for each tile.

    A tile is a column of `rows` rows, or, of [heads, tokens, columns] and the like, a column of all
    tokens. This is the group quantization of ActNN (Chen et al., 2021) and Mesa (Pan et al., 2021)
    with columns as groups, because columns of activations differ more than rows do. stochastic:
    rounds at random, so that the mean is exact.
    """

    prunes = False

    def __init__(self, bits: int, stochastic: bool = False, rows: int = TILE) -> None:
        self.bits, self.stochastic, self.rows = bits, stochastic, rows
        self.fuses = not stochastic

    def pack(self, x: Tensor) -> PackedCodes:
        # From torch's default generator, so that checkpointing draws it again.
        seed = torch.randint(2**31, (), device=x.device) if self.stochastic else None
        tile_rows = self.rows if x.dim() == 2 else max(1, x.shape[-2])
        rows = x.flatten(0, -2)
        packed, zero_point, scale = quantize(rows, self.bits, tile_rows, None, None, seed)
        return PackedCodes(x.shape, x.dtype, packed, zero_point, scale, self.bits, tile_rows)

    def unpack(self, packed: PackedCodes | PackedGated) -> Tensor:
        if isinstance(packed, PackedGated):
            gate, up = self.unpack(packed.gate), self.unpack(packed.up)  # type: ignore[arg-type]
            return FUNCTIONS[packed.function].forward(gate).mul_(up)
        copy = packed.packed, packed.zero_point, packed.scale, packed.bias, packed.bits
        rows = packed.shape[:-1].numel()
        x: Tensor = dequantize(*copy, rows, packed.tile_rows, packed.dtype).view(packed.shape)
        return x if packed.function is None else FUNCTIONS[packed.function].forward(x)

    def pack_images(
        self, x: Tensor, dtype: torch.dtype, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Packed:
        if self.stochastic or not as_they_lie(x.device, x.shape, memory_format(x)):
            return super().pack_images(x, dtype, mean, rstd)
        images = x.contiguous(), self.bits, self.rows, mean, rstd
        packed, zero_point, scale = quantize_images(*images)
        shape = torch.Size((x.shape[0] * x.shape[2:].numel(), x.shape[1]))
        return PackedCodes(shape, dtype, packed, zero_point, scale, self.bits, self.rows)

    def unpack_images(
        self,
        packed: PackedCodes | PackedGated,
        shape: torch.Size,
        dtype: torch.dtype,
        form: torch.memory_format,
    ) -> Tensor:
        if isinstance(packed, PackedGated) or not as_they_lie(packed.packed.device, shape, form):
            return super().unpack_images(packed, shape, dtype, form)
        copy = packed.packed, packed.zero_point, packed.scale, packed.bias, packed.bits
        way = packed.tile_rows, dtype, packed.function, list(shape)
        images: Tensor = dequantize_images(*copy, *way)
        return images

    def weight_grad(self, product: Product, packed: PackedCodes | PackedGated) -> Tensor:
        grad = product.of_codes(packed) if isinstance(packed, PackedCodes) else None
        return super().weight_grad(product, packed) if grad is None else grad

    def function_grad(self, function: str, dy: Tensor, packed: PackedCodes) -> Tensor:
        if packed.bias is not None or packed.function is not None:  # a copy that a norm offered
            return super().function_grad(function, dy, packed)
        copy = packed.packed, packed.zero_point, packed.scale, packed.bits, packed.tile_rows
        dx: Tensor = activation_grad(dy, *copy, function)
        return dx

    def norm_grad(
        self,
        dy: Tensor,
        packed: PackedCodes,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        copy = packed.packed, packed.zero_point, packed.scale, packed.bits, packed.tile_rows
        dx, dweight, dbias = norm_grad(dy, *copy, weight, rstd, centers, residual)
        return dx, dweight, dbias

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
        made: tuple[Tensor, ...] = norm_quantize(
            x, weight, bias, eps, centers, self.bits, self.rows, dtype, mean, rstd
        )
        return made

    def pack_function(self, x: Tensor, function: str) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = activation_quantize(x, function, self.bits, self.rows)
        return made

    def function_grad_int8(
        self, function: str, dy: Tensor, packed: PackedCodes
    ) -> tuple[Tensor, Tensor, Tensor]:
        copy = packed.packed, packed.zero_point, packed.scale, packed.bits, packed.tile_rows
        codes, scale, total = activation_grad_int8(dy, *copy, function)
        return codes, scale, total

    def norm_grad_int8(
        self,
        dy: Tensor,
        packed: PackedCodes,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        copy = packed.packed, packed.zero_point, packed.scale, packed.bits, packed.tile_rows
        made: tuple[Tensor, ...] = norm_grad_int8(dy, *copy, weight, rstd, centers, residual)
        return made

    def copy(self, shape: torch.Size, dtype: torch.dtype, *tensors: Tensor) -> PackedCodes:
        packed, zero_point, scale = tensors
        return PackedCodes(shape, dtype, packed, zero_point, scale, self.bits, self.rows)

    def of_affine(
        self, packed: PackedCodes, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> PackedCodes:
        scale = packed.scale if weight is None else packed.scale * weight.float()
        return packed.replaced(dtype=dtype, scale=scale, bias=bias)

    def of_function(self, packed: PackedCodes, function: str) -> PackedCodes | None:
        return packed.replaced(function=function) if packed.function is None else None

    def of_gated(self, gate: PackedCodes, up: PackedCodes, function: str) -> PackedGated:
        return PackedGated(gate.shape, gate.dtype, gate, up, function)
