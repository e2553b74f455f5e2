"""The coordinates that get a gradient: inclusion probabilities, draws and their updates.

JointSpar and the bandit of Sheared Backpropagation (CVPR 2024, Alg. 1 and 2). Coordinates are
the columns of an activation, or whole parameter blocks (`joint.Blocks`). Two changes to the paper:

- Bernoulli draws become systematic sampling with the same inclusion probabilities. The number
  drawn, and with it every stored size, then never varies.
- The paper's feasible set lacks p <= 1, which a probability needs; it is added.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from razorctl.ops.sampling import draw, project

DECAY = 0.9  # of the running means of gradient norms


class Sampler:
    """Draws `count` of `size` coordinates with equal probabilities.

    `p` [size, float64] are the inclusion probabilities, p.sum() == count. `phase` is the u of the
    last draw. Only the first phase comes from torch's generators, so dropout masks do not depend on
    draws. Activation checkpointing may draw again in its second forward pass; its columns and
    indices then come from that draw.
    """

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.p = torch.full((size,), count / size, dtype=torch.float64)
        self.phase = torch.rand((), dtype=torch.float64)
        if dist.is_available() and dist.is_initialized():
            # Processes with the same seed draw at equal distances, and so draw different columns.
            self.phase += dist.get_rank() / dist.get_world_size()

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The drawn coordinates, on `device`; see `ops.sampling.draw`.

        Returns indices [count, int64] in ascending order and their probabilities [count, float32].
        """
        self.to(device)
        index, p = draw(self.p, self.phase, self.count)
        return index, p

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        """Learns from the unscaled gradient norms [count] of a draw and its probabilities."""

    def to(self, device: torch.device) -> None:
        """Moves the state to `device`, if it is elsewhere."""
        if self.p.device == device:  # torch 2.11 cannot compile the loop below
            return
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors that later draws depend on."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a `state_dict`; raises ValueError for the state of another sampler."""
        tensors = self.state_dict()
        if tensors.keys() != state.keys() or any(
            tensor.shape != state[name].shape for name, tensor in tensors.items()
        ):
            raise ValueError(f"not the state of a {type(self).__name__} of size {self.size}")
        for name, value in state.items():
            tensors[name].copy_(value)


class Bandit(Sampler):
    """The bandit of Sheared Backpropagation, Alg. 2, with normalized gradients.

    The paper's loss is -|g_d|^2 / p_d^2 + G^2 / p_min^2 for a drawn d and 0 otherwise. Here norms
    are divided by G, a running mean of |g_d| / p_d; at the optimum p ~ |g|, every d has this value.
    The second term only makes the paper's loss positive. As published it is so large that every
    draw lowers the probability of the drawn coordinate, whatever the gradient. Here it is 1, so the
    mean loss is 0 at that optimum. The exponent is bounded by 1 and relative to the mean
    probability, so `alpha` need not be tuned to `size` and `count`.
    """

    def __init__(self, size: int, count: int, alpha: float = 0.2, floor: float = 0.2) -> None:
        """floor: p_min as a share of the mean probability count / size."""
        super().__init__(size, count)
        self.alpha, self.p_min = alpha, floor * count / size
        self.scale = torch.zeros((), dtype=torch.float64)

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        p = p.double()
        level = norms.double() / p
        mean = level.mean()
        # An overflowed fp16 step or an all-zero gradient must not enter the running mean.
        usable = mean.isfinite() & (mean > 0)
        fresh = torch.where(self.scale > 0, torch.lerp(mean, self.scale, DECAY), mean)
        self.scale.copy_(torch.where(usable, fresh, self.scale))
        loss = 1 - (level / self.scale).square()
        change = (-self.alpha * loss * (self.count / self.size) / p).clamp(-1, 1)
        log_w = self.p.log()
        log_w[index] += torch.where(usable, change, 0.0)
        self.p.copy_(self.projected(log_w))

    def projected(self, log_w: Tensor) -> Tensor:
        """The probabilities for these weights; see `ops.sampling.project`."""
        return project(log_w, self.count, self.p_min)


class Proportional(Sampler):
    """p proportional to a running mean of each coordinate's gradient norm, capped.

    This is the optimum that Alg. 2 approaches: it minimizes sum |g_d|^2 / p_d, the variance term
    of Sheared Backpropagation, Theorem 1.
    """

    def __init__(self, size: int, count: int, floor: float = 0.2) -> None:
        """floor: the smallest probability as a share of the mean probability count / size."""
        super().__init__(size, count)
        self.p_min = floor * count / size
        self.norms = torch.full((size,), torch.nan, dtype=torch.float64)

    def update(self, index: Tensor, p: Tensor, norms: Tensor) -> None:
        norms, old = norms.double(), self.norms[index]
        fresh = torch.where(old.isnan(), norms, torch.lerp(norms, old, DECAY))
        self.norms[index] = torch.where(norms.isfinite(), fresh, old)
        # Coordinates that have not been drawn yet count as average.
        norms = torch.where(self.norms.isnan(), self.norms.nanmean(), self.norms)
        self.p.copy_(project(norms.log(), self.count, self.p_min))
