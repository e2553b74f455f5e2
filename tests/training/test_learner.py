"""Steps that must not be taken, and those that loss scaling skips."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from razorctl.config.job import Job
from razorctl.errors import DivergedError
from razorctl.optimizer import build_optimizer
from razorctl.step import ByLogits, refuse_infinite, train_step

JOB = Job("m", "d", steps=2, precision="fp32", learning_rate=0.1, weight_decay=0.0)


def take(net: nn.Module, scale: float | None, grow: float = 1.0) -> torch.amp.GradScaler:
    """A step of `net` on random rows, the gradient times `grow`; None is no loss scaling."""
    job = replace(JOB, precision="fp32")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    net.weight.register_hook(lambda grad: grad * grow)
    train_step(
        net,
        ByLogits(lambda net, x: net(x), job),
        [(torch.randn(5, 4), torch.randint(3, (5,)))],
        build_optimizer(net, job),
        job,
        scaler,
        check=partial(refuse_infinite, scaled=scaler.is_enabled()),
    )
    return scaler


@pytest.mark.parametrize(
    ("value", "grow", "scale", "what"),
    [
        (torch.nan, 1.0, None, "the loss is nan"),
        (torch.nan, 1.0, 1024.0, "the loss is nan"),
        (0.0, torch.inf, None, "the norm of the gradient is"),
    ],
    ids=["loss", "scaled loss", "gradient"],
)
def test_a_step_that_is_not_finite_changes_nothing(value, grow, scale, what):
    net = nn.Linear(4, 3)
    with torch.no_grad():
        net.bias[0] += value
    before = net.weight.clone()
    with pytest.raises(DivergedError, match=what):
        take(net, scale, grow)
    assert torch.equal(net.weight, before)


def test_an_overflow_under_loss_scaling_is_normal():
    net = nn.Linear(4, 3)
    before = net.weight.clone()
    scaler = take(net, 1024.0, torch.inf)
    assert torch.equal(net.weight, before)
    assert scaler.get_scale() == 512
    take(nn.Linear(4, 3), 1024.0)
