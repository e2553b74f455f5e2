"""The base of every razor layer.

A razor class adds no parameter or buffer. It takes over a module by assignment to `__class__`, so
parameters, state-dict keys, hooks, deepcopy and pickle stay what they were. The module's new class
inherits from the razor class and the stock class. It is created with the first such module.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from razorctl.errors import UsageError
from razorctl.layers.autocast import compute_dtype, to_compute_dtype
from razorctl.layers.own_forward import rebind
from razorctl.layers.shared_copies.memo import Memo, copy_of
from razorctl.rules.base import Rule, Rules
from razorctl.rules.derived import Derived, DerivedCopy
from razorctl.rules.packed import Packed
from razorctl.sampling.joint import Blocks
from razorctl.system.spans import packing

PARAMETRIZED = "parametrizations"  # the submodule that `torch.nn.utils.parametrize` adds


def transforming() -> bool:
    """Whether torch.func, forward-mode AD, torch.fx or torch.jit runs; they get stock layers."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    in_jit: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return in_func or forward_ad._current_level >= 0 or is_fx_symbolic_tracing() or in_jit


def in_backward() -> bool:
    """Whether a backward pass runs, which may run code of a forward pass again."""
    return torch._C._current_graph_task_id() != -1


def _no_rules(kind: str, columns: int) -> Rules | None:
    return None


@dataclass(frozen=True)
class LayerSettings:
    """The settings that the razor layers of a model share.

    Args:
        memo: the store of copies that layers share; None if each layer packs for itself.
        blocks: the draw of weights under a joint budget, else None.
        attention: the backend, as `Recipe.backend`.
        int8_weight_grad, int8_input_grad, int8_forward: as `Recipe.int8`.
        rules_of: (layer kind, number of columns) -> its rules; None if it stays stock. For the
            parts of a module that are no modules themselves.
    """

    memo: Memo | None = None
    blocks: Blocks | None = None
    attention: str = "auto"
    int8_weight_grad: bool = False
    int8_input_grad: bool = False
    int8_forward: bool = False
    rules_of: Callable[[str, int], Rules | None] = _no_rules


class RazorLayer(nn.Module):
    """Base of the razor classes: in training, a layer stores activations by one of its `rules`.

    kind: layer kind, as `Method.rules` names it. memo: see `LayerSettings`. place: the name of the
    module in its model, for messages. partial: whether only some functions of it are replaced.
    rewrites: whether it reimplements the stock forward; then that forward must be a known one.
    """

    kind: ClassVar[str]
    partial: ClassVar[bool] = False
    rewrites: ClassVar[bool] = True
    rules: Rules
    memo: Memo | None = None
    place: str = ""

    @classmethod
    def rule_kind(cls, module: nn.Module) -> str:
        """The layer kind whose rule `module` gets."""
        return cls.kind

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        """The number of columns that the rule of `module` will see; 1 if no column is drawn."""
        return 1

    @classmethod
    def function_of(cls, module: nn.Module) -> str | None:
        """The name of an activation function in `ops.functions.FUNCTIONS`, else None."""
        return None

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        """Whether this class can replace `module`, given that rule."""
        return True

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        """Whether the modules inside `module` stay stock, as it is recomputed as a whole."""
        return False

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        """Takes over a module of the stock type, until `detach`."""
        _become(module, _joined(cls, stock_type(module)))
        module.rules, module.memo = rules, settings.memo  # type: ignore[assignment]

    def detach(self) -> None:
        """Gives the module its stock class back."""
        del self.rules, self.memo
        for name in ("place", "logit_bits", "checked"):
            vars(self).pop(name, None)
        _become(self, stock_type(self))

    def stock(self, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of the stock class; in a torch.fx trace, a call of this module."""
        if args and isinstance(args[0], Proxy) and stock_type(self).__module__.startswith("torch."):
            tracer: Any = args[0].tracer
            made: Tensor = tracer.create_proxy(
                "call_module", tracer.path_of_module(self), args, kwargs
            )
            return made
        y: Tensor = super().forward(*args, **kwargs)
        return y

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Names both base classes, since the joined class cannot be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        return _blank, type(self).__bases__, *reduced[2:]

    @property
    def saving(self) -> bool:
        """Whether this forward pass stores for backward; otherwise the stock forward runs."""
        return self.training and self.may_save

    @property
    def may_save(self) -> bool:
        """Whether this forward pass may store for backward, in training or eval mode.

        A parametrized weight is computed at each access, so the stock forward reads it. torch.func
        and torch.fx transform only stock layers.
        """
        if not torch.is_grad_enabled() or PARAMETRIZED in self._modules:
            return False
        return torch.compiler.is_compiling() or not transforming()

    def derived(self, *views: Tensor, by: object = None) -> tuple[Derived, ...]:
        """The derived activations that are offered for `views`.

        Empty if the rule of this layer recomputes nothing, or if one of them is not offered. by:
        the reader, in place of this layer, if it will look for another view of the same tensor.
        """
        if self.memo is None or not self.rules.of(compute_dtype(views[0])).again:
            return ()
        return self.memo.derived(views, self if by is None else by)

    def derived_rows(self, x: Tensor) -> Derived | None:
        """The derived activation offered for `x`, as rows in the dtype of a GEMM, else None."""
        derived, dtype = self.derived(x), compute_dtype(x)
        if not derived:
            return None
        if x.is_contiguous():
            return derived[0].rows(dtype)
        return DerivedCopy(flat_shape(x), dtype, derived)

    def copy_rows(self, input: Tensor, x: Tensor) -> Packed:
        """The copy of `input` [..., columns] as rows in the dtype of a GEMM: derived, or a new one.

        x: the input; if it has been cast, in that dtype.
        """
        return self.derived_rows(input) or copy_of(flat(to_compute_dtype(x.detach())), self.rules)

    def shared(self, input: Tensor, x: Tensor, layout: Hashable) -> tuple[Packed, bool]:
        """The copy of `input` in a layout, and whether another layer packed it.

        x: as for `copy_rows`, which packs a copy that the memo does not have.
        """
        copy = None if self.memo is None else self.memo.find(input, layout, self)
        if copy is not None:
            return copy, True
        with packing(), torch.no_grad():
            copy = self.copy_rows(input, x)
        return copy if self.memo is None else self.memo.offer(input, layout, copy, self), False


Swaps = dict[type[nn.Module], type[RazorLayer]]


_JOINED: dict[tuple[type, type, Any], type[RazorLayer]] = {}  # the key has the forward: patches


def _joined(razor: type[RazorLayer], stock: type[nn.Module]) -> type[RazorLayer]:
    """The class that inherits from a razor class and a stock class."""
    key = razor, stock, stock.forward
    if key not in _JOINED:
        attributes = {"__module__": razor.__module__, "__doc__": razor.__doc__}
        _JOINED[key] = type(f"Razor{stock.__name__}", (razor, stock), attributes)
    return _JOINED[key]


def _blank(razor: type[RazorLayer], stock: type[nn.Module]) -> RazorLayer:
    """A module of the joined class without attributes; pickle sets them."""
    joined = _joined(razor, stock)
    return joined.__new__(joined)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Changes the class of a module to `kind`, and rebinds the forward that accelerate stored."""
    before = type(module)
    module.__class__ = _replaced(module, kind)
    rebind(module, before)


def _replaced(module: nn.Module, kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` with what FSDP2 or parametrize added to the module's class."""
    own = type(module)
    bases: tuple[type, ...]
    if _by_fsdp(own):
        name, bases = f"FSDP{kind.__name__}", (own.__bases__[0], kind)
    elif PARAMETRIZED in module._modules:  # its parametrized tensors are properties of the class
        name, bases = f"Parametrized{kind.__name__}", (kind,)
    else:
        return kind
    skip = ("__dict__", "__weakref__", "__doc__")
    return type(name, bases, {key: value for key, value in vars(own).items() if key not in skip})


def _by_fsdp(kind: type) -> bool:
    """Whether FSDP2 made this class, by putting FSDPModule before a module's class."""
    return kind.__bases__[0].__name__ == "FSDPModule"


def stock_type(module: nn.Module) -> type[nn.Module]:
    """The type of a module, or its type before a razor class or FSDP2 took it over."""
    return stock_base(type(module))


def stock_base(kind: type[nn.Module]) -> type[nn.Module]:
    """The first module class among the bases that is neither a razor class nor FSDP2's."""
    bases: Any = kind.__mro__
    modules = (base for base in bases if issubclass(base, nn.Module))
    stock: type[nn.Module] = next(
        base for base in modules if not issubclass(base, RazorLayer) and not _by_fsdp(base)
    )
    return stock


class WeightLayer(RazorLayer):
    """A layer that computes its weight gradient from a packed copy of its input.

    blocks: the draw of weights under a joint budget, where this layer's weight has the index
    `block`; None if every weight gets a gradient.
    """

    weight: Tensor
    blocks: Blocks | None = None
    block: int = 0

    @classmethod
    def drawable(cls, module: nn.Module) -> bool:
        """Whether a joint budget may draw the weight of a stock module."""
        weight = getattr(module, "weight", None)
        return weight is not None and weight.requires_grad

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, WeightLayer)
        if settings.blocks is not None and cls.drawable(module):
            module.blocks, module.block = settings.blocks, settings.blocks.join()

    def detach(self) -> None:
        for name in ("blocks", "block"):
            vars(self).pop(name, None)
        super().detach()

    def pack(
        self, input: Tensor, x: Tensor, layout: Hashable
    ) -> tuple[Tensor, float, Packed | None]:
        """Packs the input, if the weight gets a gradient in this step.

        x, layout: see `shared`. Returns the weight, the probability with which it was drawn, and
        the copy. A weight without a gradient is returned detached, with None for the copy. The
        probability is 1 without a joint budget, and 0 for a weight that is not drawn.
        """
        weight, p = self.weight, 1.0
        if self.blocks is not None:
            p = self.blocks.probability(self.block)
        if not (p and weight.requires_grad):
            return weight.detach(), p, None
        copy, shared = self.shared(input, x, layout)
        if self.blocks is not None:
            self.blocks.packed(self.block, 0 if shared else input.numel())
        return weight, p, copy

    def weight_grad(self, packed: Packed, products: Sequence[Tensor], p: float) -> Tensor:
        """The gradient of the weight, [..., columns], from the products of the copy's operands.

        The joint budget is told its norm. p: the probability with which the weight was drawn.
        """
        if self.memo is not None:
            self.memo.clear()  # a later forward pass packs again, even the same tensor
        dw = packed.spread(*products)
        return dw if self.blocks is None else self.blocks.observe(self.block, p, dw)


def save(ctx: Any, *parts: Tensor | Packed | None) -> None:
    """Saves `parts` for backward, where `saved` returns them.

    Every tensor goes through `save_for_backward`, as hooks of autograd see no others. A compiled
    program also keeps the parts whole: tracing how they are taken apart took most of its time.
    """
    ctx.parts = ctx.forms = None
    if torch.compiler.is_compiling():
        ctx.parts = parts
        nested = [part.tensors if isinstance(part, Packed) else (part,) for part in parts]
        ctx.save_for_backward(*[tensor for tensors in nested for tensor in tensors])
        return
    tensors: list[Tensor | None] = []
    forms: list[Packed | None] = []
    for part in parts:
        if isinstance(part, Packed):
            part.saved_by(ctx)
            forms.append(part.holding(repeat(None)))
            tensors.extend(part.tensors)
        else:
            forms.append(None)
            tensors.append(part)
    ctx.forms = forms
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> list[Any]:
    """The arguments of `save`, in the same order."""
    if ctx.parts is not None:
        return list(ctx.parts)
    tensors = iter(unpacked(ctx))
    return [next(tensors) if form is None else form.holding(tensors) for form in ctx.forms]


def unpacked(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors that autograd saved; raises UsageError if one has changed in place since."""
    try:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UsageError(changed_since(_layer_of(ctx))) from error
    return tensors


def changed_since(name: str) -> str:
    """The error message for a changed tensor that module `name` needs in the backward pass."""
    return (
        f"a weight, a mask or an input of {name} was changed in place between the forward "
        "pass and the backward pass, which needs it; change it after the backward pass, or change "
        "a clone of it."
    )


def _layer_of(ctx: Any) -> str:
    """The name and class of the layer of an autograd function, if they are known."""
    layers = [layer for form in ctx.forms if form is not None for layer in form.changed()]
    layer = next(iter(layers), getattr(ctx, "layer", None))
    return getattr(ctx, "label", "a layer") if layer is None else name_of(layer)


def name_of(layer: RazorLayer) -> str:
    """The name and class of a layer, for messages."""
    return f"{layer.place or 'a layer'} ({stock_type(layer).__name__})"


def flat(x: Tensor) -> Tensor:
    """`x` as [rows, columns]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)


def flat_shape(x: Tensor) -> torch.Size:
    """The shape of `flat(x)`."""
    return torch.Size((x.shape[:-1].numel(), x.shape[-1]))


def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` in a shape; `x` itself if it has that shape, since a view costs host time."""
    return x if x.shape == shape else x.view(shape)
