"""Embeddings tied to an output layer get the stock gradient, in one tensor."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from razorctl import Recipe, restore, sparsify
from razorctl.layers.heads import tied_embeddings
from razorctl.layers.heads.tied_embeddings import TiedEmbedding

CLASSES = 23


class Decoder(nn.Module):
    """A language model of one layer; `extra` embeds other ids with the same weight."""

    def __init__(self, padding=None, extra=False):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8, padding)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.extra = extra

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        x = self.embed(ids)
        if self.extra:
            x = x + self.embed(ids.flip(1))
        return self.head(torch.relu(self.inner(x)))


def pair(**options):
    torch.manual_seed(0)
    stock = Decoder(**options)
    razor = copy.deepcopy(stock)
    sparsify(razor, Recipe("razor", 0.9))
    assert isinstance(razor.embed, TiedEmbedding)
    return stock, razor


def loss(model, ids, dtype=None):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def dense_gradients():
    """Counts the gradients of a whole weight that embeddings compute."""
    counted = []
    backward = torch.ops.aten.embedding_dense_backward.default

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is backward and args[2] == CLASSES:
                counted.append(args)
            return func(*args, **(kwargs or {}))

    return Counting(), counted


@pytest.mark.parametrize("options", [{}, {"padding": 3}, {"extra": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_the_gradient_is_the_stock_one_and_exists_once(options, dtype, tokens, autocast):
    models = [model.to(dtype) for model in pair(**options)]
    mode, counted = dense_gradients()
    for _ in range(2):  # the second adds to the first
        ids = torch.randint(CLASSES, (2, tokens))
        loss(models[0], ids, autocast).backward()
        with mode:
            loss(models[1], ids, autocast).backward()
    assert len(counted) == 2 * ("extra" in options)
    expected, actual = (model.embed.weight.grad for model in models)
    assert not any(ctx() and ctx().given is not None for ctx in tied_embeddings._last.values())
    torch.testing.assert_close(
        actual, expected, atol=2e-2 if dtype is torch.bfloat16 else 1e-3, rtol=2e-2
    )


def test_the_sum_is_that_of_two_dense_gradients_to_the_bit():
    _, model = pair()
    ids = torch.randint(CLASSES, (2, 40))
    loss(model, ids).backward()
    together, model.embed.weight.grad = model.embed.weight.grad, None
    restore(model)
    sparsify(model, Recipe("razor", 0.9))
    model.embed.__class__ = nn.Embedding
    loss(model, ids).backward()
    assert torch.equal(together, model.embed.weight.grad)


def test_a_gradient_that_embeddings_do_not_reach_is_kept():
    stock, model = pair()
    ids = torch.randint(CLASSES, (2, 5))
    alive = model.embed(ids)
    for each in (stock, model):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
        F.cross_entropy(each.head(x).flatten(0, 1), ids.flatten()).backward()
    torch.testing.assert_close(model.embed.weight.grad, stock.embed.weight.grad)
    del alive


def test_gradients_of_some_tensors_leave_those_of_weights_alone():
    stock, model = pair()
    ids = torch.randint(CLASSES, (2, 5))
    results = []
    for each in (stock, model):
        hidden = each.embed(ids)
        value = F.cross_entropy(each.head(hidden).flatten(0, 1), ids.flatten())
        results.append(torch.autograd.grad(value, hidden)[0])
        assert each.embed.weight.grad is None
    torch.testing.assert_close(*results)


def test_embeddings_that_ran_before_the_output_layer_miss_nothing():
    stock, model = pair()
    ids = torch.randint(CLASSES, (2, 5))
    for each in (stock, model):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
        value = F.cross_entropy(each.head(x).flatten(0, 1), ids.flatten())
        (each.embed(ids).square().sum() + value).backward()
    torch.testing.assert_close(model.embed.weight.grad, stock.embed.weight.grad)


def test_a_graph_that_is_kept_has_the_same_gradient_twice():
    _, model = pair()
    ids = torch.randint(CLASSES, (2, 5))
    value = loss(model, ids)
    value.backward(retain_graph=True)
    once = model.embed.weight.grad.clone()
    value.backward()
    torch.testing.assert_close(model.embed.weight.grad, 2 * once)


@pytest.mark.parametrize("change", ["untied", "max_norm", "frozen", "eval"])
def test_other_embeddings_stay_stock(change):
    torch.manual_seed(0)
    model = Decoder()
    if change == "untied":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    if change == "max_norm":
        model.embed.max_norm = 1.0
    model.embed.weight.requires_grad_(change != "frozen")
    sparsify(model, Recipe("razor", 0.9))
    model.train(change != "eval")
    if change in ("untied", "max_norm"):
        assert type(model.embed) is nn.Embedding
    else:
        y = model.embed(torch.zeros(2, 3, dtype=torch.long))
        assert "EmbeddingFunction" not in str(y.grad_fn)


class Scaled(nn.Embedding):
    """As the embeddings of Gemma, which multiply their output."""

    def forward(self, ids):
        return 3 * super().forward(ids)


def test_embeddings_that_compute_more_stay_stock():
    model = Decoder()
    scaled = Scaled(CLASSES, 8)
    model.head.weight = scaled.weight
    model.embed = scaled
    stock = copy.deepcopy(model)
    sparsify(model, Recipe("razor", 0.9))
    ids = torch.randint(CLASSES, (2, 5))
    for each in (stock, model):
        loss(each, ids).backward()
    assert type(model.embed) is Scaled
    torch.testing.assert_close(
        model.embed.weight.grad, stock.embed.weight.grad, atol=1e-3, rtol=2e-2
    )
