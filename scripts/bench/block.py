"""The calls of razorctl's ops in a block of ViT-B/16, in bf16: every op that has a fused kernel.

Copies have 5 bits; pruning is at a ratio of 0.9.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razorctl.ops import (
    activation,
    columns,
    gated,
    gemm,
    int8,
    int8_operand,
    linear_again,
    linear_operands,
    norm,
    norm_again,
    quantize,
    sampling,
    topk,
)
from razorctl.ops.op import FewBitCopy, Op
from razorctl.rules.packed import TILE

TOKENS, HEADS, WIDTH, WIDE = 197, 12, 768, 3072
LINEAR = {  # columns of input and output
    "qkv": (WIDTH, 3 * WIDTH),
    "proj": (WIDTH, WIDTH),
    "fc1": (WIDTH, WIDE),
    "fc2": (WIDE, WIDTH),
}
BITS = 5
DENSITY = 0.1


@dataclass(frozen=True)
class Case:
    """A call of an op in a block.

    of: the layer or the tensor it works on. args: a batch and a device -> its arguments. launches:
    what the labels of its variants in razorctl.ops.triton match, after the name of their file;
    HALF stands for the dtype of 16 bits that a card computes in.
    """

    op: Op[..., Any]
    of: str
    args: Callable[[int, torch.device], tuple[Any, ...]]
    launches: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the op."""
        return self.op.name


def normal(*shape: int, on: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=on).to(dtype)


def rows(batch: int) -> int:
    return batch * TOKENS


def norms() -> Iterator[Case]:
    """The sum of the residual stream and a branch, and its norm.

    Most norms know their statistics from the sum. Gradients of the stream are in single precision.
    """

    def both(batch: int, on: torch.device) -> tuple[Any, ...]:
        x, f = (normal(rows(batch), WIDTH, on=on) for _ in range(2))
        return x.float(), f, 1e-6, True

    def forward(batch: int, on: torch.device) -> tuple[Any, ...]:
        affine = (normal(WIDTH, on=on, dtype=torch.float32) for _ in range(2))
        x = normal(rows(batch), WIDTH, on=on)
        return x, *affine, 1e-6, True, BITS, TILE, torch.bfloat16

    def after(batch: int, on: torch.device) -> tuple[Any, ...]:
        y, *statistics = norm.residual_add(*both(batch, on))
        return y.bfloat16(), *forward(batch, on)[1:], *statistics

    def backward(batch: int, on: torch.device) -> tuple[Any, ...]:
        args = forward(batch, on)
        _, rstd, *copy = norm.norm_quantize(*args)
        x_hat = FewBitCopy(*copy, BITS, TILE)
        dy, residual = (normal(rows(batch), WIDTH, on=on) for _ in range(2))
        return dy, x_hat, args[1], rstd, True, residual.float()

    def alone(batch: int, on: torch.device) -> tuple[Any, ...]:
        x, weight, bias, eps, centers, *_ = forward(batch, on)
        return x.float(), weight, bias, eps, centers, torch.bfloat16

    def again(batch: int, on: torch.device) -> tuple[Any, ...]:
        x, f, *_ = both(batch, on)
        _, mean, rstd = norm.normalize(*alone(batch, on))
        copy = FewBitCopy(*quantize.quantize(x, BITS, TILE, mean, rstd), BITS, TILE)
        return copy, f, None, mean, rstd, *norm.residual_add(x, f, 1e-6, True)[1:]

    quantized = rf"norm: quantize_\w+ {BITS} bits HALF .*'R': {TILE},.* norm=True .*"
    sums = "int8: column_sums"
    yield Case(norm.residual_add, "sum", both, ("norm: residual_add 1024 HALF",))
    yield Case(norm.norm_quantize, "norm", forward, ("norm: statistics HALF", quantized))
    yield Case(norm.norm_quantize, "norm of sum", after, (quantized,))
    yield Case(norm.normalize, "norm of sum", alone, ("norm: normalize 1024 HALF",))
    launches = (f"norm_again: norm_again {BITS} bits HALF {TILE} rows",)
    yield Case(norm_again.norm_again, "norm of sum", again, launches)
    yield Case(norm.norm_grad, "norm", backward, ("norm: norm_grad 1024 HALF", sums))
    launches = "norm: norm_grad_int8 1024 HALF", sums
    yield Case(norm.norm_grad_int8, "norm", backward, launches)


def activations() -> Iterator[Case]:
    """GELU between the two linear layers, and what a gated MLP has in its place."""

    def forward(batch: int, on: torch.device) -> tuple[Any, ...]:
        return normal(rows(batch), WIDE, on=on), "gelu", BITS, TILE

    def backward(batch: int, on: torch.device) -> tuple[Any, ...]:
        x, *form = forward(batch, on)
        _, *copy = activation.activation_quantize(x, *form)
        return normal(*x.shape, on=on), FewBitCopy(*copy, BITS, TILE), "gelu"

    def of_gated(batch: int, on: torch.device) -> tuple[Any, ...]:
        return *normal(3, rows(batch), WIDE, on=on), "silu"

    yield Case(gated.gated_grad, "gated", of_gated, ("gated: gated_grad silu HALF",))
    form = f"gelu {BITS} bits HALF"
    quantized = rf"activation: quantize_\w+ {BITS} bits HALF .*'R': {TILE},.* gelu .*"
    yield Case(activation.activation_quantize, "gelu", forward, (quantized,))
    launches = (f"activation: activation_grad {form}",)
    yield Case(activation.activation_grad, "gelu", backward, launches)
    launches = f"activation: activation_grad_int8 4096 {form}", "int8: column_sums"
    yield Case(activation.activation_grad_int8, "gelu", backward, launches)


def copies() -> Iterator[Case]:
    """Few-bit copies of the input of a linear layer, and of q, k or v, whose tiles are heads.

    Gradients of q, k and v are copied in int8.
    """

    def of_input(batch: int, on: torch.device) -> tuple[Any, ...]:
        return normal(rows(batch), WIDTH, on=on), BITS, TILE

    def of_heads(batch: int, on: torch.device) -> tuple[Any, ...]:
        return normal(rows(batch) * HEADS, WIDTH // HEADS, on=on), BITS, TOKENS

    def back(batch: int, on: torch.device) -> tuple[Any, ...]:
        x, bits, tile_rows = of_heads(batch, on)
        copy = FewBitCopy(*quantize.quantize(x, bits, tile_rows), bits, tile_rows)
        return copy, len(x), x.dtype

    def gradients(batch: int, on: torch.device) -> tuple[Any, ...]:
        parts = normal(3, batch, TOKENS, HEADS, WIDTH // HEADS, on=on)
        return tuple(parts.transpose(2, 3).unbind(0))

    launches = (
        rf"quantize: quantize_\w+ {BITS} bits HALF .*'R': {TILE},.* norm=False random=False",
    )
    yield Case(quantize.quantize, "proj", of_input, launches)
    yield Case(quantize.quantize, "q", of_heads, launches)
    yield Case(quantize.dequantize, "q", back, (f"quantize: dequantize {BITS} bits HALF",))
    launches = "int8: int8_heads 1024 HALF", "int8: column_sums"
    yield Case(int8.int8_heads, "dq, dk, dv", gradients, launches)


def linear(layer: str, inputs: int, outputs: int) -> Iterator[Case]:
    """int8 operands and GEMMs of the backward pass of a linear layer."""
    function = "gelu" if layer == "fc2" else None

    def gradient(batch: int, on: torch.device) -> tuple[Any, ...]:
        return (normal(rows(batch), outputs, on=on),)

    def weight(batch: int, on: torch.device) -> tuple[Any, ...]:
        return (normal(outputs, inputs, on=on, dtype=torch.float32),)

    def codes(batch: int, on: torch.device) -> tuple[Any, ...]:
        return int8.int8_rows(*gradient(batch, on))[:2]

    def operand(batch: int, on: torch.device) -> tuple[Any, ...]:
        copy = quantize.quantize(normal(rows(batch), inputs, on=on), BITS, TILE)
        return FewBitCopy(*copy, BITS, TILE), codes(batch, on)[1], function

    def again(batch: int, on: torch.device) -> tuple[Any, ...]:
        bias = normal(outputs, on=on, dtype=torch.float32)
        form = operand(batch, on)[0], rows(batch), function
        return *form, *weight(batch, on), bias, torch.bfloat16

    def input_grad(batch: int, on: torch.device) -> tuple[Any, ...]:
        (a, a_scale), (b, b_scale) = codes(batch, on), int8.int8_columns(*weight(batch, on))
        return a, b, a_scale, b_scale, torch.bfloat16, None, None

    def weight_grad(batch: int, on: torch.device) -> tuple[Any, ...]:
        (dy,) = gradient(batch, on)
        total, (a, a_scale) = int8.int8_rows(dy)[2], int8.int8_columns(dy)
        b, b_scale, center = int8_operand.int8_operand(*operand(batch, on))
        return a, b, a_scale[:, None], b_scale, torch.float32, total, center

    def operands(batch: int, on: torch.device) -> tuple[Any, ...]:
        copy, _, function = operand(batch, on)
        dy, row_scale, _, largest = int8.int8_rows(*gradient(batch, on))
        return dy, row_scale, largest, copy, function, *weight(batch, on)

    held = 1024 if outputs <= 1024 else 4096
    launches = f"int8: int8_rows {held} HALF", "int8: column_sums"
    yield Case(int8.int8_rows, f"{layer}, dy", gradient, launches)
    launches = "int8: largest fp32", "int8: int8_columns fp32"
    yield Case(int8.int8_columns, f"{layer}, W", weight, launches)
    form = f"{BITS} bits {function}"
    launches = f"int8_operand: bounds {form}", f"int8_operand: int8_operand {form}"
    yield Case(int8_operand.int8_operand, f"{layer}, x", operand, launches)
    if layer != "fc2":  # its output is never made again
        # And those of its product, as below.
        launches = (f"linear_again: row_operands 1024 {form} fp32",)
        op = linear_again.linear_copy_again if layer == "fc1" else linear_again.linear_again
        yield Case(op, f"{layer}, y", again, launches)
    form += " fp32 bf16 128 rows"
    launches = f"linear_operands: scales {form}", f"linear_operands: codes {form}"
    yield Case(linear_operands.linear_operands, f"{layer}, all", operands, launches)
    # Before 8.0 there are no tiles, but cuBLAS and an epilogue.
    for of, args, dtype in (("dX", input_grad, "HALF"), ("dW", weight_grad, "fp32")):
        launches = (
            rf"gemm_tiles: scaled_gemm \d\S+ {dtype}",
            f"gemm_tiles: scaled_gemm epilogue {dtype}",
        )
        yield Case(gemm.scaled_gemm, f"{layer}, {of}", args, launches)


def pruned(layer: str, inputs: int) -> Iterator[Case]:
    """The ops that prune the input of a linear layer, at a density of DENSITY."""
    count = round(DENSITY * inputs)

    def pack(batch: int, on: torch.device) -> tuple[Any, ...]:
        return normal(rows(batch), inputs, on=on), round(DENSITY * rows(batch) * inputs)

    def unpack(batch: int, on: torch.device) -> tuple[Any, ...]:
        return *topk.topk_pack(*pack(batch, on)), [rows(batch), inputs]

    def weights(batch: int, on: torch.device) -> tuple[Any, ...]:
        return torch.randn(inputs, device=on, dtype=torch.float64), count, 0.2 * count / inputs

    def probabilities(batch: int, on: torch.device) -> tuple[Any, ...]:
        phase = torch.full((), 0.25, dtype=torch.float64, device=on)
        return sampling.project(*weights(batch, on)), phase, count

    def gather(batch: int, on: torch.device) -> tuple[Any, ...]:
        index = torch.arange(count, device=on) * (inputs // count)
        return normal(rows(batch), inputs, on=on), index

    passes = (rf"topk: {kernel}_kernel i16" for kernel in ("histogram", "count", "pack"))
    yield Case(topk.topk_pack, f"{layer}, x", pack, tuple(passes))
    launches = "topk: count_bits_kernel", "topk: unpack_kernel i16"
    yield Case(topk.topk_unpack, f"{layer}, x", unpack, launches)
    yield Case(sampling.project, f"{layer}, p", weights, ("sampling: project",))
    yield Case(sampling.draw, f"{layer}, p", probabilities, ("sampling: draw",))
    yield Case(columns.gather_columns, f"{layer}, x", gather, ("columns: gather_columns i16",))


def cases() -> list[Case]:
    """Every op that has a fused kernel, at the shapes of a block."""
    calls = [*norms(), *activations(), *copies()]
    for layer, sizes in LINEAR.items():
        calls += linear(layer, *sizes)
    return calls + [case for layer in ("fc1", "fc2") for case in pruned(layer, LINEAR[layer][0])]
