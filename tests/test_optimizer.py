"""The learning rate and weight decay that each parameter gets."""

from dataclasses import replace

import pytest
import timm
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from razorctl import optimizer
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.optimizer import TracedAdamW, build_optimizer, layer_numbers, parameter_groups
from razorctl.optimizer.slices import Slices, sizes_of
from razorctl.surgery.sparsify import sparsify
from tests.models import bert, vit

JOB = Job("m", "d", batch_size=1, steps=1, learning_rate=0.5, weight_decay=0.1)


def settings(model, **changes):
    """Parameter name -> its learning rate and weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, replace(JOB, **changes))
    by_name = {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(by_name) == sum(len(group["params"]) for group in groups)  # each once
    return by_name


def test_biases_norms_and_positions_do_not_decay():
    groups = settings(vit())
    assert groups["blocks.0.mlp.fc1.weight"] == groups["patch_embed.proj.weight"] == (0.5, 0.1)
    for name in ("blocks.0.mlp.fc1.bias", "norm.weight", "cls_token", "pos_embed"):
        assert groups[name] == (0.5, 0)
    assert groups.keys() == dict(vit().named_parameters()).keys()


@pytest.mark.parametrize(
    ("model", "first", "block", "last"),
    [
        (vit, "patch_embed.proj.weight", "blocks.{}.attn.qkv.weight", "head.weight"),
        (
            bert,
            "bert.embeddings.word_embeddings.weight",
            "bert.encoder.layer.{}.attention.self.query.weight",
            "classifier.weight",
        ),
    ],
)
def test_layer_decay_goes_down_from_the_last_layer(model, first, block, last):
    groups = settings(model(), layer_decay=0.5)
    rates = [groups[name][0] for name in (last, block.format(1), block.format(0), first)]
    assert rates == [0.5, 0.25, 0.125, 0.0625]


def test_frozen_parameters_are_left_out():
    model = vit()
    sparsify(model, Recipe("lora"))
    groups = settings(model, layer_decay=0.5)
    assert "patch_embed.proj.weight" not in groups
    assert groups["blocks.1.attn.qkv.lora_A.default.weight"] == (0.25, 0.1)


def test_numbered_parts_are_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    names = {name: number for name, number in layer_numbers(model).items() if "weight" in name}
    assert [*names.values()] == sorted(names.values())
    assert len({*layer_numbers(timm.create_model("resnet10t", num_classes=3)).values()}) > 2


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_at_the_groups_rates(name):
    torch.manual_seed(0)
    model = vit()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    job = replace(JOB, optimizer=name, layer_decay=0.5, weight_decay=0.0)
    updates = build_optimizer(model, job)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    updates.step()
    change = {n: (before[n] - p).mean().item() for n, p in model.named_parameters()}
    assert change["head.weight"] == pytest.approx(0.5, rel=1e-4)
    assert change["patch_embed.proj.weight"] == pytest.approx(0.0625, rel=1e-4)


def test_8_bits_need_torchao(monkeypatch):
    monkeypatch.setattr(optimizer, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs torchao"):
        optimizer.check_optimizer(Job("m", "d", optimizer="adamw8bit"))
    optimizer.check_optimizer(Job("m", "d", optimizer="adamw"))


def bytes_of(state):
    parts = [getattr(state, name) for name in ("codes", "scale", "qmap")] if is8(state) else [state]
    return sum(part.nbytes for part in parts)


def is8(state):
    return hasattr(state, "qmap")


def test_the_trace_of_8_bits_has_the_state_of_torchao():
    adam = pytest.importorskip("torchao.optim").AdamW8bit
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3), nn.Linear(3, 1365))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job = replace(JOB, optimizer="adamw8bit")
    traced, real = TracedAdamW(model, job), build_optimizer(model, job)
    assert type(real) is adam
    traced.step()
    for parameter in model.parameters():  # its first step would compile for half a minute
        own = [real._new_buffer(parameter, signed) for signed in (True, False)]
        theirs = [state for name, state in traced.state[parameter].items() if name != "step"]
        assert sum(map(bytes_of, own)) == sum(map(bytes_of, theirs))
        assert is8(own[0]) == (len(theirs) > 2)


@pytest.mark.parametrize(
    ("device", "strategy", "fused"),
    [("cuda", "ddp", True), ("cuda", "fsdp", False), ("cpu", "ddp", False)],
)
def test_sgd_is_fused_on_a_card_and_skips_what_has_no_gradient(device, strategy, fused):
    with FakeTensorMode():
        model = nn.Linear(3, 2, device=device)
        job = Job("m", "d", optimizer="sgd", strategy=strategy).resolved({}, 1000)
        updates = build_optimizer(model, job)
    assert bool(updates.defaults["fused"]) is fused
    assert len(updates.state) == (2 if fused else 0)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (512, [512]),
        (513, [513]),
        (1024, [512, 512]),
        (1280, [512, 512, 256]),
        (2048, [512] * 4),
        (2304, [512, 512, 512, 512, 256]),
        (1281, [1281]),
    ],
)
def test_slices_are_of_whole_blocks(count, sizes):
    assert sizes_of(count, 512) == sizes


def of_torchao(groups):
    return pytest.importorskip("torchao.optim").AdamW8bit(groups, lr=0.1)


OPTIMIZERS = {
    "adamw8bit": of_torchao,
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.1, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=0.1),
}


def stepped(build, most, dtype, steps, state=None):
    """Parameters and optimizer after steps; most: elements of a slice, None for whole updates."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n, 256).to(dtype)) for n in (100, 16, 1)]
    optimizer = build([{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if most:
        Slices(optimizer, most)
    if state is not None:
        with torch.no_grad():
            for parameter, value in zip(parameters, state[0], strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(state[1])
    with torch.compiler.set_stance("force_eager"):  # torchao's step would compile for a minute
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            for number, parameter in enumerate(parameters):
                skipped = (step, number) == (2, 1)
                gradient = torch.randn(parameter.shape, generator=draw).to(dtype)
                parameter.grad = None if skipped else gradient
            optimizer.step()
            schedule.step()
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_slices_are_those_of_whole_weights_to_the_bit(name, dtype):
    whole, _ = stepped(OPTIMIZERS[name], None, dtype, range(4))
    sliced, optimizer = stepped(OPTIMIZERS[name], 32 * 256, dtype, range(4))
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert len(optimizer.state) == 4 + 2
    assert all(part.grad is None for part in optimizer.state if part not in set(sliced))


def test_the_state_of_slices_is_loaded_to_the_bit():
    build = OPTIMIZERS["adamw8bit"]
    parameters, optimizer = stepped(build, 32 * 256, torch.float32, range(1))
    state = [p.detach().clone() for p in parameters], optimizer.state_dict()
    expected, _ = stepped(build, 32 * 256, torch.float32, range(2))
    resumed, again = stepped(build, 32 * 256, torch.float32, range(0), state)
    assert [len(group["params"]) for group in again.param_groups] == [1, 2]
    with torch.compiler.set_stance("force_eager"):
        for group in again.param_groups:
            group["lr"].fill_(0.05)
        draw = torch.Generator().manual_seed(1)
        for parameter in resumed:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        again.step()
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))


def test_a_step_that_was_interrupted_leaves_whole_weights_for_the_next():
    parameters, optimizer = stepped(OPTIMIZERS["sgd"], 32 * 256, torch.float32, range(1))

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert all(
        p is q for p, q in zip(optimizer.param_groups[1]["params"], parameters[1:], strict=True)
    )


def test_an_update_takes_the_bytes_that_its_trace_takes():
    from torch.profiler import ProfilerActivity, profile

    adam = pytest.importorskip("torchao.optim").AdamW8bit
    parameter = nn.Parameter(torch.randn(1024, 256))
    updates = adam([parameter])
    for _ in range(2):
        parameter.grad = torch.randn_like(parameter)
        updates.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        updates.step()
    most = now = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert 7 < most / parameter.numel() < 8.1  # both moments in single precision
