"""Variants of kernels, with which tests compile kernels for cards that are not in the machine.

Each file of kernels has `variants(capability, every=False)`, which yields the `Variant`s of its
launches on cards of a compute capability (75, 80, ...): every one, or those that take most
registers.
"""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from razorctl.ops.triton.launch import OPTIONS

# Triton's marks of a constant, and of a pointer or a number that is a multiple of ALIGNED.
CONSTANT, MULTIPLE = "constexpr", "D"
# The dtypes of activations that kernels take, by their names in signatures.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KNOWN = frozenset(DTYPES.values())


def dtypes(capability: int, every: bool) -> tuple[str, ...]:
    """The dtypes to compile for: all, or the 16-bit dtype that a card computes in."""
    return tuple(DTYPES) if every else ("bf16" if capability >= 80 else "fp16",)


@dataclass(frozen=True)
class Variant:
    """A kernel with the types of its arguments and its constants.

    Args:
        kernel: The kernel.
        signature: Argument -> type such as "*bf16" or "i32", in the order of the kernel's arguments
            and without its constants; None for a pointer is a constant.
        constexprs: Constant -> value.
        num_warps: Warps of a program.
        num_stages: Stages of software pipelines.
        label: A name for people.
        unaligned: Arguments that are not multiples of 16; all other pointers and integers are.
        most_registers: Of a thread; None for no limit.
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
        """The options for `triton.compile`."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **OPTIONS}
        return (
            options if self.most_registers is None else options | {"maxnreg": self.most_registers}
        )

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for variants that compile to the same."""
        constants = tuple(sorted(self.constexprs.items(), key=itemgetter(0)))
        signature = tuple(sorted(self.signature.items()))
        settings = self.num_warps, self.num_stages, self.most_registers
        return self.kernel.__name__, signature, constants, tuple(sorted(self.unaligned)), settings

    def source(self, target: GPUTarget) -> ASTSource:
        """The source for `triton.compile`, equal to a launch's source, so that caches match."""
        kinds = [self._kind(name) for name in self.kernel.arg_names]
        values = {name: self.constexprs.get(name) for name in self.kernel.arg_names}
        # Releases of Triton use different parts of it for the key of the cache.
        _, signature, constants, attributes = self.kernel._pack_args(
            make_backend(target), self.options, values, kinds, self.options
        )
        return ASTSource(self.kernel, signature, constants, attributes)

    def _kind(self, name: str) -> tuple[str, Any]:
        """The type of an argument with its mark in Triton's launcher, or its constant."""
        kind = self.signature.get(name)
        if kind is None:
            return CONSTANT, self.constexprs.get(name)
        if kind[0] not in "*iu" or kind in ("i1", "u1"):
            return kind, None
        return kind, "" if name in self.unaligned else MULTIPLE
