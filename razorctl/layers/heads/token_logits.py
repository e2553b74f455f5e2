"""The output embeddings of a language model; the logits are computed when something needs them.

Logits are [tokens, vocabulary], often the largest activation of a step, and most steps need only
their cross-entropy. So the layer returns `Logits`, a lazy tensor (`lazy_tensor`) that holds the
layer's input and weight. Slicing, reshaping and casting it change only the input, and
`F.cross_entropy` computes the loss from input and weight. `heads` lists these layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import flat, save, saved
from razorctl.layers.heads.lazy_tensor import COMMON, Lazy, LazyLayer, check_versions
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.ops.cast import cast_weight
from razorctl.ops.linear_cross_entropy import linear_cross_entropy, part_tokens
from razorctl.rules.base import Rule
from razorctl.rules.dense import Dense


def _losses(
    options: tuple[int, float],
    parts: tuple[Tensor, Tensor, Tensor | None],
    target: Tensor,
    factor: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor, ...]:
    """The losses of rows of logits, and the gradients of the parts."""
    x, weight, bias = parts
    losses, dx, *others = linear_cross_entropy(
        flat(x), weight, bias, target, *options, factor, *needed
    )
    return losses, dx.view(x.shape) if needed[0] else dx, *others


class LogitsFunction(torch.autograd.Function):
    """x W^T + b as `Logits`, with the stock gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        save(ctx, x if ctx.needs_input_grad[1] else None, weight)
        ctx.dtype, ctx.shape = x.dtype, x.shape
        return Logits((*x.shape[:-1], len(weight)), dtype, x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        dy, dx, dw, db = flat(dy.to(ctx.dtype)), None, None, None
        with no_autocast(dy.device):
            if ctx.needs_input_grad[1]:
                dw = dy.T @ flat(x)
            if ctx.needs_input_grad[2]:
                db = dy.sum(0)
            if ctx.needs_input_grad[0]:
                dx = (dy @ cast_weight(weight, dy.dtype)).view(ctx.shape)
        return dx, dw, db, None


class Logits(Lazy):
    """The output [..., vocabulary] of a linear layer; the parts are x, the weight and the bias."""

    function = LogitsFunction
    losses = staticmethod(_losses)
    axes = 2


def _rows(func: Any, logits: Logits, x: Tensor, *args: Any, **kwargs: Any) -> Logits:
    """The logits of `x`; their values are `func` of the values of `logits`."""
    _, weight, bias = logits.parts

    def make() -> Tensor:
        values: Tensor = func(logits.first_values(), *args, **kwargs)
        return values

    return logits.child((x, weight, bias), logits.dtype, make)


def _reshaped(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    """The logits in another shape; None if the last dimension would change."""
    # A view of one element, so that no count of bytes notices it.
    like = torch.empty((), device="meta").expand(logits.shape)
    same = func is Tensor.contiguous
    shape = logits.shape if same else func(like, *args, **kwargs).shape
    x = logits.parts[0]
    if shape[-1:] != logits.shape[-1:]:
        return None
    return _rows(func, logits, x.reshape(*shape[:-1], x.shape[-1]), *args, **kwargs)


def _indexed(func: Any, logits: Logits, index: Any) -> Logits | None:
    """The logits at an index of the leading dimensions; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(part is ... or isinstance(part, (int, slice)) for part in parts)
    whole = parts[-1:] == (slice(None),)  # of the vocabulary, if the index reaches that dimension
    if parts[-1:] == (...,):
        leading = len(parts) - 1 < logits.dim()
    elif ... in parts or len(parts) == logits.dim():
        leading = whole
    else:
        leading = len(parts) < logits.dim()
    if not (simple and leading and parts.count(...) <= 1):
        return None
    return _rows(func, logits, logits.parts[0][index], index)


def _shifted(func: Any, logits: Logits, other: Any, **kwargs: Any) -> Logits | None:
    """The logits plus a number per class, as BART adds them; None for any other sum."""
    if kwargs or not isinstance(other, Tensor) or isinstance(other, Lazy):
        return None
    classes = logits.shape[-1:]
    if other.shape[-1:] != classes or other.numel() != classes[0] or other.dim() > logits.dim():
        return None
    (x, weight, bias), shift = logits.parts, other.reshape(classes).clone()  # it may yet change
    dtype = torch.promote_types(logits.dtype, shift.dtype)
    parts = x, weight, shift if bias is None else bias + shift
    return logits.child(parts, dtype, lambda: logits.first_values() + shift)


def _argmax(func: Any, logits: Logits, dim: int | None = None) -> Tensor | None:
    """The class of the largest logit per token, computing a part of the tokens at a time."""
    if dim not in (-1, logits.dim() - 1):
        return None
    logits.check()
    x, weight, bias = logits.parts
    parts = torch.split(flat(x), part_tokens(len(weight)))
    return torch.cat([_linear(part, weight, bias).argmax(-1) for part in parts]).view(x.shape[:-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The stock logits of x, which is in its compute dtype already."""
    with no_autocast(x.device):
        return F.linear(x, cast_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))


Logits.LAZY = {
    **COMMON,
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten, Tensor.contiguous), _reshaped),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _shifted),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}


class Head(LazyLayer):
    """The output embeddings of a language model; their cross-entropy never holds all logits."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return isinstance(rule, Dense)

    def forward(self, input: Tensor) -> Tensor:
        gradient = input.requires_grad or self.weight.requires_grad
        if not (self.defers and (self.lazy or gradient)):
            return self.stock(input)
        x = to_compute_dtype(input)
        check = partial(check_versions, (x, x._version), (self.weight, self.weight._version))
        parts = x, self.weight, self.bias
        return Logits.of(parts, (), x.dtype, check, partial(_linear, *parts))


def heads(model: nn.Module) -> frozenset[nn.Module]:
    """The linear layers that language models in `model` return as `get_output_embeddings`."""
    embeddings = set()
    for module in model.modules():
        if callable(get := getattr(type(module), "get_output_embeddings", None)):
            try:
                embeddings.add(get(module))
            except (AttributeError, NotImplementedError):
                continue
    return frozenset(
        head for head in embeddings if type(head) is nn.Linear or isinstance(head, Head)
    )
