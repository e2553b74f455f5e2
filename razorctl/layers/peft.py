"""PEFT's LoRA: the output of an adapted linear layer, y = base(x) + s B(A(dropout(x)))."""

from typing import Any, ClassVar

from peft.tuners import lora
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer, Swaps
from razorctl.rules.base import Rule
from razorctl.rules.derived_norms import DerivedSum


class AdaptedLinear(RazorLayer):
    """A linear layer with an adapter, whose output is made again from the copy of its input.

    Its parts are linear layers that keep by rules of their own.
    """

    kind: ClassVar[str] = "linear"
    base_layer: nn.Module
    lora_A: Any  # noqa: N815 - the name is PEFT's
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_variant: Any
    active_adapters: Any
    merged: bool
    disable_adapters: bool
    scaling: Any
    _cast_input_dtype: Any

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return module.in_features  # type: ignore[return-value]

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.again

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = not (args or kwargs or self.merged or self.disable_adapters) and len(names) == 1
        if not (self.saving and plain and not set(names) & set(self.lora_variant)):
            return self.stock(x, *args, **kwargs)
        (name,) = names
        a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        cast: Tensor = self._cast_input_dtype(x, a.weight.dtype)
        if isinstance(dropout, nn.Identity) and compute_dtype(cast) == x.dtype:
            cast = x  # autocast casts it back
        # The adapter comes first, since the frozen layer finds the copy that it makes.
        f: Tensor = b(a(dropout(cast)))
        base: Tensor = self.base_layer(x)
        y: Tensor = (base + f * self.scaling[name]).to(base.dtype)
        if self.memo is not None:
            sources = self.memo.both(base, f, self)
            if sources:
                form = DerivedSum(y.shape, y.dtype, sources, factor=self.scaling[name])
                self.memo.derive(y, form)
        return y


SWAPS: Swaps = {}
BRANCHES: dict[type[nn.Module], Any] = {}
PRE_NORM: dict[type[nn.Module], Any] = {}
LINEAR_FIRST = frozenset[type[nn.Module]]()


def recognized(kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of PEFT's linear layers; none of its other types has one."""
    return AdaptedLinear if kind is lora.Linear else None
