"""Which coordinates get a gradient: inclusion probabilities, draws and their updates.

JointSpar and the bandit of Sheared Backpropagation (CVPR 2024, Alg. 1 and 2). Coordinates are
the columns of an activation, or whole parameter blocks (`Blocks`). Two changes to the paper:

- Bernoulli draws become systematic sampling with the same inclusion probabilities, so that the
  number drawn, and with it every saved size, never varies.
- The paper's feasible set lacks p <= 1, which a probability needs; it is added.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

DECAY = 0.9  # of the running means of gradient norms
WIDEST = 1e4  # span of log weights that `project` tells apart


def systematic(p: Tensor, count: int, u: Tensor) -> Tensor:
    """`count` indices in ascending order, d among them with probability p[d].

    `p` [size] holds inclusion probabilities that sum to `count`; `u` is one uniform number in
    [0, 1). Coordinate d is drawn when one of u, u + 1, ..., u + count - 1 falls in its stretch of
    the running sum of p, which holds at most one of them because p[d] <= 1.
    """
    ends = p.cumsum(0)
    ends = ends * (count / ends[-1])  # rounding must not cost the last coordinate its draw
    points = u + torch.arange(count, dtype=p.dtype, device=p.device)
    return torch.searchsorted(ends, points, right=True).clamp_(max=len(p) - 1)


def project(log_w: Tensor, total: float, p_min: float) -> Tensor:
    """The KL projection of weights exp(log_w) [size] on {sum p = total, p_min <= p <= 1}.

    The minimiser is p = clip(c w, p_min, 1); log c is found by bisection, 32 ways at a time,
    without a host synchronisation and without leaving log space. Raises ValueError unless
    size * p_min <= total <= size.
    """
    if not len(log_w) * p_min <= total <= len(log_w):
        raise ValueError(f"no p in [{p_min}, 1] of size {len(log_w)} sums to {total}")
    log_w = log_w.double().nan_to_num(posinf=WIDEST, neginf=-WIDEST)
    log_w = log_w.clamp(min=log_w.max() - WIDEST)

    def p(log_c: Tensor) -> Tensor:
        return (log_w + log_c).clamp(max=0).exp().clamp(min=p_min)

    low, high = math.log(p_min) - log_w.max(), -log_w.min()
    sections = torch.linspace(0, 1, 33, dtype=log_w.dtype, device=log_w.device)
    for _ in range(8):
        grid = torch.lerp(low, high, sections)
        above = p(grid[:, None]).sum(1) >= total
        above[-1] = True  # by construction of `high`; rounding may deny it
        first = above.to(torch.uint8).argmax(keepdim=True)
        low, high = grid[(first - 1).clamp(min=0)], grid[first]
    return p(high)


class Sampler:
    """Draws `count` of `size` coordinates with equal probabilities.

    `p` [size, float64] are the inclusion probabilities, p.sum() == count.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.p = torch.full((size,), count / size, dtype=torch.float64)

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The draw that one uniform number in [0, 1) makes, on the device of `u`.

        Returns indices [count, int64] in ascending order and their probabilities [count, float32].
        """
        self.to(u.device)
        index = systematic(self.p, self.count, u)
        return index, self.p[index].float()

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        """Learns from the unscaled gradient norms [count] of a draw and its probabilities."""

    def to(self, device: torch.device) -> None:
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
    """JointSpar over parameters: the weight tensors that get a gradient in this step.

    A fixed share of them is drawn before each training forward pass of the model, by a bandit on
    their gradient norms (Sheared Backpropagation, Sec. 4). The draw decides what is launched, so
    it lives on the host; norms are fetched from the device once per step, before the next draw.
    Draws depend on (seed, step) alone, so a resumed run repeats them.
    """

    def __init__(
        self, widths: Sequence[int], budget: float, unbiased: bool = False, seed: int = 0
    ) -> None:
        """`widths` are the columns of each block's input; `budget` the share of blocks drawn."""
        self.widths = widths
        self.sampler = Bandit(len(widths), max(1, round(budget * len(widths))))
        self.unbiased, self.seed, self.step = unbiased, seed, 0
        self.drawn: dict[int, float] = {}  # block -> its probability
        self.seen: dict[int, tuple[float, Tensor]] = {}  # block -> probability, gradient norm
        self.handle: RemovableHandle | None = None

    def attach(self, model: nn.Module) -> None:
        """Draws before each training forward pass of `model`, until `detach`."""
        self.handle = model.register_forward_pre_hook(self._before_forward)

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def hold_widest(self) -> None:
        """Draws the blocks of widest input, for good: the draw that saves most, for tracing."""
        self.detach()
        widest = sorted(range(len(self.widths)), key=lambda i: self.widths[i], reverse=True)
        self.drawn = dict.fromkeys(widest[: self.sampler.count], 1.0)

    def observe(self, block: int, p: float, grad: Tensor) -> Tensor:
        """Learns from the gradient of a block drawn with probability p; returns it scaled."""
        self.seen[block] = p, torch.linalg.vector_norm(grad.float())
        return grad / p if self.unbiased else grad

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if self.seen:
            probabilities, norms = zip(*self.seen.values(), strict=True)
            index = torch.tensor(list(self.seen))
            p = torch.tensor(probabilities)
            self.sampler.update(index, p, torch.stack(norms).cpu())
            self.seen = {}
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        index, p = self.sampler.draw(torch.rand((), generator=generator))
        self.drawn = dict(zip(index.tolist(), p.tolist(), strict=True))
        self.step += 1
