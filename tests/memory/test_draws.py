"""The draw of a joint budget that a trace counts."""

import pytest
import torch
from torch import nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.memory.draws import Held, hold_largest, joint_draws
from razorctl.memory.saved import KeptStorage
from razorctl.sampling.joint import Blocks


def test_weights_count_the_elements_that_they_pack_anew():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 4) for _ in "ab")

        def forward(self, x):
            return self.parts[0](x) + self.parts[1](x)  # which finds what the first has packed

    model = nn.Sequential(nn.Linear(2, 8), Two())
    sparsify(model, Recipe("backrazor", joint_budget=0.3))
    x = torch.randn(5, 2)

    def kept(place):
        model(x)
        return [KeptStorage(0, 1000, (place(),))]  # of no branch

    hold_largest(model, kept)
    (held,) = joint_draws(model)
    assert held.sizes == [10, 40, 0]
    assert held.drawn == {1: 1.0}
    model(x)
    assert held.drawn == {1: 1.0}


@pytest.mark.parametrize(("budget", "drawn"), [(0.5, {0, 2, 3}), (0.8, {0, 1, 2, 3, 4})])
def test_the_largest_of_each_kind_are_drawn(budget, drawn):
    """Two of the four blocks of a and one of the two of b, or as many more as the share allows."""
    held = Held.hold(Blocks(6, budget, kinds="aaabab"))
    held.sizes = [9, 7, 8, 2, 6, 1]
    held.hold_largest()
    assert set(held.drawn) == drawn


def test_every_part_with_a_draw_of_its_own_is_held():
    parts = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in "ab"]
    for part in parts:
        sparsify(part, Recipe("prebackrazor-", 0.5, joint_budget=0.5))
    layer, tanh = 8 * (10 * 4 + 8), 10 * 16 * 4
    model = nn.Sequential(*parts)
    assert saved_bytes(model, torch.randn(10, 8)) == 2 * (layer + tanh)
    assert [draw.step for draw in joint_draws(model)] == [0, 0]
