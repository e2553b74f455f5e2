"""Stock classifiers that read a small view of an activation."""

import copy

import pytest
import torch
from torch import nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.layers import own_forward
from razorctl.surgery import views
from tests.surgery.test_residuals import every_model, step


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
