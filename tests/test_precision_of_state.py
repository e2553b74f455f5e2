"""How far updates are from AdamW in double precision, over many steps of noisy gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from razorctl.config.job import Job
from razorctl.optimizer import build_optimizer, cast_weights

JOB = Job("m", "d", batch_size=1, steps=1, optimizer="adamw", precision="bf16")
JOB = replace(JOB, learning_rate=1e-3, weight_decay=0.01)
HOST = {"optimizer_state": "host"}
EIGHT, NARROW = {"optimizer": "adamw8bit"}, {"weights": "bf16"}
SHAPE = 16, 256


def test_weights_of_batch_norms_keep_the_dtype_of_their_statistics():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    cast_weights(model, replace(JOB, weights="bf16"))
    assert model[0].weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.rand(2, 3, 4, 4)).isfinite().all()


@cache
def moved(job, spread, steps):
    """The change of a weight in bf16's numbers; job: None for double precision.

    spread: the standard deviation of the elements' gradients, in powers of 10.
    """
    torch.manual_seed(0)
    model = nn.Linear(*reversed(SHAPE), bias=False)
    model.weight.data = model.weight.data.bfloat16().float()
    if job is None:
        optimizer = torch.optim.AdamW(model.double().parameters(), 1e-3, weight_decay=0.01)
    else:
        cast_weights(model, job)
        optimizer = build_optimizer(model, job)
    before = model.weight.detach().double().clone()
    draw = torch.Generator().manual_seed(1)
    mean = torch.randn(SHAPE, generator=draw)
    size = 10 ** (spread * torch.randn(SHAPE, generator=draw))  # of the gradient of each element
    with torch.compiler.set_stance("force_eager"):  # torchao's step would compile for a minute
        for _ in range(steps):
            gradient = (size * (mean + 3 * torch.randn(SHAPE, generator=draw))).bfloat16()
            (model.weight * gradient.to(model.weight.dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().double() - before


@pytest.mark.parametrize(
    ("changes", "spread", "most", "steps"),
    [
        ({}, 0.3, 1e-4, 1000),
        (HOST, 0.3, 1e-4, 1000),
        (HOST | NARROW, 0.3, 3e-3, 1000),  # the rounding of the weight itself
        (EIGHT, 0.3, 0.07, 300),  # whose steps take long
        (EIGHT, 0.5, 0.17, 300),
        (EIGHT, 0.75, 0.35, 300),
        (NARROW, 0.3, 0.07, 1000),  # after 300 steps, rounding to the nearest is as close
        (EIGHT | NARROW, 0.3, 0.13, 1000),
    ],
    ids=str,
)
def test_updates_are_as_close_to_double_precision_as_their_state_allows(
    changes, spread, most, steps
):
    if changes.keys() & {"optimizer", "weights"} and changes.get("optimizer_state") != "host":
        pytest.importorskip("torchao")
    exact = moved(None, spread, steps)
    error = moved(replace(JOB, **changes), spread, steps) - exact
    scale = exact.square().mean().sqrt()
    assert error.square().mean().sqrt() < most * scale
    chance = error.std() / error.numel() ** 0.5
    assert error.mean().abs() < max(5 * chance, 1e-4 * scale)  # rounding has no direction
