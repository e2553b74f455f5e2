"""Attention with large logits, which stores q, k and v in 8 or 16 bits instead of by its rules.

An error e of a logit multiplies its probability by exp(e), so few bits of q and k are too coarse
if |q| |k| is large. The first forward pass that stores copies decides this once. For a random
gradient of the output it compares exact gradients of q and k with gradients from the copies, first
of few bits, then of 8. A model that is compiled before its first eager pass is not measured.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razorctl.layers.base import RazorLayer, name_of
from razorctl.layers.shared_copies.int8_cost import readable
from razorctl.rules.base import Rules
from razorctl.rules.dense import Half
from razorctl.rules.quantized import Quantized

log = logging.getLogger(__name__)

LIMIT = 0.02  # of a gradient's squared relative error: a cosine of .99
AMPLIFIED = 10  # times the error of q and k; above it, the logits are to blame
CLOSER = {bits: Rules(rule, rule) for bits, rule in ((8, Quantized(8)), (16, Half()))}


class Measured(RazorLayer):
    """The base of attention that measures.

    logit_bits: the bits of q, k and v; 0 if the rules are enough, None before the measurement.
    """

    logit_bits: int | None = None

    def measures(self, x: Tensor) -> bool:
        """Whether this pass measures: the first one outside traces, compilers and CUDA graphs."""
        asked = self.memo is not None and self.memo.measures
        return asked and self.logit_bits is None and readable(x)

    def settle(self, errors: Callable[[], tuple[float, float]], dtype: torch.dtype) -> None:
        """Chooses the bits by the error of gradients and the error of the copies of q and k.

        errors: measures both, with the rules of the layer. dtype: of q and k.
        """
        rules, (off, of_copies) = self.rules, errors()
        self.logit_bits = 0
        if not off > max(LIMIT, AMPLIFIED * of_copies):
            return
        self.keep_closer(8)
        least, of_copies = errors()
        if of_copies <= torch.finfo(dtype).eps ** 2 / 4:  # the rest is rounding of the dtype
            if off - least <= LIMIT:
                self.logit_bits, self.rules = 0, rules
                return
        elif least > LIMIT / 4:
            self.keep_closer(16)
        if self.memo is not None and not self.memo.told:
            self.memo.told = True
            log.warning(
                "the attention logits of %s are large: with q and k in a few bits, their gradient "
                "would have a relative error of %.2g. q, k and v are stored in %d bits instead, "
                "which the byte budget does not count; other attention layers may do the same.",
                name_of(self),
                off**0.5,
                self.logit_bits,
            )

    def keep_closer(self, bits: int) -> None:
        """Stores q, k, v in 8 or 16 bits from now on."""
        self.logit_bits, self.rules = bits, CLOSER[bits]


@dataclass
class LargeLogits:
    """The measured bits of an attention, for checkpoints."""

    layer: Measured

    def state_dict(self) -> dict[str, int | None]:
        return {"bits": self.layer.logit_bits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.layer.logit_bits = bits = state["bits"]
        if bits:
            self.layer.keep_closer(bits)


@contextmanager
def unhooked() -> Iterator[None]:
    """Keeps saved tensors from outer hooks, such as the hooks of a recomputed block."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


def drawn(shape: Sequence[int], like: Tensor) -> Tensor:
    """A random gradient, the same each time, without a draw from torch's default generator."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=like.device).to(like.dtype)


def error(got: Mapping[int, Tensor], want: Mapping[int, Tensor]) -> float:
    """The largest squared relative error of the tensors; almost zero tensors count as exact."""
    pairs = [(w.detach().float(), got[i].detach().float()) for i, w in want.items()]
    squares = [[t.square().nansum().item() for t in (w, g - w)] for w, g in pairs]
    least = 1e-6 * max((size for size, _ in squares), default=0.0) + 1e-30
    return max((off / (size + least) for size, off in squares), default=0.0)
