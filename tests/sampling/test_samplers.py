import copy
import math

import pytest
import torch
from torch import nn

from razorctl.sampling.joint import Blocks
from razorctl.sampling.samplers import Bandit, Proportional, Sampler

SAMPLERS = [Sampler, Bandit, Proportional]


def draw(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.draw(torch.device("cpu"))


@pytest.mark.parametrize("size", [128, 600])
@pytest.mark.parametrize("sampler", [Bandit, Proportional])
def test_learning_beats_uniform_on_stationary_norms(sampler, size):
    for seed in range(3):
        torch.manual_seed(seed)
        norms = torch.randn(size).exp()  # log-normal
        count = size // 10
        learner = sampler(size, count)
        for _ in range(300):
            index, p = draw(learner)
            noise = (1 + 0.3 * torch.randn(count)).abs()
            learner.update(index, p, norms[index] * noise)
        variance = (norms**2 / learner.p).sum()
        uniform = (norms**2).sum() * size / count
        optimum = norms.sum() ** 2 / count
        assert variance < 0.6 * uniform
        assert variance < 1.5 * optimum


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e30, torch.inf, torch.nan])
def test_degenerate_gradients_leave_a_feasible_p(sampler, norm):
    learner = sampler(40, 8)
    for step in range(20):
        index, p = draw(learner)
        norms = torch.rand(8)
        norms[step % 8 :] = norm
        learner.update(index, p, norms)
    assert learner.p.isfinite().all()
    assert learner.p.sum().item() == pytest.approx(8)
    for _ in range(300):
        index, p = draw(learner)
        learner.update(index, p, torch.rand(8) + 0.1)
        assert learner.p.sum().item() == pytest.approx(8)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_state_is_all_that_later_draws_depend_on(sampler):
    def advance(learner: Sampler, steps: int, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        drawn = []
        for _ in range(steps):
            index, p = draw(learner)
            learner.update(index, p, torch.rand(5))
            drawn.append(index)
        return drawn

    first = sampler(30, 5)
    advance(first, 20, seed=1)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    second = sampler(30, 5)
    second.load_state_dict(state)
    for a, b in zip(advance(first, 20, seed=2), advance(second, 20, seed=2), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="not the state"):
        sampler(31, 5).load_state_dict(state)


def test_sampler_follows_the_device(device):
    sampler = Bandit(16, 4)
    index, p = sampler.draw(device)
    assert index.device.type == p.device.type == sampler.p.device.type == device.type
    sampler.update(index, p, torch.rand(4, device=device))


class TestBlocks:
    def model(self, budget: float, **options) -> tuple[nn.Module, Blocks]:
        model = nn.Linear(1, 1)
        blocks = Blocks(10, budget, **options)
        blocks.attach(model)
        return model, blocks

    def draws(self, model: nn.Module, blocks: Blocks, steps: int) -> list[set[int]]:
        drawn = []
        for _ in range(steps):
            model(torch.zeros(1))
            drawn.append(set(blocks.drawn))
        return drawn

    @pytest.mark.parametrize(("budget", "count"), [(0.5, 5), (0.01, 1), (1.0, 10)])
    def test_a_fixed_number_is_drawn_per_step(self, budget, count):
        model, blocks = self.model(budget)
        drawn = self.draws(model, blocks, 20)
        assert all(len(d) == count for d in drawn)
        if count < 10:
            assert len({frozenset(d) for d in drawn}) > 1

    def test_state_is_all_that_later_draws_depend_on(self):
        def advance(model: nn.Module, blocks: Blocks, steps: int) -> list[set[int]]:
            drawn = []
            for _ in range(steps):
                drawn += self.draws(model, blocks, 1)
                for block, p in blocks.drawn.items():
                    blocks.observe(block, p, torch.full((4,), block + 1.0))
            return drawn

        model, blocks = self.model(0.3, seed=5)
        advance(model, blocks, 30)
        state = copy.deepcopy(blocks.state_dict())
        resumed_model, resumed = self.model(0.3, seed=5)
        resumed.load_state_dict(state)
        assert advance(model, blocks, 30) == advance(resumed_model, resumed, 30)
        assert torch.equal(blocks.sampler.p, resumed.sampler.p)
        with pytest.raises(ValueError, match="not the state"):
            Blocks(9, 0.3).load_state_dict(state)

    def test_any_two_are_drawn_together(self):
        drawn = self.draws(*self.model(0.5), 300)
        pairs = [sum({a, b} <= d for d in drawn) / 300 for a in range(10) for b in range(a)]
        assert len(pairs) == 45
        assert min(pairs) > 0.1  # 2 / 9 on average
        assert max(pairs) < 0.35

    def test_draws_ignore_the_default_generator(self):
        first = self.draws(*self.model(0.3, seed=5), 10)
        torch.manual_seed(99)
        assert first == self.draws(*self.model(0.3, seed=5), 10)
        assert first != self.draws(*self.model(0.3, seed=6), 10)

    def test_evaluation_draws_nothing(self):
        model, blocks = self.model(0.3)
        with torch.no_grad():
            model(torch.zeros(1))
        model.eval()(torch.zeros(1))
        assert not blocks.drawn
        assert blocks.step == 0

    def test_blocks_of_large_gradient_are_drawn_more_often(self):
        model, blocks = self.model(0.3)
        for _ in range(200):
            model(torch.zeros(1))
            for block, p in blocks.drawn.items():
                blocks.observe(block, p, torch.full((4,), 10.0 if block < 2 else 1.0))
        assert blocks.sampler.p[:2].min() > 2 * blocks.sampler.p[2:].max()

    def test_scaling(self):
        _, plain = self.model(0.5)
        _, scaled = self.model(0.5, unbiased=True)
        grad = torch.ones(3)
        assert torch.equal(plain.observe(0, 0.25, grad), grad)
        assert torch.equal(scaled.observe(0, 0.25, grad), 4 * grad)
        assert scaled.seen[0].item() == pytest.approx(math.sqrt(3))
