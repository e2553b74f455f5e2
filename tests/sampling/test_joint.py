"""The draw of blocks, by itself: what a model has to do with it is in tests/surgery."""

import copy
import math
from functools import partial

import pytest
import torch

from razorctl.sampling.joint import Blocks
from razorctl.sampling.reduction import mean_over_processes

mean = partial(mean_over_processes, device=torch.device("cpu"))


def advance(blocks: Blocks, steps: int, norm=lambda block: block + 1.0) -> list[set[int]]:
    """The draws of some steps, in each of which every drawn block has a gradient."""
    drawn = []
    for _ in range(steps):
        blocks.advance(mean)
        drawn.append(set(blocks.drawn))
        for block, p in blocks.drawn.items():
            blocks.observe(block, p, torch.full((4,), norm(block)))
    return drawn


@pytest.mark.parametrize(("budget", "count"), [(0.5, 5), (0.01, 1), (1.0, 10)])
def test_a_fixed_number_is_drawn_per_step(budget, count):
    drawn = advance(Blocks(10, budget), 20)
    assert all(len(d) == count for d in drawn)
    if count < 10:
        assert len({frozenset(d) for d in drawn}) > 1


def test_state_is_all_that_later_draws_depend_on():
    blocks, resumed = Blocks(10, 0.3, seed=5), Blocks(10, 0.3, seed=5)
    advance(blocks, 30)
    state = copy.deepcopy(blocks.state_dict())
    resumed.load_state_dict(state)
    assert advance(blocks, 30) == advance(resumed, 30)
    assert torch.equal(blocks.sampler.p, resumed.sampler.p)
    with pytest.raises(ValueError, match="not the state"):
        Blocks(9, 0.3).load_state_dict(state)


def test_any_two_are_drawn_together():
    drawn = advance(Blocks(10, 0.5), 300, norm=lambda block: 0.0)
    pairs = [sum({a, b} <= d for d in drawn) / 300 for a in range(10) for b in range(a)]
    assert len(pairs) == 45
    assert min(pairs) > 0.1  # 2 / 9 on average
    assert max(pairs) < 0.35


@pytest.mark.parametrize(("kinds", "least", "most"), [("ab" * 5, 2, 3), ("aaaaaaaabb", 1, 1)])
def test_each_kind_has_its_share(kinds, least, most):
    """The share of b is 2.5 blocks, and 1, though those of a have all of the gradient."""
    blocks = Blocks(10, 0.5, kinds=kinds)
    drawn = advance(blocks, 100, norm=lambda block: 10.0 if kinds[block] == "a" else 0.1)
    assert all(len(d) == 5 for d in drawn)
    assert {sum(kinds[block] == "b" for block in d) for d in drawn} == {least, most}
    assert set.union(*drawn) == set(range(10))


def test_draws_ignore_the_default_generator():
    first = advance(Blocks(10, 0.3, seed=5), 10)
    torch.manual_seed(99)
    assert first == advance(Blocks(10, 0.3, seed=5), 10)
    assert first != advance(Blocks(10, 0.3, seed=6), 10)


def test_blocks_of_large_gradient_are_drawn_more_often():
    blocks = Blocks(10, 0.3)
    advance(blocks, 200, norm=lambda block: 10.0 if block < 2 else 1.0)
    assert blocks.sampler.p[:2].min() > 2 * blocks.sampler.p[2:].max()


def test_scaling():
    plain, scaled = Blocks(10, 0.5), Blocks(10, 0.5, unbiased=True)
    grad = torch.ones(3)
    assert torch.equal(plain.observe(0, 0.25, grad), grad)
    assert torch.equal(scaled.observe(0, 0.25, grad), 4 * grad)
    assert scaled.norms[0].item() == pytest.approx(math.sqrt(3))


def test_norms_of_one_process_are_its_own(device):
    norms = {block: torch.tensor(float(block), device=device) for block in (7, 0, 3)}
    index, means = mean_over_processes(norms, 9, device)
    assert index.tolist() == means.tolist() == [0, 3, 7]
    assert not len(mean_over_processes({}, 9, device)[0])
