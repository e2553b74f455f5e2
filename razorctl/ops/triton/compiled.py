"""What becomes of a kernel on cards that are not here: Triton's wheel has all that compiles it."""

import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from razorctl.ops.triton.launch import WARP
from razorctl.ops.triton.variants import Variant

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)(.*?);", re.M)
_REGISTER = re.compile(r"\bR(\d+)\b")
# Layouts of tensors over threads, and loads of tensors of pointers, in what Triton calls TTGIR.
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*?)\}>", re.M)
_LOAD = re.compile(
    r"(?:tt\.load|ttg\.async_copy_global_to_local) .*?"
    r"tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>, (?:#ttg\.slice<\{dim = (\d), parent = )?(#\w+)\b"
)


@dataclass(frozen=True)
class CompiledKernel:
    """registers: of a thread. stack: bytes of a thread, registers that were spilled among them.

    shared: bytes of a block. ttir, ttgir: the kernel in Triton's own terms, before and after it
    laid tensors out over threads. ptx: what ptxas was given. cubin: what it made.
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
        """The different instructions in the PTX that begin with what `pattern` matches."""
        return sorted(set(re.findall(rf"\b(?:{pattern})[\w.:]*", self.ptx)))

    @property
    def tensor_core(self) -> list[str]:
        """The different tensor-core instructions."""
        return self.instructions(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma")

    @cached_property
    def in_flight(self) -> float:
        """Bytes that a program has asked memory for, at most, before it waits for some of them.

        Those that several threads ask for count once, as far as loads of the whole kernel do so.
        """
        return WARP * self.warps * self.outstanding * self._share

    @cached_property
    def outstanding(self) -> int:
        """Bytes that a thread has asked memory for, at most, before it waits for some of them.

        Counted along the machine code from its first line to its last, so a loop counts once. A
        thread waits for a load where it first names a register of it, and for copies into shared
        memory where it is told to; then what it asked for before is there too.
        """
        loads: list[tuple[range, int]] = []
        groups: list[int] = [0]  # bytes of copies; those of the last one are not committed yet
        most = 0
        for name, rest in _INSTRUCTION.findall(_dumped(self.cubin, "-sass")):
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
                kept = int(rest.split(",")[1].strip(), 16)
                groups[:-1] = groups[:-1][max(0, len(groups) - 1 - kept) :]
            most = max(most, sum(size for _, size in loads) + sum(groups))
        return most

    @property
    def _share(self) -> float:
        """Of the bytes that threads ask for, those that no other thread asks for too."""
        layouts = dict(_LAYOUT.findall(self.ttgir))
        asked = different = 0
        for sizes, bits, dim, layout in _LOAD.findall(self.ttgir):
            shape = [int(size) for size in sizes.split("x")]
            different += math.prod(shape) * int(bits)
            if layout not in layouts:
                asked += math.prod(shape) * int(bits)
                continue
            each, over, warps = _lists(layouts[layout])
            if dim:  # all threads along this dimension of the layout ask for the same
                del each[int(dim)], over[int(dim)], warps[int(dim)]
            turns = [
                -(-n // (e * o * w)) * e
                for n, e, o, w in zip(shape, each, over, warps, strict=True)
            ]
            asked += WARP * self.warps * math.prod(turns) * int(bits)
        return different / asked if asked else 1.0


def _lists(layout: str) -> list[list[int]]:
    """Elements of a thread, threads of a warp and warps along each dimension of a layout."""
    kinds = "sizePerThread", "threadsPerWarp", "warpsPerCTA"
    found = (re.search(rf"{kind} = \[(.*?)\]", layout) for kind in kinds)
    return [[int(size) for size in one[1].split(",")] for one in found if one is not None]


def _bytes(parts: list[str]) -> int:
    """What an instruction of such a name moves."""
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    return next((widths[part] for part in parts if part in widths), 4)


def _dumped(cubin: bytes, what: str) -> str:
    """What cuobjdump says of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compiled(variant: Variant, capability: int) -> CompiledKernel:
    """A variant compiled for a compute capability (75, 80, ...); raises what Triton raises."""
    target = GPUTarget("cuda", capability, WARP)
    kernel = triton.compile(variant.source(target), target=target, options=variant.options)
    usage = _dumped(kernel.asm["cubin"], "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return CompiledKernel(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=kernel.metadata.shared,
        warps=variant.num_warps,
        ttir=kernel.asm["ttir"],
        ttgir=kernel.asm["ttgir"],
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
    )


def compile_all(variants: Sequence[Variant], capability: int, threads: int) -> None:
    """Compiles variants for the card of this process into Triton's cache, where launches find them.

    Threads share the work as far as Triton lets go of Python's lock: on two cores two took 0.7 of
    one's time or less for the 39 kernels of a ViT; two processes took longer, as each imports
    torch. Raises the first error of any, once the others are compiled.
    """
    target = GPUTarget("cuda", capability, WARP)

    def one(variant: Variant) -> None:
        made = triton.compile(variant.source(target), target=target, options=variant.options)
        with suppress(Exception):  # a launch says what is wrong
            CudaLauncher(made.src, made.metadata)  # Triton 3.6 compiles one in C for each signature

    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(one, variant) for variant in variants]
    for each in done:
        each.result()
