"""Dropout and activation functions of torch that a module's forward calls as functions.

forward: F.dropout(self.fc2(F.relu(self.fc1(x))), self.p, self.training)

A razor module runs the code of its stock forward with other globals. In these the functions store
what the corresponding razor layers store. Everything else is stock.
"""

import dis
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from inspect import unwrap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.attention.twin import decorated, run_in, running
from razorctl.layers.base import LayerSettings, RazorLayer, stock_base
from razorctl.layers.kinds.activation import (
    GELU,
    Hardswish,
    LeakyReLU,
    ReLU,
    ReLU6,
    SiLU,
    by_values,
)
from razorctl.layers.kinds.dropout import dropped
from razorctl.rules.base import Rule, Rules

# Function of torch -> the stock layer that computes the same, and its razor class.
FUNCTIONS: dict[Any, tuple[Callable[..., nn.Module], type[RazorLayer]]] = {
    F.relu: (nn.ReLU, ReLU),
    torch.relu: (nn.ReLU, ReLU),
    F.gelu: (nn.GELU, GELU),
    F.silu: (nn.SiLU, SiLU),
    F.hardswish: (nn.Hardswish, Hardswish),
    F.relu6: (nn.ReLU6, ReLU6),
    F.leaky_relu: (nn.LeakyReLU, LeakyReLU),
}
DEFAULTS = {"inplace": False, "approximate": "none", "negative_slope": 0.01}
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"inplace": True}, {"approximate": "tanh"})
DEEP = 2  # levels of calls of functions in the same file, starting from a forward


class Called(nn.Module):
    """A stock layer that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with a mask in bits."""
    module = running().module
    if inplace or not training or module is None:
        return F.dropout(x, p, training, inplace)
    return dropped(module, x, p)


def _replacing(stock: Any) -> Callable[..., Tensor]:
    """A replacement of `stock` that calls a layer of the running module."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        options = tuple((name, x) for name, x in kwargs.items() if x != DEFAULTS.get(name))
        # None if the forward passed more than the input.
        module = running().module if len(args) == 1 else None
        layer = None if module is None else module.razor_functions.get((stock, options))
        y: Tensor = stock(*args, **kwargs) if layer is None else layer(*args)
        return y

    return call


class _Space:
    """A module of torch with some of its functions replaced."""

    def __init__(self, stock: Any, changed: dict[str, Any]) -> None:
        self.stock = stock
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    **{stock: _replacing(stock) for stock in FUNCTIONS},
}


def _space(stock: Any, **changed: Any) -> _Space:
    names = ("dropout", *(function.__name__ for function in FUNCTIONS))
    own = {name: vars(stock)[name] for name in names if name in vars(stock)}
    replaced = {name: REPLACED[value] for name, value in own.items() if value in REPLACED}
    return _Space(stock, replaced | changed)


_of_functional = _space(F)
_of_nn = _Space(nn, {"functional": _of_functional})
SPACES: dict[Any, _Space] = {F: _of_functional, nn: _of_nn, torch: _space(torch, nn=_of_nn)}


class Twin:
    """A copy of a function whose globals have some functions replaced.

    function: the copy, with the decorators; None if the code calls no replaced function.
    activations: the activation functions that it calls. drops: whether it calls dropout. inner: the
    twins of the functions in the same file that it calls.
    """

    def __init__(self, whole: FunctionType, deep: int = DEEP) -> None:
        stock: FunctionType = unwrap(whole)
        self.stock, self.inner = stock, list[Twin]()
        variables, changed = stock.__globals__, dict[str, Any]()
        self.activations = dict[Any, None]()  # in the order of the code
        self.function: FunctionType | None = None
        self.drops, self.scope = False, dict[str, Any]()
        for name, value in _called(stock.__code__, variables):
            if value in REPLACED:
                at = variables[name]
                changed[name] = REPLACED[value] if at is value else SPACES[at]
                self.drops |= value is F.dropout
                if value in FUNCTIONS:
                    self.activations[value] = None
            elif isinstance(value, FunctionType) and value.__globals__ is variables:
                if _like_activation(value) and by_values(value) is not None:
                    changed[name] = _replacing(value)
                    self.activations[value] = None
                elif deep and value is not stock:
                    inner = Twin(value, deep - 1)
                    self.activations |= inner.activations
                    self.drops |= inner.drops
                    if inner.function is not None:
                        self.inner.append(inner)
                        changed[name] = inner.function
        self.replaced = {name: variables[name] for name in changed}
        self.read = [name for name in _names(stock.__code__) if name not in changed]
        if changed and not _writes(stock.__code__) and not self._passes_on():
            self.scope = {**variables, **changed}
            self.function = decorated(whole, self.scope)

    def _passes_on(self) -> bool:
        """Whether nested code, which may run after the forward, calls replaced functions."""
        codes = [value for value in self.stock.__code__.co_consts if isinstance(value, CodeType)]
        called = [call for code in codes for call in _called(code, self.stock.__globals__)]
        return any(value in (*REPLACED, *self.replaced.values()) for _, value in called)

    def current(self) -> bool:
        """Updates the other globals; False if a replaced function has been rebound meanwhile."""
        live, own = self.stock.__globals__, self.scope
        if any(live.get(name) is not value for name, value in self.replaced.items()):
            return False
        own.update({name: live[name] for name in self.read if name in live})
        return all(inner.current() for inner in self.inner)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a code object and its nested code use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _writes(code: CodeType) -> bool:
    """Whether a code object or its nested code writes to globals."""
    inside = any(_writes(value) for value in code.co_consts if isinstance(value, CodeType))
    return inside or any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(code))


def _like_activation(function: FunctionType) -> bool:
    """Whether a function takes one argument, and has "lu" or "swish" in its name."""
    name = function.__name__.lower()
    return function.__code__.co_argcount == 1 and any(word in name for word in ("lu", "swish"))


def _called(code: CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The functions that code loads, each with the global that it loads it from."""
    name, value = "", None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            name, value = step.argval, variables.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_space(value):
            value = getattr(value, step.argval, None)
        elif step.opname != "EXTENDED_ARG":
            value = None
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            yield name, value
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(constant, variables)


def _is_space(value: Any) -> bool:
    return isinstance(value, ModuleType) and value in SPACES


@cache
def twin_of(forward: Any) -> Twin | None:
    """The twin of a forward; None if it calls none of the functions."""
    if not isinstance(unwrap(forward), FunctionType):
        return None
    twin = Twin(forward)
    return twin if twin.function is not None else None


class Calling(RazorLayer):
    """A module whose forward calls dropout as a function.

    razor_twin: the twin of the stock forward. razor_functions: (activation function, options) ->
    the layer that replaces it; the layers are not submodules.
    """

    kind: ClassVar[str] = "dropout"
    partial = True
    razor_twin: ClassVar[Twin | None]
    razor_functions: dict[tuple[Any, Any], RazorLayer]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.razor_twin = twin_of(stock_base(cls).forward)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, Calling)
        twin = twin_of(stock_base(type(module)).forward)
        functions = twin.activations if twin is not None and cls.kind == "activation" else ()
        module.razor_functions = {}
        for function in functions:
            for options, layer in _layers(function, rules, settings):
                module.razor_functions[function, options] = layer

    def detach(self) -> None:
        del self.razor_functions
        super().detach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        twin = self.razor_twin
        assert twin is not None
        assert twin.function is not None
        if not self.saving or not (torch.compiler.is_compiling() or twin.current()):
            return self.stock(*args, **kwargs)
        return run_in(self, twin.function, *args, **kwargs)


class CallingActivation(Calling):
    """A module whose forward calls activation functions, and perhaps dropout."""

    kind = "activation"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise


def _layers(
    function: Any, rules: Rules | None, settings: LayerSettings
) -> Iterator[tuple[Any, RazorLayer]]:
    """Razor layers that replace an activation function, with the options of each."""
    makes, razor = FUNCTIONS.get(function, (partial(Called, function), by_values(function)))
    for options in OPTIONS:
        with suppress(TypeError):  # the layer has no such option
            layer: Any = makes(**options)
            assert razor is not None
            razor.attach(layer, rules, settings)
            yield tuple(options.items()), layer


def recognized(kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of a type whose forward calls such functions; else None.

    None for a type with `from_pretrained`: it saves the name of its class, which must not change.
    """
    if kind.__module__.partition(".")[0] == "torch" or hasattr(kind, "from_pretrained"):
        return None
    twin = twin_of(kind.forward)
    if twin is None:
        return None
    return CallingActivation if twin.activations else Calling
