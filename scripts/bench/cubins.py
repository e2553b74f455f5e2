"""Kernels compiled for cards that are not in this machine, by the tools in Triton's wheel.

    .venv/bin/python scripts/bench/cubins.py

Counts the instructions that each pass over the activations of a ViT-B/16 step issues an element,
and writes them to razorctl/ops/triton/instructions.json, by which `plan` predicts their time.
"""

import json
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from struct import unpack_from
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops.triton.launch import WARP
from razorctl.ops.triton.recorded import Card, Launch
from razorctl.ops.triton.variants import Variant
from razorctl.planning import job_trace
from razorctl.planning.times import INSTRUCTIONS

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)(.*?);", re.M)
_LINE = re.compile(r"^(\.L[\w$.]*):|^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)(.*?);", re.M)
_TARGET = re.compile(r"`\((\.L[\w$.]*)\)")
SLOW = 16  # most instructions around the call of a slow way
INSTRUCTION_BYTES = 16
_REGISTER = re.compile(r"\bR(\d+)\b")
# Layouts of tensors over threads, and loads of tensors of pointers, in Triton's TTGIR.
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*?)\}>", re.M)
_LOAD = re.compile(
    r"(?:tt\.load|ttg\.async_copy_global_to_local) .*?"
    r"tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>, (?:#ttg\.slice<\{dim = (\d), parent = )?(#\w+)\b"
)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for a card.

    Args:
        registers: Registers of a thread.
        stack: Bytes of a thread, spilled registers among them.
        shared: Bytes of shared memory of a block.
        warps: Warps of a block.
        ttir: Triton's representation before tensors have layouts over threads.
        ttgir: Triton's representation with layouts.
        ptx: The input of ptxas.
        cubin: The output of ptxas.
    """

    registers: int
    stack: int
    shared: int
    warps: int
    ttir: str
    ttgir: str
    ptx: str
    cubin: bytes

    def instructions(self, pattern: str) -> list[str]:
        """The distinct instructions in the PTX whose beginnings match `pattern`."""
        return sorted(set(re.findall(rf"\b(?:{pattern})[\w.:]*", self.ptx)))

    @cached_property
    def in_flight(self) -> float:
        """The most bytes that a program has requested from memory before it waits for some.

        Bytes that several threads request count once, by the average over all loads of the kernel.
        """
        return WARP * self.warps * self.outstanding * self._share

    @cached_property
    def outstanding(self) -> int:
        """The most bytes that a thread has requested from memory before it waits for some.

        Counted along the machine code from first to last line, so a loop counts once. A thread
        waits for a load at the first use of its registers, and for copies into shared memory at an
        instruction that says so; earlier requests are then complete too.
        """
        loads: list[tuple[range, int]] = []
        groups: list[int] = [0]  # bytes of copies; those of the last one are not committed yet
        most = 0
        for name, rest in _READ.get(self.cubin) or _INSTRUCTION.findall(_sass(self.cubin)):
            kind, *parts = name.split(".")
            named = [int(number) for number in _REGISTER.findall(rest)]
            for at in range(len(loads) - 1, -1, -1):
                if any(number in loads[at][0] for number in named):
                    del loads[: at + 1]
                    break
            if kind == "LDG":
                size = _bytes(parts)
                loads.append((range(named[0], named[0] + max(1, size // 4)), size))
            elif kind == "LDGSTS":
                groups[-1] += _bytes(parts)
            elif kind == "LDGDEPBAR":
                groups.append(0)
            elif kind == "DEPBAR" and "LE" in parts:
                pending = int(rest.split(",")[1].strip(), 16)
                groups[:-1] = groups[:-1][max(0, len(groups) - 1 - pending) :]
            most = max(most, sum(size for _, size in loads) + sum(groups))
        return most

    def issued(self, turns: int) -> int:
        """The instructions of a warp on its longest way, with so many turns of each loop.

        Without the slow ways of divisions and roots, which are called, and of a kernel without a
        loop without the part after a guarded end, which other programs run.
        """
        code, labels = list[tuple[bool, str, str | None]](), dict[str, int]()
        for label, guard, kind, rest in _LINE.findall(_sass(self.cubin)):
            if label:
                labels[label] = len(code)
            else:
                target = _TARGET.search(rest)
                guarded = bool(guard) or rest.startswith(".U")  # by a uniform predicate
                code.append((guarded, kind, target and target[1]))
        jumps = {
            i: labels.get(at or "", -1) for i, (_, kind, at) in enumerate(code) if kind == "BRA"
        }
        loops = [(to, i) for i, to in jumps.items() if 0 <= to < i]
        longest = [0] * (len(code) + 1)
        for i, (guarded, kind, _) in reversed(list(enumerate(code))):
            ways = [longest[i + 1]]
            if (to := jumps.get(i, -1)) > i:
                calls = to - i <= SLOW and any(kind == "CALL" for _, kind, _ in code[i:to])
                ways = [longest[to], *(ways if guarded and not calls else [])]
            elif kind in ("EXIT", "RET") or to == i:
                ways = ways if guarded and turns > 1 else [0]
            inside = any(start <= i <= end for start, end in loops)
            longest[i] = max(ways) + (turns if inside else 1)
        return longest[0]

    @property
    def _share(self) -> float:
        """The distinct bytes that threads request, as a share of all that they request."""
        layouts = dict(_LAYOUT.findall(self.ttgir))
        requested = distinct = 0
        for sizes, bits, dim, layout in _LOAD.findall(self.ttgir):
            shape = [int(size) for size in sizes.split("x")]
            distinct += math.prod(shape) * int(bits)
            if layout not in layouts:
                requested += math.prod(shape) * int(bits)
                continue
            each, over, warps = _lists(layouts[layout])
            if dim:  # all threads along this dimension of the layout request the same
                del each[int(dim)], over[int(dim)], warps[int(dim)]
            turns = [
                -(-n // (e * o * w)) * e
                for n, e, o, w in zip(shape, each, over, warps, strict=True)
            ]
            requested += WARP * self.warps * math.prod(turns) * int(bits)
        return distinct / requested if requested else 1.0


def _lists(layout: str) -> list[list[int]]:
    """Elements of a thread, threads of a warp and warps along each dimension of a layout."""
    kinds = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    matches = (re.search(rf"{kind} = \[(.*?)\]", layout) for kind in kinds)
    return [[int(size) for size in match[1].split(",")] for match in matches if match is not None]


def _bytes(parts: list[str]) -> int:
    """The bytes that an instruction moves, by the parts of its name."""
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((widths[part] for part in parts if part in widths), 4)


# Cubin -> the names and operands of its instructions, where `read_all` has read them.
_READ: dict[bytes, list[tuple[str, str]]] = {}


def read_all(kernels: Iterable[CompiledKernel], capability: int) -> None:
    """Reads the instructions of kernels for one card at once; nvdisasm takes 0.3 s to start."""
    codes = {kernel.cubin: _code(kernel.cubin) for kernel in kernels}
    arch = f"SM{capability}{'a' * (capability >= 90)}"
    text = _dumped(b"".join(codes.values()), knobs.nvidia.nvdisasm.path, "-ndf", "-b", arch)
    read = iter(_INSTRUCTION.findall(text))
    for cubin, code in codes.items():
        _READ[cubin] = list(islice(read, len(code) // INSTRUCTION_BYTES))


def _code(cubin: bytes) -> bytes:
    """The sections of machine code in a cubin, which is an ELF file."""
    (table,), (size, count, names) = unpack_from("<Q", cubin, 40), unpack_from("<HHH", cubin, 58)
    sections = [unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    labels = sections[names][4]
    return b"".join(
        cubin[at : at + length]
        for name, _, _, _, at, length in sections
        if cubin.startswith(b".text.", labels + name)
    )


def _sass(cubin: bytes) -> str:
    """The machine code as text, without an analysis of data flow, which takes a third longer."""
    return _dumped(cubin, knobs.nvidia.nvdisasm.path, "-c", "-ndf")


def _dumped(cubin: bytes, *command: str) -> str:
    """The output of a command on a file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
        return done.stdout


def compiled(variant: Variant, capability: int) -> CompiledKernel:
    """A variant compiled for a compute capability (75, 80, ...); raises what Triton raises."""
    target = GPUTarget("cuda", capability, WARP)
    kernel = triton.compile(variant.source(target), target=target, options=variant.options)
    usage = _dumped(kernel.asm["cubin"], knobs.nvidia.cuobjdump.path, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return CompiledKernel(
        registers=int(match[1]),
        stack=int(match[2]),
        shared=kernel.metadata.shared,
        warps=variant.num_warps,
        ttir=kernel.asm["ttir"],
        ttgir=kernel.asm["ttgir"],
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
    )


# Kernel of a pass -> the turns of its loop and the elements of a program, by its constants and the
# arguments of the launch.
PASSES: dict[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    "activation_grad_int8_kernel": lambda of: (of["ROWS"] // 2, of["ROWS"] * of["columns"]),
    "codes_kernel": lambda of: (1, of["R"] * of["C"]),
    "dequantize_kernel": lambda of: (1, of["R"] * of["C"]),
    "int8_heads_kernel": lambda of: (of["ROWS"], of["ROWS"] * 3 * of["columns"]),
    "norm_again_kernel": lambda of: (1, of["R"] * of["C"]),
    "norm_grad_kernel": lambda of: (of["ROWS"], of["ROWS"] * of["columns"]),
    "normalize_kernel": lambda of: (1, of["R"] * of["columns"]),
    "quantize_bytes": lambda of: (1, of["R"] * of["C"]),
    "quantize_tile": lambda of: (8, of["R"] * of["U"] * 8),
    "residual_add_kernel": lambda of: (1, of["R"] * of["columns"]),
    "row_operands_kernel": lambda of: (of["ROWS"] // of["R"], of["ROWS"] * of["columns"]),
}
CAPABILITIES = (75, 80, 89, 90, 120)


def passes(launches: Iterable[Launch]) -> dict[str, Launch]:
    """The most frequent launch of each pass, by the name of its instructions."""
    counts = Counter[tuple[str, Any]]()
    first: dict[tuple[str, Any], Launch] = {}
    for launch in launches:
        if launch.variant.kernel.__name__ in PASSES:
            function = launch.variant.constexprs.get("FUNCTION")
            key = " ".join(filter(None, (launch.op, function))), launch.variant.key
            counts[key] += 1
            first.setdefault(key, launch)
    return {key[0]: first[key] for key, _ in reversed(counts.most_common())}


def per_element(launch: Launch, capability: int) -> float:
    """The instructions that a launch of a pass issues for each element, on all lanes."""
    variant = launch.variant
    of = {**variant.constexprs, **launch.arguments}
    turns, elements = PASSES[variant.kernel.__name__](of)
    return compiled(variant, capability).issued(turns) * WARP * variant.num_warps / elements


def main() -> None:
    table: dict[str, dict[str, float]] = {}
    for capability in CAPABILITIES:
        job = Job("vit-b16", "random", batch_size=128, precision="bf16", optimizer="sgd")
        job = replace(job, learning_rate=1e-3, weight_decay=0.0)
        if capability < 80:
            job = replace(job, precision="fp16")
        for ratio in (0.9, 0.97):
            card = Card(capability)
            launches = job_trace.launches(job, Recipe("razor", ratio), 1000, card)[card]
            for name, launch in passes(launches).items():
                row = table.setdefault(name, {})
                if str(capability) not in row:
                    row[str(capability)] = round(per_element(launch, capability), 1)
                    print(name, capability, row[str(capability)], flush=True)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    head = f' "triton": {json.dumps(triton.__version__)},\n "per_element": {{\n'
    INSTRUCTIONS.write_text(f"{{\n{head}{rows}\n }}\n}}\n")


if __name__ == "__main__":
    main()
