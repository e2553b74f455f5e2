"""Recognizes gated MLPs of any class by their values: down(f(gate(x)) * up(x)), in any spelling.

gate and up may be halves of the output of one layer. down may be missing. A module that computes
f(gate(x)) alone is recognized too.
"""

import copy
import dis
from collections.abc import Callable, Iterator
from functools import cache
from inspect import unwrap
from itertools import permutations, product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from razorctl.layers.base import LayerSettings, RazorLayer, stock_type
from razorctl.layers.by_type import razor_of, razor_of_module
from razorctl.layers.kinds import activation
from razorctl.layers.kinds.gated_mlp import GatedMLP
from razorctl.layers.recognition.called_functions import twin_of
from razorctl.ops.functions import FUNCTIONS
from razorctl.rules.base import Rule, Rules

WIDTH = 6  # columns of the example


class Parts(NamedTuple):
    """The names of the modules of a gated MLP.

    Args:
        function: the name of f.
        act: the module f; "" if the forward calls a function.
        layers: gate and up, or one layer that computes both.
        gate_first: whether the first half of that layer's output is gate.
        down: the layer after the product; "" without one.
        inside, outside: the other modules, such as dropout, before and after `down`, in order.
    """

    function: str
    act: str
    layers: tuple[str, ...]
    gate_first: bool
    down: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]

    def activation(self, module: nn.Module, gate: Tensor) -> Tensor:
        """f(gate) in a module with these parts."""
        if self.act:
            y: Tensor = getattr(module, self.act)(gate)
            return y
        return FUNCTIONS[self.function].forward(gate)

    def run(
        self, module: nn.Module, x: Tensor, gated: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The forward of a module with these parts; `gated` computes the product."""
        made = [getattr(module, name)(x) for name in self.layers]
        if len(made) == 1:
            made = list(made[0].chunk(2, dim=-1))
        y = gated(*made) if self.gate_first else gated(*made[::-1])
        for name in self.inside:
            y = getattr(module, name)(y)
        y = getattr(module, self.down)(y) if self.down else y
        for name in self.outside:
            y = getattr(module, name)(y)
        return y


class OtherGatedMLP(GatedMLP):
    """A gated MLP of any class. razor_parts: the names of its modules."""

    razor_parts: Parts

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        parts = parts_of(module)
        super().attach(module, rules, settings)
        module.razor_parts = parts  # type: ignore[assignment]

    def detach(self) -> None:
        del self.razor_parts
        super().detach()

    @property
    def function(self) -> str:  # type: ignore[override]
        """The name of f."""
        return self.razor_parts.function

    def of_gate(self, gate: Tensor) -> Tensor:
        return self.razor_parts.activation(self, gate)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not self.saving:
            return self.stock(x, *args, **kwargs)
        return self.razor_parts.run(self, x, self.gated)


class Projected(RazorLayer):
    """A linear layer followed by an activation function, in any spelling.

    razor_function: the module with an identity in place of the layer, in a tuple, so that it is no
    submodule.
    """

    kind: ClassVar[str] = "activation"
    partial = True
    razor_function: tuple[nn.Module]

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        function, razor = _of_linear(module)
        assert razor is not None
        razor.attach(function, rules, settings)
        super().attach(module, rules, settings)
        vars(module)["razor_function"] = (function,)

    def detach(self) -> None:
        super().detach()
        del self.razor_function

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(x)
        y: Tensor = self.razor_function[0].forward(next(self.children())(x))  # no hooks
        return y


def by_values(module: nn.Module) -> type[RazorLayer] | None:
    """The razor class of a gated MLP, or of a linear layer with an activation; else None."""
    if parts_of(module) is not None:
        return OtherGatedMLP
    return None if _of_linear(module)[1] is None else Projected


def _of_linear(module: nn.Module) -> tuple[nn.Module, type[RazorLayer] | None]:
    """A copy of a module without its only linear layer, and the razor class of that copy."""
    kind, modules = stock_type(module), module._modules
    layers = [name for name, part in modules.items() if part and _linear(stock_type(part), part)]
    if module._parameters or module._buffers or layers != list(modules) or len(layers) != 1:
        return module, None
    inner = kind.__new__(kind)  # not of the class that FSDP2 makes
    vars(inner).update(vars(module), training=True, _modules={layers[0]: _Affine(-1, 0)})
    razor = activation.by_values(lambda x: kind.forward(inner, -x))  # x only if the layer is first
    inner._modules = {layers[0]: nn.Identity()}
    return inner, razor


def parts_of(module: nn.Module) -> Parts | None:
    """The parts of a gated MLP; None for any other module.

    Its forward runs on an example, with small layers and with stand-ins for other modules.
    """
    kind: Any = stock_type(module)  # mypy takes it for unhashable
    modules = module._modules
    if module._parameters or module._buffers or None in modules.values() or not _multiplies(kind):
        return None
    kinds = {name: stock_type(part) for name, part in modules.items() if part is not None}
    layers = [name for name, kind in kinds.items() if _linear(kind, modules[name])]
    acts = [(name, f) for name in kinds if (f := _function(modules[name]))]
    others = [name for name in kinds if name not in (*layers, *dict(acts))]
    if not 1 <= len(layers) <= 3 or len(acts) > 1 or len(others) > 3:
        return None
    if len({getattr(module, name).weight.dtype for name in layers}) > 1:
        return None
    for parts in _candidates(layers, others, acts or [("", f) for f in FUNCTIONS]):
        if _same(kind.forward, _twin(module, parts), parts):
            return parts
    return None


@cache
def _multiplies(kind: type[nn.Module]) -> bool:
    """Whether the forward of a type multiplies, and does not call dropout as a function."""
    twin, code = twin_of(kind.forward), getattr(unwrap(kind.forward), "__code__", None)
    steps = [] if code is None else dis.get_instructions(code)
    return not (twin and twin.drops) and any(
        step.opname.startswith("BINARY") and step.argrepr == "*" for step in steps
    )


def _linear(kind: type[nn.Module], layer: nn.Module | None) -> bool:
    """Whether a layer multiplies by one weight; experts have several."""
    razor = razor_of(kind)
    return razor is not None and razor.kind == "linear" and hasattr(layer, "weight")


def _function(act: nn.Module | None) -> str | None:
    """The name of the activation function that a module computes, else None."""
    razor = None if act is None else razor_of_module(act)
    return None if razor is None or act is None else razor.function_of(act)


def _candidates(
    layers: list[str], others: list[str], acts: list[tuple[str, str]]
) -> Iterator[Parts]:
    """The roles that the modules may have in a gated MLP. acts: (module name, function name)."""
    for names, order in product(permutations(layers), permutations(others)):
        for joined in (True, False):
            first = names[:1] if joined else names[:2]
            if len(names) - len(first) not in (0, 1):
                continue
            down = names[-1] if names[len(first) :] else ""
            for count in range(len(order) + 1):
                places = order[:count], order[count:]
                for act, function in acts:
                    for gate_first in (True, False) if joined else (True,):
                        yield Parts(function, act, first, gate_first, down, *places)


class _Affine(nn.Module):
    """A stand-in for a module, such as dropout."""

    def __init__(self, factor: float, shift: float) -> None:
        super().__init__()
        self.factor, self.shift = factor, shift

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


def _twin(module: nn.Module, parts: Parts) -> nn.Module:
    """A copy of a module with small layers, for an example of WIDTH columns."""
    twin = copy.copy(module)
    twin.training, twin._modules = True, dict(module._modules)
    for number, name in enumerate((*parts.layers, *filter(None, [parts.down]))):
        out = WIDTH * (2 if len(parts.layers) == 1 and name in parts.layers else 1)
        layer = nn.Linear(WIDTH, out, device="meta")  # so that no random numbers are drawn
        weight = torch.arange(out * WIDTH, device="cpu", dtype=torch.float32) + 31 * number
        layer.weight = nn.Parameter((weight**1.1).sin().view(out, WIDTH), False)
        layer.bias = nn.Parameter((weight[:out] * 0.7).cos(), False)
        twin._modules[name] = layer
    for number, name in enumerate((*parts.inside, *parts.outside)):
        twin._modules[name] = _Affine(0.5 + number, 1)
    return twin


def _same(forward: Callable[..., Any], twin: nn.Module, parts: Parts) -> bool:
    """Whether the twin's forward equals `parts.run`, to the bit."""
    x = torch.linspace(-2, 2, 4 * WIDTH, device="cpu").view(2, 2, WIDTH).sin()

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        y: Tensor = parts.activation(twin, gate) * up
        return y

    for dtype in (None, torch.bfloat16):
        try:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                want, got = forward(twin, x), parts.run(twin, x, gated)
        except Exception:
            return False
        if not (isinstance(want, Tensor) and want.dtype == got.dtype and torch.equal(want, got)):
            return False
    return True
