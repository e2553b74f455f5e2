"""Micro-batches of a step share the int8 copies of weights on a card; nothing stays after it."""

import pytest
import torch
from torch import nn

from razorctl import Recipe, sparsify
from razorctl.layers.kinds import linear
from razorctl.ops import kernels, weight_copies


@pytest.fixture
def copies(monkeypatch) -> list[torch.Tensor | None]:
    """The weights of all calls of `linear_operands`."""
    calls, whole = [], linear.linear_operands

    def recorded(*args):
        calls.append(args[-1])
        return whole(*args)

    monkeypatch.setattr(linear, "linear_operands", recorded)
    monkeypatch.setattr(linear.Linear, "SMALLEST", 0)
    return calls


def gradients(micro_batches: int, on_a_card: bool = True, changed: bool = False):
    """The gradients of two backward passes in `shared_by(micro_batches)`, and copies kept.

    Copies of weights make the gradients of inputs, which are the first ones.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).train()
    sparsify(net, Recipe("int8"))
    inputs = [torch.randn(32, 64, requires_grad=True) for _ in range(2)]
    with weight_copies.shared_by(micro_batches):
        for x in inputs:
            if on_a_card:
                with kernels.assumed(dot=True):
                    net(x).square().sum().backward()
            else:
                net(x).square().sum().backward()
            if changed:
                with torch.no_grad():
                    net[0].weight.mul_(2)
        count = 0 if weight_copies._copies is None else len(weight_copies._copies)
    return [t.grad for t in (*inputs, *net.parameters())], count


def test_a_weight_is_copied_once_a_step(copies):
    got, held = gradients(2)
    assert [weight is None for weight in copies] == [False, True]
    assert held == 1
    assert weight_copies._copies is None
    want, held = gradients(1)
    assert held == 0
    assert all(map(torch.equal, got, want))


def test_a_changed_weight_is_copied_again(copies):
    got, _ = gradients(2, changed=True)
    want, _ = gradients(1, changed=True)
    assert all(map(torch.equal, got, want))


def test_nothing_is_kept_on_a_cpu():
    assert gradients(2, on_a_card=False)[1] == 0
