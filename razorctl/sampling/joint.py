"""JointSpar: the parameter blocks that get a gradient in a step (CVPR 2024, Sec. 4)."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from razorctl.errors import UsageError
from razorctl.ops.sampling import project, systematic
from razorctl.sampling.samplers import Bandit

MARK = "razor_draw"  # the attribute of a sparsified model that holds its draw

# Norms by block, and the number of blocks -> blocks [n, int64] and their norms [n], on the host.
Reduce = Callable[[Mapping[int, Tensor], int], tuple[Tensor, Tensor]]


class KindsBandit(Bandit):
    """A bandit that draws the same share of each kind of coordinates, to within one.

    kinds: the coordinates of each kind.
    """

    def __init__(self, size: int, count: int, kinds: Sequence[list[int]]) -> None:
        super().__init__(size, count)
        self.kinds = kinds

    def projected(self, log_w: Tensor) -> Tensor:
        p = torch.empty_like(self.p)
        for kind in self.kinds:
            p[kind] = project(log_w[kind], self.count * len(kind) / self.size, self.p_min)
        return p


class Blocks:
    """The draw of the weights, or residual branches, that get a gradient in a step.

    A bandit draws a fixed share of them by their gradient norms (Sheared Backpropagation, Sec. 4).
    For branches it learns from another measure (`branches.Member`). The draw decides which kernels
    run, so its state is on the host. The draws depend on the seed, the step and the norms learned
    so far. `state_dict` has all of these but the seed, so a resumed run repeats the draws.
    """

    def __init__(
        self,
        size: int,
        budget: float,
        unbiased: bool = False,
        seed: int = 0,
        kinds: Sequence[Hashable] = (),
    ) -> None:
        """Draws nothing yet; see `advance`.

        Args:
            size: the number of blocks.
            budget: the share of blocks drawn.
            unbiased: whether gradients are scaled by 1 / p.
            seed: of the draws.
            kinds: the kind of each block, if blocks of different kinds store different amounts. The
                share is then drawn of each kind, so that the bytes of a step vary little.
        """
        self.size = size
        numbers = dict[Hashable, list[int]]()
        for block, kind in enumerate(kinds or [None] * size):
            numbers.setdefault(kind, []).append(block)
        self.kinds = list(numbers.values())
        self.sampler = KindsBandit(size, max(1, round(budget * size)), self.kinds)
        self.unbiased, self.seed, self.step = unbiased, seed, 0
        self.joined = 0  # number of blocks that have joined
        self.drawn: dict[int, float] = {}  # block -> its probability
        self.norms: dict[int, Tensor] = {}  # block -> gradient norm in the last step

    def join(self) -> int:
        """Adds a block and returns its number."""
        self.joined += 1
        return self.joined - 1

    # torch 2.11 would compile the code that learns, next to a graph break, wrongly.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def advance(self, reduce: Reduce) -> None:
        """Learns from the norms of the last step, then draws for the next step.

        reduce: averages the norms over processes. All processes draw the same if it returns the
        same in all of them.
        """
        if self.step:
            self._learn(*reduce(self.norms, self.size))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        u = torch.rand((), generator=generator)
        # In random order, so that any two of a kind can be drawn together.
        order = torch.tensor(
            [
                kind[place]
                for kind in self.kinds
                for place in torch.randperm(len(kind), generator=generator).tolist()
            ]
        )
        index = order[systematic(self.sampler.p[order], self.sampler.count, u)]
        self.drawn = {block: self.sampler.p[block].item() for block in index.tolist()}
        self.step += 1

    def probability(self, block: int) -> float:
        """The probability with which a block was drawn for this step; 0 if it was not drawn.

        Raises UsageError under torch.compile, and before the first draw: without one no block would
        ever get a gradient.
        """
        refuse_compilation()
        if not self.drawn:
            raise UsageError(
                "a joint budget samples when the sparsified model itself is called, not a part of "
                "it; call the model, or set joint_budget to 1."
            )
        return self.drawn.get(block, 0.0)

    def running(self, block: int | None) -> None:
        """Called when the branch of a block starts to run, and with None when it ends."""

    def packed(self, block: int, elements: int) -> None:
        """Called with the number of elements that a block packed; 0 if it shares a copy."""

    def observe(self, block: int, p: float, grad: Tensor, size: Tensor | float = 1.0) -> Tensor:
        """Records the norm of `grad` times `size`; returns `grad`, divided by p if unbiased.

        Args:
            block: its number.
            p: the probability with which it was drawn.
            grad: its gradient.
            size: a factor of the norm.
        """
        self.norms[block] = norm(grad) * size
        return grad / p if self.unbiased else grad

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, except the seed."""
        return {"step": self.step, "seen": dict(self.norms), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a `state_dict`; raises ValueError for another number of blocks."""
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.norms = state["step"], dict(state["seen"])

    def _learn(self, index: Tensor, norms: Tensor) -> None:
        self.norms = {}
        if len(index):
            self.sampler.update(index, self.sampler.p[index], norms)


def norm(x: Tensor) -> Tensor:
    """The L2 norm of all elements of x, 0-dim, in single precision, without a cast copy of x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    value: Tensor = torch.linalg.vector_norm(x.detach(), dtype=dtype)
    return value.float()


def refuse_compilation() -> None:
    """Raises UsageError if torch.compile traces the caller.

    Without fullgraph, torch.compile then runs the caller uncompiled.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            "a joint budget samples anew in every step, which a compiled graph cannot follow; "
            "set joint_budget to 1 or compile without fullgraph."
        )
