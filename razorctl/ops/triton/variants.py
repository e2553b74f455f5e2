"""What a kernel is compiled as, so that a test can compile all of it for cards that are not here.

Each file of kernels has `variants(capability, every=False)`, which yields what its launches may ask
for on cards of that compute capability (75, 80, ...): every `Variant`, or those that take most.
"""

from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler import ASTSource

from razorctl.ops.triton.launch import ALIGNED, OPTIONS

# The dtypes of activations that kernels take, by their names in signatures.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtypes(capability: int, every: bool) -> tuple[str, ...]:
    """The dtypes to compile for: all, or the one of 16 bits that a card computes in."""
    return tuple(DTYPES) if every else ("bf16" if capability >= 80 else "fp16",)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments and its constants.

    signature: argument -> type such as "*bf16" or "i32", in the order of the kernel's arguments and
    without its constants; None passed for a pointer is a constant. unaligned: arguments that are no
    multiples of 16; all other pointers and integers are. most_registers: of a thread.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    label: str
    unaligned: tuple[str, ...] = ()
    most_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What `triton.compile` takes as options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **OPTIONS}
        return (
            options if self.most_registers is None else options | {"maxnreg": self.most_registers}
        )

    def source(self) -> ASTSource:
        """What `triton.compile` takes as source."""
        names = self.kernel.arg_names
        aligned = [
            names.index(name)
            for name, kind in self.signature.items()
            if kind[0] in "*iu" and kind != "i1" and name not in self.unaligned
        ]
        return ASTSource(
            fn=self.kernel,
            signature={name: self.signature.get(name, "constexpr") for name in names},
            constexprs=self.constexprs,
            attrs={(i,): [["tt.divisibility", ALIGNED]] for i in aligned},
        )
