"""The embeddings of a language model that share their weight with its output layer.

The gradient of the weight [vocabulary, columns] that comes from the output layer exists before the
backward pass reaches the embeddings. Stock autograd computes another one as large for these, and a
third one for the sum. Here the embeddings add their rows to the first one. The sum is the same to
the bit.
"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.layers.base import RazorLayer, flat, save, saved, stock_type
from razorctl.layers.fsdp import in_use
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.rules.base import Rule
from razorctl.rules.dense import Dense

_last: dict[int, weakref.ref[Any]] = {}  # id of a weight -> context of its last embedding


class EmbeddingFunction(torch.autograd.Function):
    """The stock embedding; its backward pass adds to a gradient from the output layer."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: "TiedEmbedding") -> Tensor:
        save(ctx, ids)
        ctx.layer, ctx.weight, ctx.given, ctx.ran = layer, weakref.ref(weight), None, False
        _last[id(weight)] = weakref.ref(ctx, partial(_forget, id(weight)))
        return layer.stock(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), layer = saved(ctx), ctx.layer
        total, ctx.given, ctx.ran = ctx.given, None, True
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        backward = torch.ops.aten.embedding_dense_backward.default
        if total is None:
            dw: Tensor = backward(dy, ids, layer.num_embeddings, padding, False)
            return None, dw, None
        ids, dy = ids.flatten(), flat(dy)
        slots, rows = _grouped(ids, len(total))
        if padding >= 0:
            dy = dy.masked_fill((ids == padding)[:, None], 0)
        total.index_add_(0, rows, backward(dy, slots, len(ids), -1, False))
        return None, total, None


def _grouped(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A slot for each id, [ids], equal for equal ones; and the row of each slot, [ids].

    Slots that no id has get any rows; what is added there is 0. count: of rows.
    """
    ordered, order = ids.sort()
    first = torch.ones_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    slot = first.cumsum(0) - 1
    rows = torch.arange(len(ids), device=ids.device).remainder_(count)
    return torch.empty_like(slot).scatter_(0, order, slot), rows.scatter_(0, slot, ordered)


def _forget(number: int, dead: weakref.ref[Any]) -> None:
    if _last.get(number) is dead:
        del _last[number]


def handed(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Hands the output layer's gradient to the embeddings with the same weight; returns None.

    Called in a backward pass. Returns the gradient if this pass will not run such embeddings.
    """
    last = _last.get(id(weight))
    ctx = None if last is None else last()
    if ctx is None or ctx.weight() is not weight or ctx.ran or ctx.given is not None:
        return gradient
    if not torch._C._will_engine_execute_node(ctx):
        return gradient
    ctx.given = gradient
    return None


class TiedEmbedding(RazorLayer):
    """Embeddings that share their weight with an output layer."""

    kind = "head"
    padding_idx: int | None
    num_embeddings: int
    weight: Tensor

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return isinstance(rule, Dense)

    def forward(self, input: Tensor) -> Tensor:
        plain = torch.compiler.is_compiling() or in_use()
        if plain or not (self.saving and self.weight.requires_grad):
            return self.stock(input)
        y: Tensor = EmbeddingFunction.apply(input, self.weight, self)
        return y


def tied_embeddings(model: nn.Module, heads: frozenset[nn.Module]) -> frozenset[nn.Module]:
    """The embeddings in `model` that share their weight with one of its output layers."""
    weights = {id(head.weight) for head in heads}
    return frozenset(
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and stock_type(module) is nn.Embedding  # subclasses may scale their output
        and id(module.weight) in weights
        and not (module.max_norm or module.scale_grad_by_freq or module.sparse)
    )
