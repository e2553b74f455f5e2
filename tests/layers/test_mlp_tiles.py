"""Gated MLPs in tiles of rows: the gradients of whole tensors, whoever reads them."""

from contextlib import nullcontext

import pytest
import torch
from timm.models.vision_transformer import vit_giant_patch14_dinov2
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.shared_copies import mlp_tiles
from razorctl.ops import kernels
from razorctl.optimizer import in_backward
from tests.models import llama

ROWS, MOST = 700, 2**13


def small_tiles(patch: pytest.MonkeyPatch, most: int = MOST) -> list[torch.Size]:
    """Lets small layers run in int8 and in tiles; returns the shapes that have."""
    run, shapes = mlp_tiles.Hidden.run, []
    patch.setattr(Linear, "SMALLEST", 1)
    patch.setattr(mlp_tiles, "MOST", most)
    noted = lambda it, *args: shapes.append(it.a.shape) or run(it, *args)  # noqa: E731
    patch.setattr(mlp_tiles.Hidden, "run", noted)
    return shapes


def decoder() -> tuple[nn.Module, Tensor]:
    """gate and up are two layers."""
    return llama(mlp_bias=True), torch.arange(ROWS).remainder(47).view(28, 25)


def vit() -> tuple[nn.Module, Tensor]:
    """gate and up are halves of a layer, and `down` is scaled."""
    sizes = {"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = vit_giant_patch14_dinov2(**sizes, init_values=0.5, global_pool="avg")
    return model, torch.linspace(-9, 9, 140 * 3 * 28 * 28).sin().view(140, 3, 28, 28)


def gradients(build, patch, most=MOST, dtype=None, prepare=None, sparse=True):
    """The gradients of all parameters, and the number of MLPs in tiles."""
    torch.manual_seed(0)
    model, x = build()
    model.train()
    with patch.context() as own:
        shapes = small_tiles(own, most)
        if sparse:
            sparsify(model, Recipe("razor", 0.97))
        extra = prepare(model) if prepare else None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            y = model(x if sparse or not x.is_floating_point() else x.double())
        loss = (y if isinstance(y, Tensor) else y.logits).float().sin().mean()
        (loss if extra is None else loss + extra()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, len(shapes)


@pytest.mark.parametrize("build", [decoder, vit])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("card", [False, True])
def test_gradients_are_those_of_whole_tensors(build, dtype, card, monkeypatch):
    with kernels.assumed(dot=True) if card else nullcontext():
        want, never = gradients(build, monkeypatch, 2**40, dtype)
        got, tiled = gradients(build, monkeypatch, MOST, dtype)
    assert (never, tiled) == (0, 2)
    for name, one in want.items():  # sums over rows may differ where int8 is handed on
        error = (got[name] - one).norm() / one.norm().clamp(min=1e-12)
        assert error <= (1e-6 if card else 0), name


def observed(model: nn.Module) -> None:
    """Hooks on a: of its gradient, and one that changes it in place."""
    for number, layer in enumerate(model.model.layers):
        change = [lambda dy: None, lambda dy: dy.mul_(2)][number]
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, args, change=change: args[0].register_hook(change) and None
        )


def read_twice(model: nn.Module):
    """Another loss that reads a."""
    read = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    return lambda: sum(a.float().square().mean() for a in read)


def frozen(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj.requires_grad_(False)


def updating(model: nn.Module) -> None:
    in_backward(torch.optim.SGD(model.parameters(), 1.0))


@pytest.mark.parametrize("prepare", [observed, read_twice, frozen, updating])
def test_every_reader_finds_the_gradient(prepare, monkeypatch):
    def run(most):
        models = []
        keep = lambda model: models.append(model) or prepare(model)  # noqa: E731
        grads, tiled = gradients(decoder, monkeypatch, most, torch.bfloat16, keep)
        return grads | {f"{n} now": p.detach() for n, p in models[0].named_parameters()}, tiled

    (want, _), (got, tiled) = run(2**40), run(MOST)
    assert tiled == 2
    assert want.keys() == got.keys()
    for name, one in want.items():  # what is accumulated is in bf16
        torch.testing.assert_close(got[name], one, rtol=2e-2, atol=1e-4 * one.abs().max().item())


@pytest.mark.parametrize("build", [decoder, vit])
def test_no_parameter_is_further_from_the_exact_gradient(build, monkeypatch):
    exact, _ = gradients(
        lambda: (lambda m, x: (m.double(), x))(*build()), monkeypatch, sparse=False
    )
    whole, tiles = (gradients(build, monkeypatch, most)[0] for most in (2**40, MOST))

    def worst(grads):
        return max(
            ((grads[n] - one).norm() / one.norm()).item()
            for n, one in exact.items()
            if one.norm() > 1e-9 and not n.endswith(("k_proj.bias", "k.bias"))
        )

    assert worst(tiles) <= 1.001 * worst(whole)
