"""Whole models of the libraries: forward passes, gradients, what is swapped, and the way back."""

import copy
import pickle

import pytest
import torch
from torch import nn

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import RazorLayer
from tests import models, zoo
from tests.zoo import cosine, small, step

every_model = pytest.mark.parametrize("name", zoo.ALL)
TRANSFORMERS = [name for name in zoo.ALL if isinstance(zoo.ALL[name][1], dict)]
TRANSFORMERS = [name for name in TRANSFORMERS if "encoder" not in name and "adapted" not in name]
CHECKPOINTING = [*TRANSFORMERS, "vit", "deit", "eva", "beit"]


@every_model
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_the_forward_pass_is_stock_and_the_gradient_close(name, precision):
    model, inputs = small(name)
    want = step(model, inputs, precision)
    sparsify(model, Recipe("razor", ratio=0.7))
    got = step(model, inputs, precision)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-2 if precision else 1e-6, atol=0)
    assert cosine(got[2], want[2]) > 0.98


@pytest.mark.parametrize("name", [*TRANSFORMERS, "vit", "norms of heads", "deit"])
@pytest.mark.parametrize("attention", ["stored", "flash", "sparse-flash"])
def test_attention_backends(name, attention):
    model, inputs = small(name)
    if attention == "stored" and name in TRANSFORMERS:
        model.set_attn_implementation("eager")
    sparsify(model, Recipe("full", attention="stored" if attention == "stored" else "flash"))
    want = step(model, inputs)
    restore(model)
    sparsify(model, Recipe("razor", ratio=0.5, attention=attention))
    got = step(model, inputs)
    assert torch.equal(got[0], want[0])
    assert cosine(got[2], want[2]) > 0.99


@every_model
def test_all_that_saves_much_is_swapped_and_comes_back(name):
    model, inputs = small(name)
    want, state = step(model, inputs), list(model.state_dict())
    types, attributes = ([f(m) for m in model.modules()] for f in (type, lambda m: set(vars(m))))
    sparsify(model, Recipe("razor"))
    assert sum(isinstance(m, Attention) for m in model.modules()) >= 2
    left = {type(m).__name__ for m in model.modules() if not isinstance(m, RazorLayer)}
    left -= {"BertAttention", "RobertaAttention"}  # which hold the attention, and an output layer
    assert not {n for n in left if n.endswith(("Norm", "Conv1D", "Conv2d", "Attention"))}
    outputs = sum(type(m) is nn.Linear for m in model.modules())
    assert outputs <= (2 if name == "deit" else 1)
    assert left.isdisjoint({"SiLU", "SiLUActivation", "GELU", "GELUActivation", "LayerScale"})
    assert torch.equal(step(model, inputs)[0], want[0])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert list(twin.state_dict()) == state
        assert torch.equal(step(twin, inputs)[0], want[0])
        restore(twin)
        assert [type(m) for m in twin.modules()] == types
        assert [set(vars(m)) for m in twin.modules()] == attributes
        assert all(map(torch.equal, step(twin, inputs), want))


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_checkpointing_is_exact_and_undone(name):
    model, inputs = small(name)
    want = step(model, inputs)
    sparsify(model, Recipe("checkpoint"))
    with pytest.raises(UsageError, match="restore"):
        sparsify(model, Recipe("full"))
    got = step(model, inputs)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-5)
    restore(model)
    flags = ("gradient_checkpointing", "grad_checkpointing")
    assert not any(getattr(m, flag, False) for m in model.modules() for flag in flags)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral", "gemma2"])
def test_checkpointing_of_transformers_gives_the_same_gradient(name, reentrant):
    model, inputs = small(name)
    sparsify(model, Recipe("razor", ratio=0.7))
    want = step(model, inputs)
    models.checkpoint(model, reentrant)
    got = step(model, inputs)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-6)
