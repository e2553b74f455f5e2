"""Razor norms against the oracle: the norm's own gradient with x_hat as the rule restores it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from tests.cases import CASES
from tests.layers.test_every_layer import TOLERANCE, assert_close, run

NORMS = [name for name in CASES if " norm" in f" {name}" and not CASES[name].attention]
RULE_NAMES = ["topk", "columns-norm", "columns-bandit", "topk, centered", "half"]


def oracle(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of input and parameters in double precision, through autograd.

    y = x_hat w + b is linear in x_hat, and x_hat's own gradient (I - 1 1^T / D - x_hat x_hat^T / D)
    / std is that of a norm at the point x_hat / std; so both are taken at the restored x_hat.
    """
    columns = layer.columns(layer)
    rows = x.double().reshape(-1, columns)
    centered = rows - rows.mean(1, keepdim=True) if layer.centers else rows
    eps = layer.epsilon(x)
    std = (centered.square().mean(1, keepdim=True) + eps).sqrt()
    stand_in = centered / std
    torch.manual_seed(7)
    stand_in = layer.rules.wide.pack(stand_in.to(x.dtype)).values().double()
    g = dy.double().reshape(-1, columns)
    weight = None if layer.weight is None else layer.weight.double().reshape(-1)
    if "Gemma" in type(layer).__name__:
        weight = 1 + weight
    gw = g if weight is None else g * weight
    if layer.centers:
        gw = gw - gw.mean(1, keepdim=True)
        along = (gw + (g if weight is None else g * weight).mean(1, keepdim=True)) * stand_in
    else:
        along = gw * stand_in
    dx = (gw - stand_in * along.mean(1, keepdim=True)) / std
    grads = [dx.view(x.shape)]
    if weight is not None:
        grads.append((g * stand_in).sum(0).view(layer.weight.shape))
    if getattr(layer, "bias", None) is not None:
        grads.append(g.sum(0).view(layer.bias.shape))
    return grads


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_gradients_equal_the_oracle(case, rule, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(rule, device=device)
        x = 2 * torch.randn(shape, device=device) + 1
        first = copy.deepcopy(layer)
        y, *got = run(layer, x)
        cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
        want = oracle(first, x, cotangent)
        assert_close(got, [t.to(x.dtype) for t in want], TOLERANCE[None])


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_low_precision_input(case, precision):
    tensors = []
    for rule in ("dense", "topk"):
        tensors.clear()
        with (
            torch.autocast("cpu", precision),
            torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t),
        ):
            CASES[case].layer(rule)(torch.randn(CASES[case].shapes[0], requires_grad=True))
        # Stock keeps single precision, in which it runs.
        assert (precision in {t.dtype for t in tensors}) == (rule != "dense")
    assert all(t.numel() < 165 for t in tensors if t.dtype == torch.float32)


@pytest.mark.parametrize(
    ("row", "weight", "warned"), [(1e-5, 1.0, True), (1e-5, 1e-3, False), (0.1, 1.0, False)]
)
def test_rows_below_eps_that_have_most_of_the_gradient_are_named_once(row, weight, warned, caplog):
    norms = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64))
    sparsify(norms, Recipe("razor", 0.5))
    x = torch.randn(32, 64)
    x[0] *= row
    for _ in range(2):
        y = norms(x)
        (weight * y[0].sin().sum() + (1 - weight) * y[1:].sin().sum()).backward()
    assert [record.args[0] for record in caplog.records] == warned * ["0 (LayerNorm)"]
