"""Averages of weights, against ones made by hand, and what is evaluated and exported of them."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from razorctl.training.averaging import Average
from tests.training.runs import JOB, begin


def test_an_average_is_that_made_by_hand():
    """Of weights and of running statistics; whole numbers are copied."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net.register_buffer("places", torch.arange(5))
    average, want = Average(net, decay=0.25), None
    for done in range(4):
        net(torch.randn(6, 3))
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(torch.randn_like(weight))
        average.update(net)
        now = copy.deepcopy(net.state_dict())
        decay = min(0.25, (1 + done) / (10 + done)) if done else 0.0
        want = want or now
        for name, value in now.items():
            mixed = decay * want[name] + (1 - decay) * value
            want[name] = mixed if value.is_floating_point() else value
    torch.testing.assert_close(dict(average.model.state_dict()), dict(want))
    assert average.state_dict() == {"updates": 4}


def test_the_average_is_evaluated_and_exported(tmp_path, shallow):
    job = replace(JOB, ema=0.5, evaluate_every=2)
    run = begin(tmp_path / "run", job)
    want: dict[int, dict[str, torch.Tensor]] = {}
    for step in run:
        now = copy.deepcopy(run.model.state_dict())
        decay = step.step / (9 + step.step)
        before = want.get(step.step - 1, now)
        want[step.step] = {k: decay * before[k] + (1 - decay) * v for k, v in now.items()}
    best = want[run.result()["best_step"]]
    torch.testing.assert_close(load_file(tmp_path / "run/model.safetensors"), best)
    run.model.load_state_dict(best)  # stock now, as it is exported
    assert run.evaluate() == pytest.approx(run.result()["best_metrics"], rel=1e-5)
