"""Which coordinates get a gradient: inclusion probabilities, draws and their updates.

JointSpar and the bandit of Sheared Backpropagation (CVPR 2024, Alg. 1 and 2). Coordinates are
the columns of an activation, or whole parameter blocks (`Blocks`). Two changes to the paper:

- Bernoulli draws become systematic sampling with the same inclusion probabilities, so that the
  number drawn, and with it every saved size, never varies.
- The paper's feasible set lacks p <= 1, which a probability needs; it is added.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from razorctl.errors import UsageError
from razorctl.ops.sampling import draw, project, systematic

DECAY = 0.9  # of the running means of gradient norms


class Sampler:
    """Draws `count` of `size` coordinates with equal probabilities.

    `p` [size, float64] are the inclusion probabilities, p.sum() == count. `phase` says where the
    draws stand. They take nothing from torch's generators but the first phase, so that dropout
    masks do not depend on them; activation checkpointing may draw anew for its second pass, whose
    columns and indices belong together.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.p = torch.full((size,), count / size, dtype=torch.float64)
        self.phase = torch.rand((), dtype=torch.float64)
        if dist.is_available() and dist.is_initialized():
            # Where processes have the same seed, their draws complete each other.
            self.phase += dist.get_rank() / dist.get_world_size()

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The coordinates that are kept, on `device`; see `ops.sampling.draw`.

        Returns indices [count, int64] in ascending order and their probabilities [count, float32].
        """
        self.to(device)
        index, p = draw(self.p, self.phase, self.count)
        return index, p

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        """Learns from the unscaled gradient norms [count] of a draw and its probabilities."""

    def to(self, device: torch.device) -> None:
        """Moves the state to `device`, where it is not there already."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.device != device:
                setattr(self, name, value.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """All that later draws depend on, but for the generator."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes back what `state_dict` gave; raises ValueError for another sampler's state."""
        own = self.state_dict()
        if own.keys() != state.keys() or any(own[k].shape != state[k].shape for k in own):
            raise ValueError(f"not the state of a {type(self).__name__} of size {self.size}")
        for name, value in state.items():
            own[name].copy_(value)


class Bandit(Sampler):
    """The bandit of Sheared Backpropagation, Alg. 2, with normalised gradients.

    The paper's loss is -|g_d|^2 / p_d^2 + G^2 / p_min^2 for a drawn d and 0 otherwise. Here norms
    are divided by G, a running mean of |g_d| / p_d: the value that it has for every d at the
    optimum p ~ |g|. The shift, which only keeps the paper's loss from being negative, becomes 1,
    the loss's own mean at that optimum: as published it is so large that a draw alone, whatever
    its gradient, would drive a probability down. The exponent is bounded by 1, and the step is
    relative to the mean probability, so `alpha` needs no tuning to sizes.
    """

    def __init__(self, size: int, count: int, alpha: float = 0.2, floor: float = 0.2) -> None:
        """`floor` is p_min as a share of the mean probability count / size."""
        super().__init__(size, count)
        self.alpha, self.p_min = alpha, floor * count / size
        self.scale = torch.zeros((), dtype=torch.float64)

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        p = p.double()
        level = norms.double() / p
        seen = level.mean()
        # An overflowed fp16 step or an all-zero gradient must not enter the running mean.
        usable = seen.isfinite() & (seen > 0)
        fresh = torch.where(self.scale > 0, torch.lerp(seen, self.scale, DECAY), seen)
        self.scale.copy_(torch.where(usable, fresh, self.scale))
        loss = 1 - (level / self.scale).square()
        step = (-self.alpha * loss * (self.count / self.size) / p).clamp(-1, 1)
        log_w = self.p.log()
        log_w[index] += torch.where(usable, step, 0.0)
        self.p.copy_(project(log_w, self.count, self.p_min))


class Proportional(Sampler):
    """p proportional to a running mean of each coordinate's gradient norm, capped.

    This is the optimum that Alg. 2 approaches: it minimises sum |g_d|^2 / p_d, the variance term
    of Sheared Backpropagation, Theorem 1.
    """

    def __init__(self, size: int, count: int, floor: float = 0.2) -> None:
        """`floor` is the least probability as a share of the mean one, count / size."""
        super().__init__(size, count)
        self.p_min = floor * count / size
        self.norms = torch.full((size,), torch.nan, dtype=torch.float64)

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        norms, old = norms.double(), self.norms[index]
        fresh = torch.where(old.isnan(), norms, torch.lerp(norms, old, DECAY))
        self.norms[index] = torch.where(norms.isfinite(), fresh, old)
        # Coordinates not seen yet count as average ones.
        known = torch.where(self.norms.isnan(), self.norms.nanmean(), self.norms)
        self.p.copy_(project(known.log(), self.count, self.p_min))


class Blocks:
    """JointSpar: the weight tensors, or residual branches, that get a gradient in this step.

    A fixed share of them is drawn before each training forward pass of the model, by a bandit on
    their gradient norms (Sheared Backpropagation, Sec. 4), or what `branches.Member` puts in their
    place. The draw decides what is launched, so it lives on the host; norms are fetched from the
    device once per step, before the next draw.
    With torch.distributed initialised they are averaged first, so that all processes draw the same;
    DistributedDataParallel then needs find_unused_parameters=True.
    A draw depends on seed, step and what was learned before it, all of it in `state_dict` but the
    seed, so a resumed run repeats it.
    """

    def __init__(self, size: int, budget: float, unbiased: bool = False, seed: int = 0) -> None:
        """`size` is the number of blocks; `budget` the share of them drawn."""
        self.sampler = Bandit(size, max(1, round(budget * size)))
        self.unbiased, self.seed, self.step = unbiased, seed, 0
        self.drawn: dict[int, float] = {}  # block -> its probability
        self.seen: dict[int, Tensor] = {}  # block -> gradient norm in the last step
        self.sizes: dict[int, int] = {}  # block -> elements it last kept, or bytes of a branch
        self.inside: int | None = None  # the branch that is running
        self.handle: RemovableHandle | None = None

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
