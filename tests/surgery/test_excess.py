"""A byte budget that a sparsified model exceeds is told in its first training pass."""

import copy
import logging
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import razorctl
from razorctl import Recipe
from razorctl.surgery.sparsify import tell_excess


class Mixed(nn.Module):
    """An activation that is unknown, and so kept in full, beside known layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Softplus(), nn.Linear(64, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 4)
        self.passes = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.passes += 1
        for part in self.body:
            x = x + scale * part(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "razorctl.surgery"):
        yield caplog


def told(said: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.message for r in said.records if "stores" in r.message]
    said.clear()
    return messages


def text() -> Tensor:
    return torch.randn(2, 32, 64)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_training_pass_tells_the_share(
    said: pytest.LogCaptureFixture, bf16: bool
) -> None:
    model = Mixed()
    razorctl.sparsify(model, Recipe(ratio=0.9))
    assert not told(said)
    model.eval()(text())
    with torch.no_grad():
        model.train()(text())
    assert not told(said)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(text(), scale=0.5).sum().backward()
    (warning,) = told(said)
    assert warning.startswith("Mixed stores")
    assert "the 10 % that ratio 0.9 allows: 4 Softplus layers (" in warning
    assert model.passes == 4  # a trace changes nothing of the model
    assert tell_excess not in model._forward_pre_hooks.values()


def test_hooks_of_a_user_see_no_trace(said: pytest.LogCaptureFixture) -> None:
    model, seen, saved = Mixed(), list[type](), list[type]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(type(tensor))
        return tensor

    razorctl.sparsify(model, Recipe(ratio=0.9))
    model.head.register_forward_hook(lambda *call: seen.append(type(call[-1])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(text())
    assert seen == [Tensor]
    assert {*saved} <= {Tensor, nn.Parameter}
    assert len(told(said)) == 1


def test_it_is_told_once_and_not_without_need(said: pytest.LogCaptureFixture) -> None:
    model = Mixed()
    razorctl.sparsify(model, Recipe(ratio=0.9))
    razorctl.saved_bytes(model, text())
    assert len(told(said)) == 1
    model(text())
    razorctl.restore(model)
    within = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    for way, own in (("razor", within), ("razor", Reads()), ("backrazor", model)):
        razorctl.sparsify(own, Recipe(way, 0.5))
        own(text())
        razorctl.restore(own)
        assert not own._forward_pre_hooks
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = copy.deepcopy(model)
        razorctl.sparsify(fake, Recipe(ratio=0.9))
        fake(mode.from_tensor(text()))
    assert not told(said)


class Reads(Mixed):
    """A model that reads values is not traced, since that would need a real copy."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x * float(x.sum().item() > 0), scale=scale)


def test_a_model_that_has_not_run_is_copied_pickled_and_compiled(
    said: pytest.LogCaptureFixture,
) -> None:
    model = Mixed()
    razorctl.sparsify(model, Recipe(ratio=0.9))
    for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own(text())
        assert len(told(said)) == 1
    compiled = torch.compile(model, backend="eager")
    compiled(text()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
