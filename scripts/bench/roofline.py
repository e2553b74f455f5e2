"""Says what every fused kernel moves and computes in a ViT-B/16 block, and the time that implies.

    .venv/bin/python scripts/bench/roofline.py [--device cuda]

The calls are those of razorctl's ops in a training step on 128 images in bf16: every op that has a
fused kernel. Copies have 5 bits; pruning is at a ratio of 0.9. Bytes, operations
and launches are what `plan` counts, and the time on each preset is what it predicts from them.
Registers and shared memory are those of the compiled cubin, in fp16 for cards before compute
capability 8.0; occupancy is what they leave of an SM's warps. All are null where Triton is not
installed, for cards that it has no kernels for, and for ops without a kernel. With `--device cuda`
each op is timed instead, once its result is that of its PyTorch body; one that fails gets no time.
The script writes results/roofline.json after every row.
"""

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from re import fullmatch
from typing import Any

import torch
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
SHOWN = ("rtx-2080-ti", "rtx-4090", "a100-80gb", "h100-80gb")
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


@dataclass(frozen=True)
class Limits:
    """The most that an SM holds: warps, blocks, and KiB of shared memory.

    reserved: bytes that the driver takes of it for each block. unit: bytes that it is given out in.
    """

    warps: int
    blocks: int
    shared: int
    reserved: int = 1024
    unit: int = 128


# Of cards that Triton has kernels for. Warps, shared memory and what is reserved of it: CUDA C++
# programming guide, technical specifications. Blocks and units: cuda_occupancy.h of CUDA 13.
SM = {
    75: Limits(32, 16, 64, reserved=0, unit=256),
    80: Limits(64, 32, 164),
    86: Limits(48, 16, 100),
    89: Limits(48, 24, 100),
    90: Limits(64, 32, 228),
    100: Limits(64, 32, 228),
    120: Limits(48, 24, 100),
}
REGISTERS, PARTITIONS = 2**16, 4  # of every SM above; a partition has a fourth of the registers
REGISTER_UNIT = 256  # in which a warp gets its registers


def occupancy(registers: int, shared: int, warps: int, capability: int) -> float:
    """The share of an SM's warps that are resident, for blocks of so many warps.

    registers: of a thread. shared: bytes of a block.
    """
    limits = SM[capability]
    per_warp = _up(32 * registers, REGISTER_UNIT)
    blocks = [limits.blocks, limits.warps // warps]
    blocks.append(REGISTERS // PARTITIONS // per_warp * PARTITIONS // warps)
    if taken := _up(shared + limits.reserved, limits.unit):
        blocks.append(1024 * limits.shared // taken)
    return min(blocks) * warps / limits.warps


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


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


def variants(case: Case, capability: int) -> list[Any]:
    """The variants that a case launches on cards of a compute capability, or chooses from."""
    from razorctl.ops.triton.variants import dtypes

    matches = []
    for launch in case.launches:
        file, _, label = launch.replace("HALF", dtypes(capability, every=False)[0]).partition(": ")
        module = import_module(f"razorctl.ops.triton.{file}")
        every = module.variants(capability, every=True)
        matches += [variant for variant in every if fullmatch(label, variant.label)]
    return matches


def resources(variant: Any, capability: int) -> dict[str, Any]:
    """The share of an SM that a variant takes, compiled for a compute capability."""
    from cubins import compiled

    cubin, warps = compiled(variant, capability), variant.num_warps
    return {
        "registers": cubin.registers,
        "stack_bytes": cubin.stack,
        "shared_bytes": cubin.shared,
        "warps": warps,
        "occupancy": occupancy(cubin.registers, cubin.shared, warps, capability),
    }


class Compiled:
    """The variants that cases launch on some compute capabilities, compiled once.

    kernels: compute capability -> label of a variant -> its `resources`.
    """

    def __init__(self, capabilities: Iterable[str]) -> None:
        names = sorted(set(capabilities), key=float)
        self.kernels: dict[str, dict[str, Any]] = {name: {} for name in names}

    def of(self, case: Case) -> dict[str, list[str] | None]:
        """Compute capability -> the labels of what a case launches; None where there is nothing."""
        return {name: self._on(case, name) for name in self.kernels}

    def _on(self, case: Case, name: str) -> list[str] | None:
        capability = int(name.replace(".", ""))
        if find_spec("triton") is None or capability not in SM:
            return None
        launched = variants(case, capability)
        if "cuda" not in case.op.kernels:  # it has no kernel yet
            return None
        for variant in launched:
            if variant.label not in self.kernels[name]:
                self.kernels[name][variant.label] = resources(variant, capability)
        return [variant.label for variant in launched]


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


def attempt(case: Case, batch: int, device: torch.device) -> dict[str, Any]:
    """The measured time of a case, or why there is none."""
    row: dict[str, Any] = {"measured_seconds": None, "error": None}
    if device.type == "cuda":
        try:
            row["measured_seconds"] = timed(case, batch, device)
        except Exception as error:  # running out of memory too
            row["error"] = reason(error)
    return row


def as_row(
    case: Case,
    batch: int,
    cards: dict[str, gpus.Gpu],
    compiled: Compiled,
    device: torch.device,
) -> dict[str, Any]:
    """The row of a case in the result."""
    cost = {dot: counted(case, batch, dot) for dot in (True, False)}
    times = {name: implied(cost[gpu.multiplies_in_triton], gpu) for name, gpu in cards.items()}
    before = work(cost[False])
    return {
        "op": case.name,
        "of": case.of,
        **work(cost[True]),
        "before_8.0": None if before == work(cost[True]) else before,
        "implied_seconds": {name: taken.likely for name, taken in times.items()},
        "implied_ranges": {name: (taken.low, taken.high) for name, taken in times.items()},
        "kernels": compiled.of(case),
        **attempt(case, batch, device),
    }


def as_text(rows: list[dict[str, Any]], shown: list[str]) -> str:
    """The result as a table; the times are in microseconds."""
    lines = [
        f"{'op and what it works on':34}{'MB':>8}{'GOP':>7}{'launches':>9}"
        + "".join(f"{name:>13}" for name in shown)
        + f"{'measured':>10}"
    ]
    for row in rows:
        times = "".join(f"{1e6 * row['implied_seconds'][name]:13.1f}" for name in shown)
        taken = row["measured_seconds"]
        lines.append(
            f"{row['op']:21}{row['of']:13}{row['bytes'] / 1e6:8.1f}"
            f"{row['operations'] / 1e9:7.1f}{row['launches']:9}{times}"
            f"{'-' if taken is None else format(1e6 * taken, '.1f'):>10}"
            f"  {row['error'] or ''}".rstrip()
        )
    return "\n".join(lines)


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
        cards = {SHOWN[1]: cards[SHOWN[1]]}
    capabilities = {gpu.compute_capability for gpu in cards.values()}
    compiled = Compiled(() if cuda else capabilities)
    rows: list[dict[str, Any]] = []
    document |= {"rows": rows, "kernels": compiled.kernels}
    for case in chosen:
        row = as_row(case, batch, cards, compiled, device)
        taken, times = row["measured_seconds"], row["implied_seconds"]
        comparable = taken is not None and document["preset"] is not None
        row["measured_vs_implied"] = taken / times[document["preset"]] if comparable else None
        rows.append(row)
        write(args.out, document)
    shown = [name for name in (document["preset"], *SHOWN) if name in cards]
    print(as_text(document["rows"], shown[:4]))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
