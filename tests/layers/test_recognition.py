"""Norms and gated MLPs of classes that nobody has listed, recognized by their values."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.moshi.modeling_moshi import MoshiRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

from razorctl import Recipe, restore, sparsify
from razorctl.layers.kinds.activation import ReLU, TanhGELU
from razorctl.layers.recognition.called_functions import Calling
from razorctl.layers.recognition.gated_mlps_by_value import OtherGatedMLP, Projected
from razorctl.layers.recognition.norms_by_value import Form, OtherChannelNorm, OtherNorm, form_of
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.memory.saved import traced_bytes
from razorctl.rules.registry import RULES, RuleSettings
from tests.cases import razor
from tests.layers.test_every_layer import assert_close, run

WIDTH, INNER = 12, 20


class OuterEps(nn.Module):
    """A norm with eps outside the root, which no formula here is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)


class OuterEpsNorm(OuterEps):
    """`OuterEps` by the name of a norm."""


class Scored(nn.Module):
    """A norm that is scaled by what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-6) * self.factor


class GEGLU(nn.Module):
    """A gated product of the halves of one layer, gate last, without a layer after it.

    It calls its function by a method, and takes arguments that it does not name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * INNER)

    def gelu(self, gate: Tensor) -> Tensor:
        return F.gelu(gate)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert kwargs.get("scale", 1) == 1
        hidden, gate = self.proj(hidden).chunk(2, dim=-1)
        return hidden * self.gelu(gate)


class Projecting(nn.Module):
    """A layer and a function of its output, which it calls by a method, as diffusers' GELU does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.proj, self.function = nn.Linear(WIDTH, INNER), function

    def of_gate(self, gate: Tensor) -> Tensor:
        return self.function(gate)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.of_gate(self.proj(hidden))


class SwiGLU(GEGLU):
    """A GEGLU with a layer by the name `activation`."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.SiLU()

    def gelu(self, gate: Tensor) -> Tensor:
        return self.activation(gate)


class Dropping(nn.Module):
    """A gated MLP with two dropouts, and layers by names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.b = (
            nn.Linear(INNER, WIDTH, bias=False),
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER),
        )
        self.last, self.first, self.act = nn.Dropout(0.3), nn.Dropout(0.4), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(self.first(self.act(self.b(x)) * self.a(x))))


class Squared(Dropping):
    """An MLP that multiplies otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(x)) * self.a(x) * self.a(x))


NORMS = {
    Llama4TextRMSNorm: Form(1e-5, False, 0.0, -1),
    MoshiRMSNorm: Form(1e-6, False, 0.0, -1),
    Gemma3nRMSNorm: Form(1e-6, False, 0.0, -1),
    CohereLayerNorm: Form(1e-5, True, 0.0, -1),
    DebertaLayerNorm: Form(1e-12, True, 0.0, -1),
    OlmoLayerNorm: Form(1e-5, True, 0.0, -1),
    NemotronLayerNorm1P: Form(1e-5, True, 1.0, -1),
    VitDetLayerNorm: Form(1e-6, True, 0.0, 1),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind):
    layer = kind(WIDTH)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    assert form_of(layer) == NORMS[kind]
    on_images = NORMS[kind].axis == 1
    assert razor_for(layer) is (OtherChannelNorm if on_images else OtherNorm)
    x = torch.randn((2, WIDTH, 3, 5) if on_images else (2, 15, WIDTH))
    want = run(layer, x)
    got = run(razor(layer, RULES["dense"].build(RuleSettings(WIDTH, 0.5))), x)
    assert torch.equal(got[0], want[0])
    assert_close(got, want, 2e-5)
    layer.detach()
    assert type(layer) is kind
    assert vars(layer).keys() == vars(kind(WIDTH)).keys()


class NoisyNorm(nn.LayerNorm):
    """A norm that draws in training."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.rand_like(y) if self.training else y


class Noisy(nn.Module):
    """An activation function that draws in training, here what leaves it as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand_like(x).ceil() * torch.relu(x) if self.training else torch.relu(x)


class NoisyMLP(nn.Module):
    """A gated MLP that draws in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(F.silu(self.a(x)) * self.b(x))
        return y * torch.rand_like(y) if self.training else y


@pytest.mark.parametrize("build", [lambda: NoisyNorm(WIDTH), Noisy, NoisyMLP])
def test_what_draws_in_training_is_not_recognized_in_evaluation(build):
    assert not issubclass(razor_for(build().eval()) or Calling, (OtherNorm, OtherGatedMLP, ReLU))


@pytest.mark.parametrize("build", [OuterEpsNorm, Scored, lambda: Gemma3nRMSNorm(0, 1e-6, False)])
def test_other_modules_are_no_norms(build):
    assert razor_for(build()) is None


def test_recognition_draws_nothing_and_needs_no_values():
    modules = [build().to("meta") for build in (lambda: Llama4TextRMSNorm(WIDTH), Dropping, GEGLU)]
    modules.append(Squared())
    before = torch.get_rng_state()
    kinds = [razor_for(module) for module in modules]
    assert kinds == [OtherNorm, OtherGatedMLP, OtherGatedMLP, None]
    assert torch.equal(torch.get_rng_state(), before)


def lfm2() -> nn.Module:
    return Lfm2MLP(Lfm2Config(hidden_size=WIDTH, intermediate_size=INNER))


def t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_ff": INNER, "feed_forward_proj": "gated-gelu"}
    return T5DenseGatedActDense(T5Config(**sizes, dropout_rate=0.2))


@pytest.mark.parametrize("build", [lfm2, t5, GEGLU, SwiGLU, Dropping])
def test_gated_mlps(build):
    layer = build().train()
    assert razor_for(layer) is OtherGatedMLP
    x = torch.randn(3, 11, WIDTH)
    want = run(layer, x)
    bf16 = run(layer, x, torch.bfloat16)
    full = traced_bytes(layer, x)
    holder = nn.Sequential(layer, nn.Linear(INNER if isinstance(layer, GEGLU) else WIDTH, 2))
    sparsify(holder, Recipe("half"))
    assert isinstance(layer, OtherGatedMLP)
    half = traced_bytes(layer, x)
    got = run(layer, x)
    assert torch.equal(got[0], want[0])
    assert_close(got, want, 2e-3)
    assert torch.equal(run(layer, x, torch.bfloat16)[0], bf16[0])
    # gate and up in half, where stock keeps them, f(gate) and the product in full.
    inner = got[0].shape[-1] if build in (GEGLU, SwiGLU) else 0
    assert half < 0.5 * full + 4 * 33 * inner
    restore(holder)
    assert type(layer).__name__ == type(build()).__name__


def approximate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.relu, approximate])
def test_an_activation_function_of_a_layer(function):
    layer, x = Projecting(function).train(), torch.randn(3, 11, WIDTH)
    assert razor_for(layer) is Projected
    want, full = run(layer, x), traced_bytes(layer, x)
    keys, holder = [*layer.state_dict()], nn.Sequential(layer, nn.Linear(INNER, 2))
    sparsify(holder, Recipe("half"))
    assert [*layer.state_dict()] == keys
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    assert traced_bytes(layer, x) <= 0.6 * full
    for twin in (layer, copied):
        got = run(twin, x)
        assert torch.equal(got[0], want[0])
        assert_close(got, want, 2e-3)
    restore(holder)
    assert type(layer) is Projecting
    assert not hasattr(layer, "razor_function")


def test_other_modules_are_no_gated_mlps():
    assert razor_for(Squared()) is razor_for(Projecting(torch.cos)) is None
    layer = Dropping()
    layer.a = nn.Linear(WIDTH, INNER, dtype=torch.bfloat16)  # a cast that the example has not
    assert razor_for(layer) is None


class Head(nn.Module):
    """A linear layer of what a module computes, as is an MLP of its activation function."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x * 2))
        return y


@pytest.mark.parametrize("body", [nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8), nn.GELU())])
def test_recognition_runs_no_module_that_has_a_state(body: nn.Module) -> None:
    model = Head(copy.deepcopy(body)).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    calls: list[object] = []
    model.body.register_forward_hook(lambda *_: calls.append(None))
    sparsify(model, Recipe("razor", 0.9))
    assert not calls
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_an_activation_function():
    assert razor_for(BloomGelu()) is TanhGELU
    assert razor_for(nn.Sequential()) is None
