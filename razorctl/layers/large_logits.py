"""Attention with large logits, which stores q and k in 16 bits instead of by its rules.

An error e of a logit multiplies its probability by exp(e), so few bits of q and k are too coarse
where |q| |k| is large. The first forward pass that stores copies decides this once: for a random
gradient of the output, it compares the exact gradients of q and k with gradients computed from the
copies. A model that is compiled before its first eager pass is not measured.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razorctl.layers.base import RazorLayer, name_of
from razorctl.layers.int8_cost import readable
from razorctl.rules.base import Rules
from razorctl.rules.dense import Half

log = logging.getLogger(__name__)

LIMIT = 0.02  # of a gradient's squared relative error: a cosine of .99
AMPLIFIED = 10  # times the error of q and k, from which on the logits are to blame


class Measured(RazorLayer):
    """The base of attention that measures.

    large_logits: whether its logits are large; None until it has measured.
    """

    large_logits: bool | None = None

    def measures(self, x: Tensor) -> bool:
        """Whether this pass measures: the first that no trace, compiler or CUDA graph records."""
        asked = self.memo is not None and self.memo.measures
        return asked and self.large_logits is None and readable(x)

    def settle(self, error: float, of_copies: float) -> None:
        """Decides by the error of a gradient, and the error of the copies of q and k."""
        if not error > max(LIMIT, AMPLIFIED * of_copies):
            self.large_logits = False
            return
        self.keep_closer()
        if self.memo is not None and not self.memo.told:
            self.memo.told = True
            log.warning(
                "the logits of %s are so large that few bits of q and k would give them a gradient "
                "with a relative error of %.2g; it keeps them in 16 bits, as may other attention "
                "of the model, which takes more bytes than ratio counts.",
                name_of(self),
                error**0.5,
            )

    def keep_closer(self) -> None:
        """Stores q, k, v in half precision from now on."""
        self.large_logits, self.rules = True, Rules(Half(), Half())


@dataclass
class LargeLogits:
    """The result that an attention measured, for checkpoints."""

    layer: Measured

    def state_dict(self) -> dict[str, bool | None]:
        return {"large": self.layer.large_logits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.layer.large_logits = state["large"]
        if state["large"]:
            self.layer.keep_closer()


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
    """The largest squared relative error of tensors; a tensor next to zero has none."""
    pairs = [(w.detach().float(), got[i].detach().float()) for i, w in want.items()]
    squares = [[t.square().nansum().item() for t in (w, g - w)] for w, g in pairs]
    least = 1e-6 * max((size for size, _ in squares), default=0.0) + 1e-30
    return max((off / (size + least) for size, off in squares), default=0.0)
