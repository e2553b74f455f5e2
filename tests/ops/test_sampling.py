import pytest
import torch

from razorctl.ops.sampling import draw, project, systematic


def test_projection_is_feasible_for_a_thousand_cases():
    generator = torch.Generator().manual_seed(1)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    for case in range(1000):
        size = round(uniform(1, 300))
        total = round(uniform(1, size))
        p_min = uniform(0.001, 1) * total / size
        spread = 10 ** uniform(-3, 3.5)  # up to exp(+-10,000)
        log_w = torch.randn(size, generator=generator) * spread
        if case % 10 == 0:
            log_w[0] = -torch.inf
        if case % 15 == 0:
            log_w[-1] = torch.inf
        p = project(log_w, total, p_min)
        assert p.sum().item() == pytest.approx(total, rel=1e-8)
        assert p.min() >= p_min * (1 - 1e-12)
        assert p.max() <= 1


def test_projection_minimizes_the_divergence():
    w = torch.tensor([0.05, 0.4, 1.5, 3.0, 0.2], dtype=torch.float64)
    p = project(w.log(), 2, 0.1)
    # Karush-Kuhn-Tucker: one c for all that touch no bound, below it at 1, above it at p_min.
    inner = (p > 0.1 + 1e-9) & (p < 1 - 1e-9)
    c = (p / w)[inner]
    assert inner.any()
    assert torch.allclose(c, c[0].expand_as(c))
    assert (w[p >= 1 - 1e-9] * c[0] >= 1 - 1e-9).all()
    assert (w[p <= 0.1 + 1e-9] * c[0] <= 0.1 + 1e-9).all()


@pytest.mark.parametrize(("total", "p_min"), [(5, 0.1), (1, 0.5)])
def test_infeasible_projection_is_refused(total, p_min):
    with pytest.raises(ValueError, match="sums to"):
        project(torch.zeros(4), total, p_min)


def test_bounds_of_the_feasible_set():
    log_w = torch.randn(6)
    assert torch.equal(project(log_w, 6, 0.3), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(project(log_w, 3, 0.5), torch.full((6,), 0.5, dtype=torch.float64))


def test_systematic_draws_have_the_inclusion_probabilities():
    p = project(torch.randn(20), 6, 0.05)
    us = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    index = systematic(p, 6, us[:, None])
    assert index.shape == (20_000, 6)
    assert (index.diff() > 0).all()
    hits = index.flatten().bincount(minlength=20).double()
    assert torch.allclose(hits / len(us), p, atol=2e-4)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
def test_systematic_draws_never_leave_the_range(u):
    for size, count in ((1, 1), (7, 7), (1000, 3), (768, 77)):
        p = torch.full((size,), count / size, dtype=torch.float64)
        index = systematic(p, count, torch.tensor(u))
        assert len(index.unique()) == count
        assert index.min() >= 0
        assert index.max() < size


def test_draws_are_systematic_and_step_by_the_golden_ratio():
    p, phase = project(torch.randn(30), 6, 0.05), torch.tensor(0.25, dtype=torch.float64)
    state = torch.get_rng_state()
    for step in range(1, 10):
        index, drawn = draw(p, phase, 6)
        u = (0.25 + step * (5**0.5 - 1) / 2) % 1
        assert phase.item() == pytest.approx(u)
        assert torch.equal(index, systematic(p, 6, phase))
        assert torch.equal(drawn, p[index].float())
    assert torch.equal(torch.get_rng_state(), state)
