"""The output embeddings of a language model, whose logits are computed where something needs them.

Logits are [tokens, vocabulary], often the largest activation of a step, and most steps take nothing
but their cross-entropy. So the layer returns `Logits`, which knows its input and weight and is
cut, reshaped and cast as they are. `F.cross_entropy` of it is computed from these. Anything else
finds the stock logits, computed once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from razorctl.errors import UsageError
from razorctl.layers.autocast import cast_weight, no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, flat, save, saved
from razorctl.ops.linear_cross_entropy import linear_cross_entropy, part_tokens
from razorctl.rules.base import Rule
from razorctl.rules.dense import Dense


class CrossEntropyFunction(torch.autograd.Function):
    """The losses of tokens, or their sum, whose gradients the same pass computes.

    The gradient of the weight, which the backward pass would make first, is then there already. It
    is as large with or without this function, so it is not an activation that is saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        smoothing: float,
        total: bool,
    ) -> Tensor:
        ctx.options, ctx.total, ctx.shape = (ignore_index, smoothing), total, x.shape
        needed = ctx.needs_input_grad[:3] if total else (False, False, False)
        losses: Tensor
        with no_autocast(x.device):
            losses, dx, dw, db = linear_cross_entropy(
                flat(x), weight, bias, target, *ctx.options, None, *needed
            )
        if not total:
            save(ctx, x, weight, bias, target)
            return losses
        save(ctx, dx if needed[0] else None, db if needed[2] else None)
        ctx.weight_grad = dw if needed[1] else None
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        if ctx.total:
            (dx, db), dw = saved(ctx), ctx.weight_grad
            if dw is not None and torch._C._autograd._get_current_graph_task_keep_graph():
                dw = dw * dy
            elif dw is not None:
                ctx.weight_grad, dw = None, dw.mul_(dy)
            dx, db = (None if t is None else t * dy for t in (dx, db))
        else:
            x, weight, bias, target = saved(ctx)
            with no_autocast(dy.device):
                _, dx, dw, db = linear_cross_entropy(
                    flat(x), weight, bias, target, *ctx.options, dy, *needed
                )
        dx = dx.view(ctx.shape) if needed[0] else None
        return dx, dw if needed[1] else None, db if needed[2] else None, None, None, None, None


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


class ValuesFunction(torch.autograd.Function):
    """The values of logits that are known, as a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, logits: "Logits") -> Tensor:
        assert logits.known is not None
        return logits.known

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Logits(Tensor):
    """The output [..., vocabulary] of a linear layer, not computed yet.

    parts: x, the weight and the bias. check: raises UsageError if these have changed. make:
    computes the values. known: what it returned. Once the values are known they are what every
    operation gets, as they may have been changed in place.
    """

    parts: tuple[Tensor, Tensor, Tensor | None]
    check: Callable[[], None]
    make: Callable[[], Tensor]
    known: Tensor | None

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> "Logits":
        made: Logits = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        made.known = None
        return made

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        check: Callable[[], None],
        make: Callable[[], Tensor],
    ) -> "Logits":
        """Those of `x` [..., columns] in `dtype`; see the attributes."""
        logits: Logits = LogitsFunction.apply(x, weight, bias, dtype)
        logits.parts, logits.check, logits.make = (x, weight, bias), check, make
        return logits

    def values(self) -> Tensor:
        """The stock logits, as part of the graph where that is recorded."""
        if self.known is None:
            self.check()
            with torch.no_grad():
                self.known = self.make()
        if torch.is_grad_enabled() and self.requires_grad and not self.known.requires_grad:
            self.known = ValuesFunction.apply(self)
        assert self.known is not None
        return self.known

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in FACTS:
                return func(*args, **kwargs)
            lazy = LAZY.get(func)
            if lazy is not None and isinstance(args[0], cls) and args[0].known is None:
                found = lazy(func, *args, **kwargs)
                if found is not None:
                    return found
            args, kwargs = tree_map_only(cls, cls.values, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _child(parent: Logits, x: Tensor, dtype: torch.dtype, make: Callable[..., Tensor]) -> Logits:
    """The logits of `x`, which are `make` of those of `parent`."""
    _, weight, bias = parent.parts
    return Logits.of(x, weight, bias, dtype, parent.check, lambda: make(parent.values()))


def _reshaped(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    """What keeps the order of elements, if it keeps the last dimension too."""
    # A view of one element, so that whoever counts bytes sees none.
    like = torch.empty((), device="meta").expand(logits.shape)
    same = func in (Tensor.contiguous, Tensor.clone)
    shape = logits.shape if same else func(like, *args, **kwargs).shape
    x = logits.parts[0]
    if shape[-1:] != logits.shape[-1:]:
        return None
    make = partial(_call, func, args, kwargs)
    return _child(logits, x.reshape(*shape[:-1], x.shape[-1]), logits.dtype, make)


def _indexed(func: Any, logits: Logits, index: Any) -> Logits | None:
    """What lies at an index of leading dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(part is ... or isinstance(part, (int, slice)) for part in parts)
    whole = parts[-1:] == (slice(None),)  # of the vocabulary, if the index goes so far
    if parts[-1:] == (...,):
        leading = len(parts) - 1 < logits.dim()
    elif ... in parts or len(parts) == logits.dim():
        leading = whole
    else:
        leading = len(parts) < logits.dim()
    if not (simple and leading and parts.count(...) <= 1):
        return None
    return _child(logits, logits.parts[0][index], logits.dtype, partial(_call, func, (index,), {}))


def _cast(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Logits | None:
    """The same values in a dtype that holds them exactly, on the same device."""
    options = (*args, *kwargs.values())
    dtypes = [option for option in options if isinstance(option, torch.dtype)]
    if func in _FLOATS:
        dtypes.append(_FLOATS[func])
    known = (torch.dtype, torch.device, bool, type(None))
    places = [option for option in options if isinstance(option, torch.device)]
    if not all(isinstance(option, known) for option in options):
        return None
    if any(torch.empty(0, device=place).device != logits.device for place in places):
        return None
    dtype = dtypes[0] if dtypes else logits.dtype
    if torch.promote_types(dtype, logits.dtype) != dtype:
        return None
    if dtype == logits.dtype and not kwargs.get("copy"):
        return logits
    return _child(logits, logits.parts[0], dtype, lambda values: values.to(dtype))


def _detached(func: Any, logits: Logits) -> Logits:
    x, weight, bias = (None if t is None else t.detach() for t in logits.parts)
    assert x is not None
    assert weight is not None
    make = lambda: logits.values().detach()  # noqa: E731
    return Logits.of(x, weight, bias, logits.dtype, logits.check, make)


def _call(func: Any, args: Any, kwargs: Any, values: Tensor) -> Tensor:
    result: Tensor = func(values, *args, **kwargs)
    return result


def _cross_entropy(
    func: Any,
    logits: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` of rows of logits, with classes as targets that are not weighted."""
    plain = weight is None and size_average is None and reduce is None
    rows = target.dtype == torch.int64 and target.shape == logits.shape[:-1] and target.dim() == 1
    if not (plain and rows and reduction in ("none", "sum", "mean")):
        return None
    loss: Tensor = CrossEntropyFunction.apply(
        *logits.parts, target, ignore_index, label_smoothing, reduction != "none"
    )
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    autocast = torch.is_autocast_enabled(logits.device.type)  # which takes losses as they are
    return loss if autocast else loss.to(logits.dtype)


def _argmax(func: Any, logits: Logits, dim: int | None = None) -> Tensor | None:
    """The classes of the largest logits, which are computed for a part of the tokens at a time."""
    if dim not in (-1, logits.dim() - 1):
        return None
    logits.check()
    x, weight, bias = logits.parts
    parts = torch.split(flat(x), part_tokens(len(weight)))
    return torch.cat([_linear(part, weight, bias).argmax(-1) for part in parts]).view(x.shape[:-1])


def _check(*known: tuple[Tensor, int]) -> None:
    if any(tensor._version != version for tensor, version in known):
        raise UsageError(
            "logits were first read after an optimizer step changed the weights that they are of; "
            "read them before it."
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The stock logits of x, which is in the dtype that autocast computes them in."""
    with no_autocast(x.device):
        return F.linear(x, cast_weight(weight, x.dtype), None if bias is None else bias.to(x.dtype))


_FLOATS = {Tensor.float: torch.float32, Tensor.double: torch.float64}
LAZY: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten, Tensor.contiguous, Tensor.clone), _reshaped),
    **dict.fromkeys((*_FLOATS, Tensor.to, Tensor.type), _cast),
    Tensor.__getitem__: _indexed,
    Tensor.detach: _detached,
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
    F.cross_entropy: _cross_entropy,
}
# What is known without the values.
FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "itemsize")),
        *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_nested", "is_quantized")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.element_size, Tensor.__len__),
        Tensor.untyped_storage,  # of no bytes, for whoever counts what modules return
        *(Tensor.is_complex, torch.is_complex, Tensor.is_contiguous, Tensor.__hash__),
    }
)


class RazorHead(RazorLayer, nn.Linear):
    """The output embeddings of a language model, whose cross-entropy never has all logits.

    lazy: whether passes that save nothing return `Logits` too; see `lazily`.
    """

    kind: ClassVar[str] = "head"
    lazy: bool = False

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        assert isinstance(module, nn.Linear)
        return module.in_features

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return isinstance(rule, Dense)

    def forward(self, input: Tensor) -> Tensor:
        gradient = input.requires_grad or self.weight.requires_grad
        if not (self.lazy or (self.saving and gradient)) or torch.compiler.is_compiling():
            return super().forward(input)
        x = to_compute_dtype(input)
        check = partial(_check, (x, x._version), (self.weight, self.weight._version))
        return Logits.of(x, self.weight, self.bias, x.dtype, check, partial(self._stock, x))

    def _stock(self, x: Tensor) -> Tensor:
        return _linear(x, self.weight, self.bias)


@contextmanager
def lazily(model: nn.Module) -> Iterator[None]:
    """Inside it, razor heads compute no logits before they are needed, even in evaluation."""
    found = [module for module in model.modules() if isinstance(module, RazorHead)]
    for head in found:
        head.lazy = True
    try:
        yield
    finally:
        for head in found:
            del head.lazy


def heads(model: nn.Module) -> frozenset[nn.Module]:
    """The linear layers that the language models in `model` name as their output embeddings."""
    found = set()
    for module in model.modules():
        if callable(name := getattr(type(module), "get_output_embeddings", None)):
            try:
                found.add(name(module))
            except (AttributeError, NotImplementedError):
                continue
    return frozenset(head for head in found if type(head) in (nn.Linear, RazorHead))


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {}  # its type is nn.Linear; `heads` finds it
