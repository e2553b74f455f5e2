"""Modules whose instance has a forward of its own: accelerate's hooks, and code that runs alone."""

import copy
import functools
import types
from typing import Any

import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from razorctl import Recipe, restore, saved_bytes, sparsify, sparsify_within
from razorctl.layers.base import RazorLayer
from razorctl.layers.own_forward import InPlace, place
from tests import models

IDS = torch.arange(1, 33).view(2, 16)
INPUTS: dict[str, tuple[Any, Any]] = {
    "bert": (lambda: models.bert(0.0), {"input_ids": IDS, "labels": torch.tensor([0, 1])}),
    "gpt2": (models.gpt2, {"input_ids": IDS, "labels": IDS}),
    "llama": (models.llama, {"input_ids": IDS, "labels": IDS}),
    "vit": (models.vit, (torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16),)),
}
OURS = (RazorLayer, InPlace)


class Counting(ModelHook):
    """A hook that counts the forward passes that it sees begin and end."""

    def __init__(self) -> None:
        self.began = self.ended = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.began += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.ended += 1
        return output


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))


def run(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    """The loss, and the gradients of all parameters."""
    model.train().zero_grad()
    torch.manual_seed(5)
    by_name = isinstance(inputs, dict)
    loss = model(**inputs).loss if by_name else model(*inputs).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def traces(model: nn.Module) -> list[Any]:
    """The modules, forwards and methods of razorctl in a model."""
    values = [value for module in model.modules() for value in vars(module).values()]
    methods = [getattr(value, "__func__", None) for value in values]
    bound = [f for f in methods if getattr(f, "__module__", "").startswith("razorctl")]
    return [*bound, *(each for each in (*model.modules(), *values) if isinstance(each, OURS))]


# Blocks run again at 0.97.
@pytest.mark.parametrize(("name", "ratio"), [("vit", 0.9), ("llama", 0.97), ("gpt2", 0.97)])
def test_hooks_of_accelerate_change_nothing(name, ratio):
    build, inputs = INPUTS[name]
    plain = build()
    hooked = copy.deepcopy(plain)
    for module in hooked.modules():
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=True))
    stock, recipe = run(plain, inputs), Recipe("razor", ratio=ratio)
    for model in (plain, hooked):
        sparsify_within(model, recipe, inputs)
    assert saved_bytes(hooked, inputs) == saved_bytes(plain, inputs)
    want = run(plain, inputs)
    assert equal(run(hooked, inputs), want)
    assert equal(run(copy.deepcopy(hooked), inputs), want)
    restore(hooked)
    assert not traces(hooked)
    assert equal(run(hooked, inputs), stock)
    remove_hook_from_module(hooked, recurse=True)
    assert equal(run(hooked, inputs), stock)


@pytest.mark.parametrize("name", INPUTS)
def test_hooks_come_and_go_while_a_model_is_sparsified(name):
    build, inputs = INPUTS[name]
    model = build()
    stock = run(model, inputs)
    sparsify(model, Recipe("razor", ratio=0.9))
    want, hook = run(model, inputs), Counting()
    for module in model.modules():
        add_hook_to_module(module, hook)
    assert equal(run(model, inputs), want)
    assert hook.began == hook.ended > 10
    other = copy.deepcopy(model)
    remove_hook_from_module(model, recurse=True)
    assert equal(run(model, inputs), want)
    for each in (model, other):
        restore(each)
        assert not traces(each)
        assert equal(run(each, inputs), stock)


def test_restore_puts_the_bound_method_back():
    model = sequential()
    for layer in model:
        add_hook_to_module(layer, ModelHook())
    before = [dict(vars(layer)) for layer in model]
    assert sparsify(model) == ("0", "1", "3")  # without the classifier
    assert model[0]._old_forward.__func__ is type(model[0]).forward is not nn.Linear.forward
    restore(model)
    for layer, attributes in zip(model, before, strict=True):
        assert vars(layer).keys() == attributes.keys()
        assert layer._old_forward == attributes["_old_forward"]
        assert layer.forward is attributes["forward"]


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(self).forward(self, x)


OWN = {
    "method": lambda layer: types.MethodType(doubled, layer),
    "function": lambda layer: functools.partial(doubled, layer),
    "closure": lambda layer: lambda x, forward=layer.forward: 2 * forward(x),
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_code_of_an_instance_runs_alone_and_is_named_once(own, caplog):
    model, x = sequential(), torch.randn(6, 8)
    for at in (0, 2):
        model[at].forward = own(model[at])
    want = model(x)
    assert sparsify(model, Recipe("razor", ratio=0.5)) == ("1", "3")
    said = [r.getMessage() for r in caplog.records if "their own forward" in r.getMessage()]
    assert said == ["not compressed, as instances have their own forward: 2 x * (Linear)"]
    assert torch.equal(model(x), want)
    restore(model)
    assert torch.equal(model(x), want)
    assert place(model[0]) is None


def test_what_razorctl_would_not_swap_is_not_named(caplog):
    model = sequential()
    model.forward = functools.partial(nn.Sequential.forward, model)
    sparsify(model, Recipe("razor", ratio=0.5))
    assert not [r for r in caplog.records if "their own forward" in r.getMessage()]


def test_a_gated_mlp_with_another_activation_of_its_instance_stays_stock():
    mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2))
    mlp.act_fn.forward = torch.tanh
    model, x = nn.ModuleList([mlp, nn.Linear(4, 4)]), torch.randn(3, 8, requires_grad=True)
    mlp(x).sum().backward()
    want, x.grad = x.grad, None
    sparsify(model, Recipe("razor", ratio=0.5))
    assert not isinstance(mlp, RazorLayer)
    mlp(x).sum().backward()
    assert torch.cosine_similarity(x.grad.flatten(), want.flatten(), dim=0) > 0.99
