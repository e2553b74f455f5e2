"""What becomes of a kernel on cards that are not here: Triton's wheel has all that compiles it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from razorctl.ops.triton.variants import Variant

WARP = 32


@dataclass(frozen=True)
class Compiled:
    """registers: of a thread. stack: bytes of a thread, registers that were spilled among them.

    shared: bytes of a block. ttir: the kernel in Triton's own terms. ptx: what ptxas was given.
    """

    registers: int
    stack: int
    shared: int
    ttir: str
    ptx: str

    def instructions(self, pattern: str) -> list[str]:
        """The different instructions in the PTX that begin with what `pattern` matches."""
        return sorted(set(re.findall(rf"\b(?:{pattern})[\w.:]*", self.ptx)))

    @property
    def tensor_core(self) -> list[str]:
        """The different tensor-core instructions."""
        return self.instructions(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma")


def compiled(variant: Variant, capability: int) -> Compiled:
    """A variant compiled for a compute capability (75, 80, ...); raises what Triton raises."""
    target = GPUTarget("cuda", capability, WARP)
    kernel = triton.compile(variant.source(target), target=target, options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return Compiled(
        registers=int(found[1]),
        stack=int(found[2]),
        shared=kernel.metadata.shared,
        ttir=kernel.asm["ttir"],
        ptx=kernel.asm["ptx"],
    )
