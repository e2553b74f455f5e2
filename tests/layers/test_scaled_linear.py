"""Layer scale after a linear layer, which keeps nothing: its gradients are stock's in every use.

The copy of the input is exact, so that stock's are to be met.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from timm.layers import LayerScale
from timm.models import beit, cait, eva
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.layers.base import LayerSettings
from razorctl.layers.kinds.layer_scale import LayerScale as RazorScale
from razorctl.layers.kinds.layer_scale import ScaledBlock as RazorBlock
from razorctl.layers.kinds.layer_scale import ScaledLinearFunction
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.shared_copies.memo import Memo
from razorctl.rules.dense import Dense
from razorctl.rules.packed import Packed, PackedValues
from tests.cases import both

ROWS, IN, OUT = 12, 9, 7
Use = Callable[[nn.Linear, nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Shareable(PackedValues):
    """Exact values that other layers take, as they take codes."""

    shareable: ClassVar[bool] = True


class Exact(Dense):
    def pack(self, x: Tensor) -> Packed:
        return Shareable(x.shape, x.dtype, x)


def rows() -> Tensor:
    return torch.randn(3, ROWS // 3, IN, generator=torch.manual_seed(0))


def stock() -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(1)
    linear, scale = nn.Linear(IN, OUT), LayerScale(OUT)
    nn.init.normal_(scale.gamma)
    with torch.no_grad():
        scale.gamma[2] = 0.0  # where no gradient comes through
    return linear, scale


def razor(**settings: bool) -> tuple[nn.Linear, nn.Module]:
    linear, scale = stock()
    shared = LayerSettings(Memo(), **settings)
    Linear.attach(linear, both(Exact()), shared)
    RazorScale.attach(scale, both(Exact()), shared)
    return linear, scale


def gradients(layers: tuple[nn.Linear, nn.Module], use: Use, times: int = 1) -> list[Tensor]:
    """Gradients of the input, the weight, the bias and gamma."""
    linear, scale = layers
    a = rows().requires_grad_()
    y = use(linear, scale, a)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).sin().to(y.dtype)
    for left in reversed(range(times)):
        y.backward(dy, retain_graph=left > 0)
    return [a.grad, linear.weight.grad, linear.bias.grad, scale.gamma.grad]


HELD = list[Tensor]()


def alone(linear, scale, a):
    return scale(linear(a))


def held(x: Tensor) -> Tensor:
    HELD.append(x)
    return x


def hooked(factor: int, before: bool = False, holds: bool = False, removed: bool = False) -> Use:
    """A hook on the output of the linear layer, before or after the scale reads it."""

    def use(linear, scale, a):
        x = linear(a)
        x = held(x) if holds else x
        y = None if before else scale(x)
        handle = x.register_hook(lambda g: factor * g)
        if removed:
            handle.remove()
        return scale(x) if before else y

    return use


def checkpointed(linear, scale, a):
    return checkpoint(lambda a: scale(linear(a)), a, use_reentrant=False)


def elsewhere(linear, scale, a):
    x = linear(a)
    return scale(x) - 2 * x


def viewed(linear, scale, a):
    x = linear(a)
    held(x[0])
    return scale(x)


def scaled_twice(linear, scale, a):
    x = linear(a)
    return scale(x) + scale(x)


USES: dict[str, Use] = {
    "alone": alone,
    "read elsewhere": elsewhere,
    "held": lambda linear, scale, a: scale(held(linear(a))),
    "viewed": viewed,
    "hooked before": hooked(3, before=True),
    "hooked after": hooked(3, holds=True),
    "hooked after and dropped": hooked(3),
    "unhooked": hooked(5, removed=True),
    "scaled twice": scaled_twice,
    "checkpointed": checkpointed,
    "checkpointed first": lambda linear, scale, a: scale(
        checkpoint(linear, a, use_reentrant=False)
    ),
    "changed in place": lambda linear, scale, a: scale(linear(a).add_(1.0)),
    "called twice": lambda linear, scale, a: scale(linear(a)) + scale(linear(a.sin())),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_are_those_of_stock(use, times):
    for mine, theirs in zip(
        gradients(razor(), use, times), gradients(stock(), use, times), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    HELD.clear()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_precisions(int8, autocast, monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    layers = razor(int8_weight_grad=int8, int8_input_grad=int8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mine = gradients(layers, alone)
    for one, other in zip(mine, gradients(stock(), alone), strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.9995


@pytest.mark.parametrize("asked", ["a", "x", "gamma", "weight"])
def test_gradients_of_some(asked):
    got = []
    for linear, scale in (stock(), razor()):
        a = rows().requires_grad_()
        x = linear(a)
        y = scale(x)
        places = {"a": a, "x": x, "gamma": scale.gamma, "weight": linear.weight}
        if asked != "x":
            del x
        wanted = places.pop(asked)
        places.clear()
        got += torch.autograd.grad(y.sin().sum(), wanted)
    torch.testing.assert_close(*got, rtol=1e-5, atol=1e-5)


def kept(layers: tuple[nn.Linear, nn.Module]) -> tuple[int, Tensor]:
    """How many bytes are kept beside parameters, and the output."""
    linear, scale = layers
    inside = {p.data_ptr() for p in (*linear.parameters(), *scale.parameters())}
    sizes = dict[int, int]()

    def note(t: Tensor) -> Tensor:
        if t.data_ptr() not in inside:
            sizes[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(note, lambda t: t):
        y = alone(linear, scale, rows())
    return sum(sizes.values()), y


def test_nothing_is_kept_but_the_copy_of_the_linear_layer():
    linear, scale = razor()
    both_layers, y = kept((linear, scale))
    assert both_layers == kept((linear, nn.Identity()))[0]
    assert torch.equal(y, alone(*stock(), rows()))
    assert isinstance(y.grad_fn, ScaledLinearFunction._backward_cls)


@pytest.mark.parametrize("frozen", ["weight", "gamma"])
def test_a_frozen_parameter(frozen):
    layers = [stock(), razor()]
    grads = []
    for linear, scale in layers:
        owner = linear if frozen == "weight" else scale
        getattr(owner, frozen).requires_grad_(False)
        a = rows().requires_grad_()
        alone(linear, scale, a).sum().backward()
        grads.append([a.grad, linear.weight.grad, linear.bias.grad, scale.gamma.grad])
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.9999


@pytest.mark.parametrize("kind", [beit.Block, cait.LayerScaleBlock, eva.EvaBlock])
def test_blocks_that_scale_their_branches(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(24, 3, init_values=0.5, drop_path=0.3), nn.Linear(24, 4))
    x = torch.randn(4, 5, 24)

    def grads() -> Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    model.train()
    stock = grads()
    sparsify(model, Recipe("int8"))
    kept = saved_bytes(model, x)
    assert torch.cosine_similarity(grads(), stock, dim=0) > 0.9995
    stock_kept = saved_bytes(restored(model, RazorBlock), x)
    # Two outputs in single precision, that a stock block keeps.
    assert stock_kept - kept >= 2 * 4 * x.numel()


def restored(model: nn.Module, kind: type) -> nn.Module:
    """The model with modules of a razor class made stock again."""
    for module in model.modules():
        if isinstance(module, kind):
            module.detach()
    return model
