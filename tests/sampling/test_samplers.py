import pytest
import torch

from razorctl.sampling.samplers import Bandit, Proportional, Sampler

SAMPLERS = [Sampler, Bandit, Proportional]


def draw(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    return sampler.draw(torch.device("cpu"))


@pytest.mark.parametrize("sampler", [Bandit, Proportional])
def test_learning_beats_uniform_on_stationary_norms(sampler):
    size = 600
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


@pytest.mark.parametrize("sampler", [Bandit, Proportional])
@pytest.mark.parametrize("norm", [0.0, torch.inf, torch.nan])
def test_degenerate_gradients_leave_a_feasible_p(sampler, norm):
    learner = sampler(40, 8)
    for step in range(20):
        index, p = draw(learner)
        norms = torch.rand(8)
        norms[step % 8 :] = norm
        learner.update(index, p, norms)
    assert learner.p.isfinite().all()
    assert not any(t.isinf().any() for t in learner.state_dict().values())
    assert learner.p.sum().item() == pytest.approx(8)
    for _ in range(300):
        index, p = draw(learner)
        learner.update(index, p, torch.rand(8) + 0.1)
        assert learner.p.sum().item() == pytest.approx(8)


def test_an_overflowed_step_is_not_learned():
    bandit = Bandit(8, 4)
    for _ in range(3):
        bandit.update(*draw(bandit), torch.rand(4) + 0.1)
    scale, p = bandit.scale.clone(), bandit.p.clone()
    bandit.update(*draw(bandit), torch.tensor([0.5, 0.5, torch.inf, 0.5]))
    assert torch.equal(bandit.scale, scale)
    torch.testing.assert_close(bandit.p, p)


def test_one_outlier_moves_the_running_means_by_a_tenth():
    bandit, proportional = Bandit(8, 8), Proportional(8, 8)
    for scale in (1.0, 1.0, 11.0):
        for learner in (bandit, proportional):
            learner.update(*draw(learner), torch.full((8,), scale))
    assert bandit.scale.item() == pytest.approx(2.0)
    assert proportional.norms.tolist() == pytest.approx([2.0] * 8)


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
