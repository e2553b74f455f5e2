"""Ops and training steps as a card runs them: interpreted kernels, through the dispatcher.

The dispatcher refuses results that share memory; calling a kernel's function does not.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from razorctl import Recipe, sparsify
from razorctl.layers.kinds.linear import Linear
from razorctl.methods import EXACT, METHODS
from razorctl.ops import kernels
from razorctl.ops.triton import topk
from tests.models import vit
from tests.ops.calls import CALLS, Size, op_of
from tests.ops.triton.test_kernels import KERNELS
from tests.references import opcheck

pytestmark = pytest.mark.usefixtures("card")
SIZE = Size(40, 128, 16)


@pytest.mark.parametrize("name", KERNELS)
def test_an_op_passes_the_checks_of_torch(name):
    calls = [*CALLS[name](Size(20, 64, 8))]
    for args in calls[:: max(1, len(calls) - 1)]:  # which differ most; tests of kernels have each
        opcheck(op_of(name), args, test_utils=("test_schema", "test_faketensor"))
    assert name in kernels.outcomes(torch.device("cuda"))


@pytest.mark.parametrize("name", KERNELS)
def test_programs_may_run_in_any_order(name, programs, monkeypatch):
    monkeypatch.setattr(topk, "BLOCK", 256)
    monkeypatch.setattr(topk, "_stretch", lambda n: 512)
    calls = [*CALLS[name](Size(40, 64, 16))]
    for args in calls[:: max(1, len(calls) - 1)]:
        results = []
        for order in (None, "reverse"):  # of any two programs each is once the first
            programs(order)
            results.append(op_of(name)(*copy.deepcopy(args)))
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


class ConvNet(nn.Module):
    """Convolutions, norms over batches and over channels, pooling, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 1), nn.GroupNorm(4, 64), nn.GELU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}


def _bert() -> nn.Module:
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {**SIZES, "intermediate_size": 128, "max_position_embeddings": 16, "num_labels": 5}
    return BertForSequenceClassification(BertConfig(**sizes, **dropouts))


def _llama() -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 128, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, pad_token_id=0))


def _ids() -> Tensor:
    return torch.randint(50, (2, 9))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "vit": (
        lambda: vit(img_size=32, patch_size=16, embed_dim=64, depth=1, num_heads=2),
        lambda: torch.randn(3, 3, 32, 32),
    ),
    "bert": (_bert, _ids),
    "llama": (_llama, _ids),
    "cnn": (ConvNet, lambda: torch.randn(2, 3, 21, 21)),
}
RECIPES = {
    "razor, half": Recipe(ratio=0.5),
    "int8 forward": Recipe(ratio=0.9, int8_forward=True),
    "prebackrazor++": Recipe("prebackrazor++", 0.9),
}
# Together they call each op with all types of arguments that any method has for these models.
PAIRS = [("vit", name) for name in RECIPES]
PAIRS += [(kind, "razor, half") for kind in ("bert", "llama", "cnn")]


@pytest.fixture(scope="module")
def any_size() -> Iterator[None]:
    """GEMMs run in int8 whatever their size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "SMALLEST", 0)
        yield


def gradient(stock: nn.Module, recipe: Recipe | None, x: Tensor) -> Tensor:
    """The gradient of all parameters, in a step under bfloat16 autocast."""
    model = copy.deepcopy(stock).train()
    torch.manual_seed(3)
    if recipe is not None:
        sparsify(model, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    logits = (y if isinstance(y, Tensor) else y.logits).float()
    F.cross_entropy(logits.flatten(0, -2), torch.arange(logits[..., 0].numel()) % 5).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_training_step_has_the_gradient_of_the_bodies(kind, name, card):
    compare(kind, RECIPES[name], card, close=name == "razor, half")


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("kind", ["vit", "llama"])
def test_what_is_made_again_has_the_gradient_of_the_bodies(kind, card, monkeypatch):
    method = METHODS["int8"]
    rules = {kind: f"{rule}-again" for kind, rule in method.rules.items() if kind not in EXACT}
    monkeypatch.setitem(METHODS, "int8", replace(method, rules=rules | EXACT))
    compare(kind, Recipe("int8"), card, close=True)


def compare(kind: str, recipe: Recipe, card: Callable[[str], None], close: bool) -> None:
    """The gradients of kernels and of bodies; if `close`, also that of the stock model."""
    build, batch = MODELS[kind]
    stock, x = build(), batch()
    got = gradient(stock, recipe, x)
    card("bodies")
    try:
        want = gradient(stock, recipe, x)
    finally:
        card("kernels")
    assert ((got - want).norm() / want.norm()).item() < 1e-2
    if close:
        full = gradient(stock, None, x)
        assert F.cosine_similarity(got, full, 0).item() > 0.98


@pytest.mark.usefixtures("any_size")
def test_a_nan_in_the_gradient_reaches_that_of_the_input_of_a_frozen_layer():
    layer = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64)).train()
    sparsify(layer, Recipe(ratio=0.5))
    layer.requires_grad_(False)
    x, cotangent = torch.randn(40, 128, requires_grad=True), torch.ones(40, 64)
    cotangent[3, 7] = torch.nan
    layer(x).backward(cotangent)
    assert x.grad.isnan().any(1).nonzero().tolist() == [[3]]


def test_a_nan_of_a_weight_is_the_scale_of_its_column():
    weight = torch.randn(300, 128)  # several programs share a column
    weight[200, 7] = torch.nan
    args = SIZE.codes(40, 300), torch.rand(40, 1), torch.rand(300), SIZE.copy(), None, weight
    for scale in (op_of("int8_columns")(weight)[1], op_of("linear_operands")(*args)[6]):
        assert scale.isnan().nonzero().tolist() == [[7]]
