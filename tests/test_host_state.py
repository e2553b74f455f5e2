"""Optimizer state on the host takes the steps of AdamW, from gradients that leave the card."""

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from razorctl.config.job import Job
from razorctl.errors import DivergedError, UsageError
from razorctl.optimizer import build_optimizer, cast_weights, host_state, traceable_optimizer
from razorctl.optimizer.host_state import HostAdamW
from razorctl.step import ByLogits, refuse_infinite, train_step

JOB = Job("m", "d", batch_size=8, steps=1, learning_rate=0.01, weight_decay=0.1, clip_norm=0.5)
JOB = replace(JOB, optimizer="adamw", precision="fp32")
HOST = replace(JOB, optimizer_state="host")


def net(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 7))
    model[0].bias.requires_grad_(False)
    return model.to(dtype)


def batches(count, parts=1):
    """`count` batches of as many micro-batches."""
    draw = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(4, 5, generator=draw), torch.randint(7, (4,), generator=draw))
            for _ in range(parts)
        ]
        for _ in range(count)
    ]


def call(model, inputs):
    return model(inputs.to(model[0].weight.dtype)).float()


def steps(model, job, optimizer, data):
    """Takes a step for each batch; returns losses and norms."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    job = replace(job, accumulate=len(data[0]))
    return [
        tuple(map(float, train_step(model, ByLogits(call, job), each, optimizer, job, scaler)))
        for each in data
    ]


@pytest.mark.parametrize("parts", [1, 3])
def test_steps_are_those_of_adamw_to_the_bit(parts):
    models = net(), net()
    results = []
    for model, job in zip(models, (JOB, HOST), strict=True):
        optimizer = build_optimizer(model, job)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        made = []
        for each in batches(4, parts):
            made += steps(model, job, optimizer, [each])
            schedule.step()
        results.append(made)
    assert results[0] == results[1]
    assert results[0][0][1] > JOB.clip_norm  # the clip does something
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])
    assert all(p.grad is None for p in models[1].parameters())


def test_weights_in_bf16_have_masters_that_keep_small_changes():
    model = net()
    nn.init.constant_(model[2].weight, 0.5)
    job = replace(HOST, weights="bf16", precision="bf16", learning_rate=1e-4, weight_decay=0.0)
    cast_weights(model, job)
    before = model[2].weight.detach().clone()
    optimizer = build_optimizer(model, job)
    assert isinstance(optimizer, HostAdamW)
    data = batches(1) * 40
    steps(model, job, optimizer, data[:1])
    assert torch.equal(before, model[2].weight)  # too small for bf16
    steps(model, job, optimizer, data)
    assert not torch.equal(before, model[2].weight)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    weights = [p for p in model.parameters() if p.requires_grad]
    for master, weight in zip(masters, weights, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), weight)


def test_a_loaded_state_goes_on_to_the_bit():
    job = replace(HOST, weights="bf16", precision="bf16")
    model = net(torch.bfloat16)
    optimizer = build_optimizer(model, job)
    data = batches(6)
    steps(model, job, optimizer, data[:3])
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = steps(model, job, optimizer, data[3:])
    again = net(torch.bfloat16)
    resumed = build_optimizer(again, job)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert steps(again, job, resumed, data[3:]) == expected
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_gradient_that_is_not_finite_changes_nothing(parts):
    model = net()
    optimizer = build_optimizer(model, HOST)
    good, bad = batches(2, parts)
    steps(model, HOST, optimizer, [good])
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    bad[-1][0].fill_(math.nan)
    job = replace(HOST, accumulate=parts)

    def check(loss, norm):
        refuse_infinite(torch.zeros(()), norm, scaled=False)

    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(DivergedError):
        train_step(model, ByLogits(call, job), bad, optimizer, job, scaler, check=check)
    optimizer.zero_grad()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), state, rtol=0, atol=0)
    other = net()
    twin = build_optimizer(other, HOST)
    steps(other, HOST, twin, [good])
    (more,) = batches(1, parts)
    assert steps(model, HOST, optimizer, [more]) == steps(other, HOST, twin, [more])


def test_gradients_land_in_the_order_in_which_they_left(monkeypatch):
    """As on a card, where copies end later."""
    model = net()
    optimizer = build_optimizer(model, HOST)
    ended = []

    class Event:
        def synchronize(self):
            ended.append(self)

    class Stream:
        device = "cuda"

        def record_event(self):
            return Event()

    monkeypatch.setattr(host_state.HostAdamW, "_beside", lambda _: host_state.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None, raising=False)
    monkeypatch.setattr(host_state, "AHEAD", 400)
    optimizer._stream = Stream()
    (parts,) = batches(1, 2)
    loss = ByLogits(call, HOST)
    loss(model, *parts[0], "mean").backward()
    sizes = [flight.gradient.nbytes for flight in optimizer._flights]
    assert 0 < sum(sizes) <= 400
    assert ended
    optimizer.zero_grad()
    twin = net()
    assert steps(model, HOST, optimizer, [parts]) == steps(
        twin, JOB, build_optimizer(twin, JOB), [parts]
    )


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(monkeypatch, caplog):
    empty = torch.empty_like

    def refuse(tensor, *, pin_memory=False, device=None):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return empty(torch.zeros(3), device=device)

    class Weight:
        is_cuda = True

    monkeypatch.setattr(torch, "empty_like", refuse)
    monkeypatch.setattr(host_state, "_pins", True)
    with caplog.at_level(logging.WARNING, "razorctl"):
        assert host_state._pinned(Weight()).shape == host_state._pinned(Weight()).shape == (3,)
    (record,) = caplog.records
    assert record.message.endswith("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"processes": 2}, "several processes"),
        ({"precision": "fp16"}, "fp16"),
        ({"optimizer_in_backward": True}, "in the backward pass"),
        ({"cuda_graphs": True}, "CUDA graphs"),
        ({"optimizer": "sgd"}, "sgd"),
        ({"optimizer": "adamw8bit"}, "adamw8bit"),
    ],
)
def test_what_state_on_the_host_does_not_go_with(settings, word):
    with pytest.raises(UsageError, match=word):
        replace(HOST, **settings)


def test_the_trace_has_no_state_on_the_card_and_frees_gradients_late(monkeypatch):
    monkeypatch.setattr(host_state, "AHEAD", 400)
    model = net()
    optimizer = traceable_optimizer(model, HOST)
    loss = ByLogits(call, HOST)
    (parts,) = batches(1)
    loss(model, *parts[0], "mean").backward()
    assert all(p.grad is None for p in model.parameters())
    assert 0 < sum(g.nbytes for g in optimizer._held) <= 400
    optimizer.step()
    assert not optimizer._held
    assert not optimizer.state
