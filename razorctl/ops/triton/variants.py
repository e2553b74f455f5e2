"""What a kernel is compiled as, so that a test can compile all of it for cards that are not here.

Each file of kernels has `variants(capability, every=False)`, which yields what its launches may ask
for on cards of that compute capability (75, 80, ...): every `Variant`, or those that take most.
"""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from razorctl.ops.triton.launch import OPTIONS

# How Triton notes a constant, and a pointer or a number that is a multiple of ALIGNED.
CONSTANT, MULTIPLE = "constexpr", "D"
# The dtypes of activations that kernels take, by their names in signatures.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KNOWN = frozenset(DTYPES.values())


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

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two that compile to the same."""
        constants = tuple(sorted(self.constexprs.items(), key=itemgetter(0)))
        signature = tuple(sorted(self.signature.items()))
        settings = self.num_warps, self.num_stages, self.most_registers
        return self.kernel.__name__, signature, constants, tuple(sorted(self.unaligned)), settings

    def source(self, target: GPUTarget) -> ASTSource:
        """What `triton.compile` takes as source: equal to what a launch compiles, for its cache."""
        kinds = [self._kind(name) for name in self.kernel.arg_names]
        values = {name: self.constexprs.get(name) for name in self.kernel.arg_names}
        # What of it enters the key of the cache is another thing in each release of Triton.
        _, signature, constants, attributes = self.kernel._pack_args(
            make_backend(target), self.options, values, kinds, self.options
        )
        return ASTSource(self.kernel, signature, constants, attributes)

    def _kind(self, name: str) -> tuple[str, Any]:
        """The type of an argument with what Triton's launcher notes of it, or its constant."""
        kind = self.signature.get(name)
        if kind is None:
            return CONSTANT, self.constexprs.get(name)
        if kind[0] not in "*iu" or kind in ("i1", "u1"):
            return kind, None
        return kind, "" if name in self.unaligned else MULTIPLE
