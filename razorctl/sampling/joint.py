"""JointSpar: the parameter blocks that get a gradient in a step (CVPR 2024, Sec. 4)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from razorctl.errors import UsageError
from razorctl.ops.sampling import systematic
from razorctl.sampling.samplers import Bandit


class Blocks:
    """JointSpar: the weight tensors, or residual branches, that get a gradient in this step.

    A fixed share of them is drawn before each training forward pass of the model, by a bandit on
    their gradient norms (Sheared Backpropagation, Sec. 4), or what `branches.Member` puts in their
    place. The draw decides what is launched, so it lives on the host; norms are fetched from the
    device once per step, before the next draw.
    With torch.distributed initialized they are averaged first, so that all processes draw the same;
    DistributedDataParallel then needs find_unused_parameters=True.
    A draw depends on seed, step and what was learned before it, all of it in `state_dict` but the
    seed, so a resumed run repeats it.
    """

    def __init__(self, size: int, budget: float, unbiased: bool = False, seed: int = 0) -> None:
        """`size` is the number of blocks; `budget` the share of them drawn."""
        self.sampler = Bandit(size, max(1, round(budget * size)))
        self.unbiased, self.seed, self.step = unbiased, seed, 0
        self.joined = 0  # blocks that have a number
        self.drawn: dict[int, float] = {}  # block -> its probability
        self.seen: dict[int, Tensor] = {}  # block -> gradient norm in the last step
        self.sizes: dict[int, int] = {}  # block -> elements it last kept, or bytes of a branch
        self.inside: int | None = None  # the branch that is running
        self.handle: RemovableHandle | None = None

    def join(self) -> int:
        """The number of one more block."""
        self.joined += 1
        return self.joined - 1

    def attach(self, model: nn.Module) -> None:
        """Draws before each training forward pass of `model`, until `detach`."""
        self.handle = model.register_forward_pre_hook(self._before_forward)

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def hold_all(self) -> None:
        """Draws every block from now on: for tracing, to learn their sizes."""
        self.detach()
        self.sizes = dict.fromkeys(range(self.sampler.size), 0)
        self.drawn = dict.fromkeys(range(self.sampler.size), 1.0)

    def hold_largest(self) -> None:
        """Draws the largest blocks from now on: for tracing, the draw that saves most."""
        self.detach()
        largest = sorted(self.sizes, key=self.sizes.__getitem__, reverse=True)
        self.drawn = dict.fromkeys(largest[: self.sampler.count], 1.0)

    def probability(self, block: int) -> float:
        """With which a block was drawn in this step, 0 if it was not.

        Raises UsageError if nothing has been drawn, so that none would ever get a gradient.
        """
        _refuse_compilation()
        if not self.drawn:
            raise UsageError(
                "a joint budget draws when the sparsified model itself is called, not a part of "
                "it; call the model, or set joint_budget to 1."
            )
        return self.drawn.get(block, 0.0)

    def observe(self, block: int, p: float, grad: Tensor, size: Tensor | float = 1.0) -> Tensor:
        """Learns from `size` times the gradient of a block drawn with probability p.

        Returns that gradient scaled.
        """
        self.seen[block] = norm(grad) * size
        return grad / p if self.unbiased else grad

    def state_dict(self) -> dict[str, Any]:
        """All that later draws depend on, but for the seed."""
        return {"step": self.step, "seen": dict(self.seen), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; raises ValueError for another number of blocks."""
        self.sampler.load_state_dict(state["sampler"])
        self.step, self.seen = state["step"], dict(state["seen"])

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        _refuse_compilation()
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing, which runs the model again on the same draw
        if self.step:
            self._learn(next(model.parameters()).device)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        u = torch.rand((), generator=generator)
        # In random order, or half of all branches would be every attention or every MLP.
        order = torch.randperm(self.sampler.size, generator=generator)
        index = order[systematic(self.sampler.p[order], self.sampler.count, u)]
        self.drawn = {block: self.sampler.p[block].item() for block in index.tolist()}
        self.step += 1

    def _learn(self, device: torch.device) -> None:
        """Teaches the sampler the last step's norms, averaged over processes, which must agree."""
        norms = torch.zeros(2, self.sampler.size, device=device)  # sums and counts
        if self.seen:
            index = torch.tensor(list(self.seen), device=device)
            fresh = torch.stack([norm.to(device) for norm in self.seen.values()])
            norms[:, index] = torch.stack([fresh, torch.ones_like(fresh)])
            self.seen = {}
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(norms)
        total, count = norms.cpu()
        index = count.nonzero().squeeze(1)
        if len(index):
            self.sampler.update(index, self.sampler.p[index], total[index] / count[index])


def draws(model: nn.Module) -> list[Blocks]:
    """The draws that `model` and its parts make."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return [owner for owner in owners if isinstance(owner, Blocks)]


def norm(x: Tensor) -> Tensor:
    """The norm of all of x, in single precision and without a copy of x in it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    value: Tensor = torch.linalg.vector_norm(x.detach(), dtype=dtype)
    return value.float()


def _refuse_compilation() -> None:
    # Without fullgraph, torch.compile takes this as a reason to run its caller uncompiled.
    if torch.compiler.is_compiling():
        raise UsageError(
            "a joint budget draws anew in every step, which a compiled graph cannot follow; "
            "set joint_budget to 1 or compile without fullgraph."
        )
