"""LoRA: exact at the start, trains adapters and classifier alone, and merges into a stock model."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from razorctl import Recipe, models, restore, saved_bytes, sparsify
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.layers.kinds.linear import Linear
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.planning.job_trace import trace
from razorctl.surgery import adapters
from razorctl.surgery.byte_budget import sparsify_within
from tests.models import SMALL, gpt2, llama
from tests.surgery.test_methods import cosine, step

every_model = pytest.mark.parametrize("kind", SMALL)


def build(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = SMALL[kind]
    return model().train(), batch()


@every_model
def test_only_adapters_and_the_classifier_are_trained(kind):
    net, x = build(kind)
    want = step(net, x)[0]
    names = sparsify(net, Recipe("lora"))
    classifier = [n for n, m in net.named_modules() if type(m) is nn.Linear and "lora" not in n][-1]
    assert names
    assert classifier not in names
    assert torch.equal(step(net, x)[0], want)
    for name, p in net.named_parameters():
        adapted = "lora_" in name or name.startswith(f"{classifier}.")
        assert p.requires_grad == adapted == (p.grad is not None), name
    ranks = {len(p) for n, p in net.named_parameters() if "lora_A" in n}
    assert ranks == {8}


@pytest.mark.parametrize(
    ("settings", "adapted", "scale"),
    [
        ({"lora_rank": 2}, {"qkv", "proj", "fc1", "fc2"}, 2),
        ({"lora_rank": 4, "lora_alpha": 6.0}, {"qkv", "proj", "fc1", "fc2"}, 1.5),
        ({"lora_targets": "qkv, mlp.fc?"}, {"qkv", "fc1", "fc2"}, 2),
        ({"lora_targets": "blocks.0.attn.*"}, {"qkv", "proj"}, 2),
    ],
)
def test_rank_factor_and_targets_of_adapters(settings, adapted, scale):
    net, x = build("vit")
    names = sparsify(net, Recipe("lora", **settings))
    assert {name.rpartition(".")[2] for name in names} == adapted
    layers = [module for module in net.modules() if isinstance(module, LoraLayer)]
    assert len(layers) == len(names)
    assert {layer.scaling["default"] for layer in layers} == {scale}
    assert {layer.r["default"] for layer in layers} == {settings.get("lora_rank", 8)}
    step(net, x)


@pytest.mark.parametrize("targets", ["q_proj", "qkv,q_proj", "kv", "head"])
def test_a_target_that_no_layer_has_is_refused(targets):
    net, _ = build("vit")
    with pytest.raises(UsageError, match="matches no linear layer before the head; the layers are"):
        sparsify(net, Recipe("lora", lora_targets=targets))
    assert not any(isinstance(module, LoraLayer) for module in net.modules())


@pytest.mark.parametrize(
    "settings", [{"lora_rank": 0}, {"lora_alpha": 0.0}, {"lora_alpha": math.inf}]
)
def test_a_rank_or_factor_that_is_not_above_zero_is_refused(settings):
    with pytest.raises(UsageError, match="is not above 0"):
        Recipe("lora", **settings)


@pytest.mark.parametrize("model", [gpt2, llama])
def test_of_a_language_model_the_head_is_frozen_too(model):
    net = model()
    sparsify(net, Recipe("lora"))
    assert all("lora_" in name for name, p in net.named_parameters() if p.requires_grad)


@every_model
def test_restore_merges_into_the_stock_model(kind):
    net, x = build(kind)
    stock = copy.deepcopy(net)
    modules = [(name, type(module)) for name, module in net.named_modules()]
    net.get_parameter(next(iter(dict(net.named_parameters())))).requires_grad_(False)
    sparsify(net, Recipe("lora"))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        step(net, x)
        optimizer.step()
    want = step(copy.deepcopy(net), x)[0]
    restore(net)
    assert [(name, type(module)) for name, module in net.named_modules()] == modules
    assert list(net.state_dict()) == list(stock.state_dict())
    assert vars(net).keys() == vars(stock).keys()
    assert [p.requires_grad for p in net.parameters()] == [False] + [True] * (
        len(list(net.parameters())) - 1
    )
    stock.load_state_dict(net.state_dict())
    torch.testing.assert_close(step(stock, x)[0], want, rtol=1e-4, atol=1e-5)


@every_model
def test_saved_adapters_load_by_peft_alone(kind, tmp_path):
    net, x = build(kind)
    pretrained = copy.deepcopy(net)
    sparsify(net, Recipe("lora"))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    for _ in range(2):
        step(net, x)
        optimizer.step()
    adapters.save(net, tmp_path)
    loaded = PeftModel.from_pretrained(pretrained, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(x), net.eval()(x))
    step(net.train(), x)  # and training can go on


def test_the_peak_is_traced_without_the_gradients_and_states_of_frozen_weights():
    job = Job("vit-micro", "digits", batch_size=8, precision="fp32", optimizer="adamw")
    job = job.resolved(models.find("vit-micro").defaults, 1437)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    full, lora = trace(job, Recipe("full"), 10), trace(job, Recipe("lora"), 10)
    assert torch.equal(torch.get_rng_state(), state)
    assert lora.weights > full.weights
    assert lora.optimizer < 0.2 * full.optimizer
    assert lora.peak < full.peak
    assert trace(job, Recipe("full"), 10) == full  # what was adapted is as it was


def test_what_cannot_be_adapted_is_refused_and_left_alone():
    with pytest.raises(UsageError, match="no linear layer before its classifier"):
        sparsify(nn.Linear(3, 4), Recipe("lora"))
    net, _ = build("vit")
    sparsify(net, Recipe("lora"))
    with pytest.raises(UsageError, match="sparsified already"):
        sparsify(net, Recipe("lora"))
    del net.razor_trainable
    with pytest.raises(UsageError, match="has adapters already"):
        sparsify(net, Recipe("lora"))
    with pytest.raises(UsageError, match="set joint_budget to 1"):
        Recipe("lora", joint_budget=0.5)


class TestWithAnyMethod:
    """`lora` of a recipe: adapters, whose linear layers save by the method's rules."""

    @pytest.fixture(autouse=True)
    def int8_gemms_whatever_the_size(self, monkeypatch):
        monkeypatch.setattr(Linear, "SMALLEST", 0)

    def adapted(self, kind: str, recipe: Recipe) -> tuple[nn.Module, torch.Tensor]:
        net, x = build(kind)
        torch.manual_seed(1)  # of adapters
        sparsify(net, replace(recipe, lora=True))
        for name, parameter in net.named_parameters():
            if "lora_B" in name:  # else lora_A has no gradient at first
                nn.init.normal_(parameter, std=0.1)
        return net, x

    @every_model
    @pytest.mark.parametrize("method", ["razor", "half", "backrazor"])
    def test_the_forward_pass_is_that_of_lora_and_the_gradient_close(self, kind, method):
        want = step(*self.adapted(kind, Recipe("full")))
        net, x = self.adapted(kind, Recipe(method, 0.5))
        got = step(net, x)
        if method == "backrazor":  # whose attention is stored
            torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(got[0], want[0])
        assert [g is None for g in got] == [g is None for g in want]
        assert cosine(got[1:], want[1:]) > (0.9 if method == "backrazor" else 0.99)

    @every_model
    def test_frozen_layers_save_no_input(self, kind):
        net, x = self.adapted(kind, Recipe(ratio=0.5))
        parts = traced_bytes_by_module(net, x)
        saved = {name.rpartition(".")[2] for name in parts}
        layers = {n: m for n, m in net.named_modules() if isinstance(m, Linear)}
        assert {n.rsplit(".", 2)[-2] for n in layers if "lora_" in n} == {"lora_A", "lora_B"}
        assert any(name.endswith("base_layer") for name in layers)
        assert "base_layer" not in saved
        assert "default" in saved  # of lora_A and lora_B
        assert sum(parts.values()) < 0.5 * saved_bytes(*build(kind))

    def test_a_byte_budget_is_that_of_full_fine_tuning(self, caplog):
        net, x = build("vit")
        full = saved_bytes(net, x)
        names = sparsify_within(net, Recipe(ratio=0.9, lora=True), x)
        assert "blocks.0.attn.qkv" in names
        assert saved_bytes(net, x) <= 0.1 * full
        assert not caplog.records

    def test_with_an_own_part_it_is_refused(self):
        for method in ("bias", "head"):
            with pytest.raises(UsageError, match=f"{method} trains another part of the model"):
                Recipe(method, lora=True)
        with pytest.raises(UsageError, match=r"lora freezes .* set joint_budget to 1"):
            Recipe(joint_budget=0.5, lora=True)
