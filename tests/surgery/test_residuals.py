"""Norms that add the gradients of their input, and classifiers that read a view of it."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.layers import own_forward
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.shared_copies.int8_gradients import Handover, Int8, Int8Gradient
from razorctl.ops import kernels
from razorctl.ops.int8 import int8_rows
from razorctl.surgery import residuals, views
from tests.models import vit


def hf_vit() -> ViTForImageClassification:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2}
    return ViTForImageClassification(
        ViTConfig(num_attention_heads=3, intermediate_size=48, hidden_dropout_prob=0.1, **sizes)
    )


MODELS = {"timm": lambda: vit(init_values=0.5, proj_drop_rate=0.1), "transformers": hf_vit}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The logits and the gradients of all parameters."""
    torch.manual_seed(0)
    model.zero_grad()
    y = model(x)
    logits = getattr(y, "logits", y)
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if own_forward.runs(module, residuals.Block)]


def detached(model: nn.Module) -> nn.Module:
    for module in blocks(model):
        own_forward.take(module)
    return model


@every_model
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_output_is_stock_and_the_gradient_as_without(build, dtype):
    model, x = build().train(), torch.randn(6, 3, 16, 16)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        want, _ = step(model, x)
        sparsify(model, Recipe("int8"))
        assert len(blocks(model)) == 2
        alone = detached(copy.deepcopy(model))
        logits, gradients = step(model, x)
        assert torch.equal(logits, want)
        assert torch.equal(step(alone, x)[0], want)
        tolerance = 1e-5 if dtype is None else 2e-2  # sums of other order, rounded once less
        for got, expected in zip(gradients, step(alone, x)[1], strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_handed_on_in_int8(dtype, monkeypatch):
    monkeypatch.setattr("razorctl.layers.kinds.linear.Linear.SMALLEST", 1)
    model, x = vit().train(), torch.randn(6, 3, 16, 16)
    sparsify(model, Recipe("razor", 0.5))
    names = {layer: name for name, layer in model.named_modules()}
    outputs = []

    def watch(layer, args, y):
        y.register_hook(lambda dy: outputs.append((names[layer], isinstance(dy, Int8Gradient))))

    for layer in names:
        if isinstance(layer, Linear):
            layer.register_forward_hook(watch)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        _, want = step(model, x)
        assert not any(int8 for _, int8 in outputs)
        outputs.clear()
        with kernels.assumed(dot=True):
            _, got = step(model, x)
    # Of every linear layer in a block.
    assert sorted(name for name, int8 in outputs if int8) == sorted(
        f"blocks.{i}.{layer}"
        for i in range(2)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    )
    for one, other in zip(got, want, strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999


def test_other_operations_find_values_in_place_of_an_int8_gradient():
    dy = torch.randn(2, 3, 8)
    grad = Int8Gradient(dy.shape, torch.float32, Int8(*int8_rows(dy.flatten(0, 1))))
    assert grad.shape == dy.shape
    for values in (grad + 0, grad.clone(), 2 * grad / 2, torch.stack([grad])[0]):
        assert type(values) is torch.Tensor
        torch.testing.assert_close(values, dy, rtol=0, atol=dy.abs().max().item() / 250)
    # In a hook that changes it.
    changed = Int8Gradient(dy.shape, torch.float32, grad.int8)
    changed.mul_(2).add_(1)
    assert changed.int8 is None
    torch.testing.assert_close(changed + 0, 2 * grad + 1)
    # Two layers that take y: autograd adds a gradient in int8 and another one.
    x = torch.zeros(2, 3, 8, requires_grad=True)
    y = x * 1
    (Give.apply(y, grad).sum() + y.sum()).backward()
    torch.testing.assert_close(x.grad, grad + 1)


class Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.grad = grad
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.grad, None


def test_a_gradient_that_was_replaced_is_not_taken():
    handover, dx, int8 = Handover(), torch.randn(3, 4), Int8(*int8_rows(torch.randn(3, 4)))
    handover.offer(dx, int8)
    assert handover.take(dx.clone()) is None
    handover.offer(dx, int8)
    dx.mul_(2)
    assert handover.take(dx) is None
    handover.offer(dx, int8)
    assert handover.take(dx) is int8
    assert handover.take(dx) is None


@pytest.mark.parametrize(
    "recipe", [Recipe("backrazor"), Recipe("full"), Recipe(joint_budget=0.5, joint="branches")]
)
def test_other_recipes_leave_blocks_alone(recipe):
    model = vit().train()
    sparsify(model, recipe)
    before = step(model, torch.ones(2, 3, 16, 16))[1]
    if recipe.joint_budget < 1:
        assert not blocks(model)
    else:
        after = step(detached(model), torch.ones(2, 3, 16, 16))[1]
        assert all(map(torch.equal, before, after))


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if own_forward.runs(module, views.ViewLinear)]


@every_model
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_classifier_keeps_the_token_that_it_reads(build, dtype):
    model, x = without_dropout(build()), torch.randn(6, 3, 16, 16)
    sparsify(model, Recipe(ratio=0.9))
    (classifier,) = layers(model)
    whole = copy.deepcopy(model)
    own_forward.take(*layers(whole))
    kept, before = (saved_bytes(m, x, autocast=dtype) for m in (model, whole))
    # Autocast copies what it casts: all norms but a fused one give single precision.
    norm, token = 6 * 17 * 24 * 4, 6 * 24 * 4
    assert before - kept == (norm - token if dtype is None else 0)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        (logits, gradients), (want, expected) = step(model, x), step(whole, x)
    assert torch.equal(logits, want)
    torch.testing.assert_close(gradients, expected)
    restore(model)
    assert not layers(model)
    assert "forward" not in vars(classifier)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def test_an_input_of_its_own_is_kept_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    sparsify(model, Recipe(ratio=0.5))
    (classifier,) = layers(model)
    assert classifier is model[2]
    x = torch.randn(4, 5, 8, requires_grad=True)
    for part, name in ((x, "View"), (x[:, :1], "ViewLinearFunctionBackward")):
        assert name in type(classifier(part).grad_fn).__name__
    with torch.no_grad():
        assert classifier(x[:, 0]).grad_fn is None
    torch.func.grad(lambda x: classifier(x[:, 0]).sum())(x.detach())
