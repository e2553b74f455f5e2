"""Says what every fused kernel moves and computes in a ViT-B/16 block, and the time that implies.

    .venv/bin/python scripts/bench/roofline.py [--device cuda]

The calls are those of a training step on 128 images in bf16; block.py has them. Bytes, operations
and launches are what `plan` counts, and the time on each preset is what it predicts from them.
Registers and shared memory are those of the compiled cubin, in fp16 for cards before compute
capability 8.0; occupancy is what they leave of an SM's warps. All are null where Triton is not
installed, for cards that it has no kernels for, and for ops without a kernel. With `--device cuda`
each op is timed instead, once its result is that of its PyTorch body; one that fails gets no time.
The script writes results/roofline.json after every row.
"""

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from re import fullmatch
from typing import Any

import torch
from block import Case, cases
from machine import device_name, preset
from record import head, options, reason, write
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from razorctl.memory import costs
from razorctl.memory.trace_cache import Trace
from razorctl.ops import kernels
from razorctl.planning import gpus
from razorctl.planning.times import Seconds, on_card

BATCH = 128
DISTANCE = 2e-2  # relative, of floating results of an op's kernel and its body
SELDOM = 1e-2  # the share of integers that may round the other way
SHOWN = ("rtx-2080-ti", "rtx-4090", "a100-80gb", "h100-80gb")


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
