import math

import pytest
import torch

from razorctl.ops import sampling as op
from razorctl.ops.triton import sampling


@pytest.fixture(autouse=True)
def in_the_interpreter(interpreted, monkeypatch):
    """In blocks of 256 entries."""
    interpreted(sampling)
    monkeypatch.setitem(sampling.OPTIONS, "BLOCK", 256)


def weights(size: int, spread: float) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size)) * spread


@pytest.mark.parametrize("spread", [0.0, 1.0, 3e3])
@pytest.mark.parametrize(("size", "total"), [(1, 1), (7, 3), (300, 60)])
def test_projects_as_the_reference(size, total, spread):
    log_w = weights(size, spread)
    for p_min in (1e-3 * total / size, 0.3 * total / size):
        p = sampling.project(log_w, total, p_min)
        assert p.dtype == torch.float64
        assert p.sum().item() == pytest.approx(total, rel=1e-8)
        assert p.min() >= p_min * (1 - 1e-12)
        assert p.max() <= 1
        want = op.projected(log_w, total, p_min)
        torch.testing.assert_close(p, want, rtol=1e-7, atol=1e-9)


def test_projects_what_is_not_finite():
    log_w = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1.0, -2.0, 3e4])
    torch.testing.assert_close(sampling.project(log_w, 3, 0.05), op.projected(log_w, 3, 0.05))


def test_projects_to_the_bounds_of_the_feasible_set():
    log_w = weights(6, 1.0)
    assert torch.equal(sampling.project(log_w, 6, 0.3), torch.ones(6, dtype=torch.float64))
    half = torch.full((6,), 0.5, dtype=torch.float64)
    assert torch.allclose(sampling.project(log_w, 3, 0.5), half)


def test_takes_what_is_feasible_and_fits():
    takes = sampling.takes_project
    assert takes(torch.zeros(4), 2, 0.1)
    assert not takes(torch.zeros(4), 5, 0.1)
    assert not takes(torch.zeros(4), 1, 0.5)
    p, phase = torch.ones(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    assert sampling.takes_draw(p, phase, 2)
    assert not sampling.takes_draw(p.float(), phase, 2)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 7), (30, 6), (300, 77), (1000, 3)])
def test_draws_as_the_reference(size, count):
    p = op.projected(weights(size, 2.0), count, 0.1 * count / size)
    ours, theirs = (torch.tensor(0.25, dtype=torch.float64) for _ in range(2))
    for _ in range(5):
        index, drawn = sampling.draw(p, ours, count)
        assert torch.equal(index, op.systematic(p, count, theirs.add_(op.GOLDEN).frac_()))
        assert torch.equal(drawn, p[index].float())
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (49, 49), (768, 77)])
def test_draws_of_equal_chances_fill_every_place(size, count, u):
    p = torch.full((size,), count / size, dtype=torch.float64)
    phase = torch.tensor((u - op.GOLDEN) % 1, dtype=torch.float64)
    index, drawn = sampling.draw(p, phase, count)
    assert math.isclose(phase.item(), u, abs_tol=1e-12) or math.isclose(phase.item(), u + 1)
    assert len(index.unique()) == count
    assert 0 <= index.min() <= index.max() < size
    assert (drawn == count / size).all()
