"""Says what every fused kernel moves and computes in a ViT-B/16 block, and the time that implies.

    .venv/bin/python scripts/bench/roofline.py [--device cuda]

The calls are those of razorctl's ops in a training step on 128 images in bf16: every op that has a
fused kernel. Copies have 5 bits; pruning is at a ratio of 0.9. Bytes, operations and launches are
what `plan` counts, and the time on each preset is what it predicts from them. With `--device cuda`
each op is timed too, once its result is that of its PyTorch body; one that fails gets no time. The
script writes results/roofline.json after every row.
"""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from pages import listing
from record import device_name, head, options, preset, reason, write
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from razorctl.memory import costs
from razorctl.memory.trace_cache import Trace
from razorctl.ops import (
    activation,
    columns,
    gated,
    gemm,
    int8,
    int8_operand,
    kernels,
    linear_again,
    linear_operands,
    norm,
    norm_again,
    quantize,
    sampling,
    topk,
)
from razorctl.ops.op import FewBitCopy, Op
from razorctl.planning import gpus
from razorctl.planning.times import Seconds, on_card
from razorctl.rules.packed import TILE

BATCH = 128
DISTANCE = 2e-2  # relative, of floating results of an op's kernel and its body
SELDOM = 1e-2  # the share of integers that may round the other way
SMOKE = "rtx-4090"  # the card of --smoke
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

    of: the layer or the tensor it works on. args: a batch and a device -> its arguments.
    """

    op: Op[..., Any]
    of: str
    args: Callable[[int, torch.device], tuple[Any, ...]]

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

    yield Case(norm.residual_add, "sum", both)
    yield Case(norm.norm_quantize, "norm", forward)
    yield Case(norm.norm_quantize, "norm of sum", after)
    yield Case(norm.normalize, "norm of sum", alone)
    yield Case(norm_again.norm_again, "norm of sum", again)
    yield Case(norm.norm_grad, "norm", backward)
    yield Case(norm.norm_grad_int8, "norm", backward)


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

    yield Case(gated.gated_grad, "gated", of_gated)
    yield Case(activation.activation_quantize, "gelu", forward)
    yield Case(activation.activation_grad, "gelu", backward)
    yield Case(activation.activation_grad_int8, "gelu", backward)


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

    yield Case(quantize.quantize, "proj", of_input)
    yield Case(quantize.quantize, "q", of_heads)
    yield Case(quantize.dequantize, "q", back)
    yield Case(int8.int8_heads, "dq, dk, dv", gradients)


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

    yield Case(int8.int8_rows, f"{layer}, dy", gradient)
    yield Case(int8.int8_columns, f"{layer}, W", weight)
    yield Case(int8_operand.int8_operand, f"{layer}, x", operand)
    if layer != "fc2":  # its output is never made again
        op = linear_again.linear_copy_again if layer == "fc1" else linear_again.linear_again
        yield Case(op, f"{layer}, y", again)
    yield Case(linear_operands.linear_operands, f"{layer}, all", operands)
    yield Case(gemm.scaled_gemm, f"{layer}, dX", input_grad)
    yield Case(gemm.scaled_gemm, f"{layer}, dW", weight_grad)


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

    yield Case(topk.topk_pack, f"{layer}, x", pack)
    yield Case(topk.topk_unpack, f"{layer}, x", unpack)
    yield Case(sampling.project, f"{layer}, p", weights)
    yield Case(sampling.draw, f"{layer}, p", probabilities)
    yield Case(columns.gather_columns, f"{layer}, x", gather)


def cases() -> list[Case]:
    """Every op that has a fused kernel, at the shapes of a block."""
    calls = [*norms(), *activations(), *copies()]
    for layer, sizes in LINEAR.items():
        calls += linear(layer, *sizes)
    return calls + [case for layer in ("fc1", "fc2") for case in pruned(layer, LINEAR[layer][0])]


def counted(case: Case, batch: int, dot: bool) -> costs.OpCost:
    """The cost of a case, as `plan` counts it; dot: see `kernels.assumed`."""
    args = case.args(batch, torch.device("meta"))
    with kernels.assumed(dot):
        return costs.cost(case.op.overload, case.op.flat(args), {}, case.op(*args))


def implied(cost: costs.OpCost, gpu: gpus.Gpu) -> Seconds:
    """The seconds on the card that `plan` predicts."""
    return on_card(Trace(0, 0, 0, 0, 0, 0, cost.kernels, fused=False), gpu)


def work(cost: costs.OpCost) -> dict[str, int]:
    launches = cost.kernels.items()
    return {
        "bytes": sum(count * kernel.bytes for kernel, count in launches),
        "operations": sum(count * kernel.operations for kernel, count in launches),
        "launches": sum(cost.kernels.values()),
    }


def check(case: Case, batch: int, device: torch.device) -> tuple[Any, ...]:
    """Compares an op with its PyTorch body on the same arguments, and returns these."""
    args = case.args(batch, device)
    twin = tree_map_only(Tensor, Tensor.clone, args)
    got, want = (tree_flatten(results)[0] for results in (case.op(*args), case.op.body(*twin)))
    failed = [why for (name, _), why in kernels.failures().items() if name == case.name]
    if failed:
        raise ArithmeticError(f"the kernel failed: {failed[0]}")
    for ours, theirs in zip(got, want, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ArithmeticError("a result has another shape or dtype than that of the body")
        if theirs.is_floating_point():
            ours, theirs = ours.double(), theirs.double()
            bound = DISTANCE * torch.linalg.vector_norm(theirs)
            alike = bool(torch.linalg.vector_norm(ours - theirs) <= bound)
        else:
            alike = not ours.numel() or bool((ours != theirs).double().mean() <= SELDOM)
        if not alike:
            raise ArithmeticError("a result is not that of the body")
    return args


def timed(case: Case, batch: int, device: torch.device) -> float:
    """Seconds of a call of an op on a CUDA device, the median, with a cold cache."""
    if device.type not in case.op.kernels or not kernels.wanted():
        raise NotImplementedError("no kernel runs, but the body")
    args = check(case, batch, device)
    from triton.testing import do_bench

    return float(do_bench(lambda: case.op(*args), return_mode="median")) / 1e3


def as_row(
    case: Case, batch: int, cards: dict[str, gpus.Gpu], device: torch.device
) -> dict[str, Any]:
    """The row of a case in the result, with its measured time on CUDA or why there is none."""
    cost = {dot: counted(case, batch, dot) for dot in (True, False)}
    times = {name: implied(cost[gpu.multiplies_in_triton], gpu) for name, gpu in cards.items()}
    before, seconds, error = work(cost[False]), None, None
    if device.type == "cuda":
        try:
            seconds = timed(case, batch, device)
        except Exception as failed:  # running out of memory too
            error = reason(failed)
    return {
        "op": case.name,
        "of": case.of,
        **work(cost[True]),
        "before_8.0": None if before == work(cost[True]) else before,
        "implied_seconds": {name: taken.likely for name, taken in times.items()},
        "measured_seconds": seconds,
        "error": error,
    }


def main() -> None:
    parser = options(__doc__, "roofline")
    parser.add_argument("--device", choices=("none", "cuda"), default="none")
    parser.add_argument("--smoke", action="store_true", help="one image, one card, GELU")
    args = parser.parse_args()
    cuda, batch, chosen = args.device == "cuda", BATCH, cases()
    device = torch.device("cuda" if cuda else "meta")
    cards = {name: gpus.load(name) for name in gpus.names()}
    document: dict[str, Any] = {
        **head(
            device_name("cuda") if cuda else f"none; counted on a CPU, {platform.machine()}",
            "torch",
        ),
        "preset": None,
        "triton": version("triton") if find_spec("triton") else None,
    }
    if cuda:
        card = preset()
        document["preset"] = next((name for name in cards if cards[name] == card), None)
    if args.smoke:
        batch, chosen = 1, [case for case in chosen if case.of.startswith("gelu")]
        cards = {SMOKE: cards[SMOKE]}
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for case in chosen:
        row = as_row(case, batch, cards, device)
        taken, times = row["measured_seconds"], row["implied_seconds"]
        comparable = taken is not None and document["preset"] is not None
        row["measured_vs_implied"] = taken / times[document["preset"]] if comparable else None
        rows.append(row)
        write(args.out, document)
    megabytes, microseconds = ("bytes", 1e6, ".1f"), ("measured_seconds", 1e-6, ".1f")
    columns = (megabytes, ("operations", 1e9, ".1f"), ("launches", 1, ".0f"), microseconds)
    print(listing(rows, ("op", "of", "error"), columns))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
