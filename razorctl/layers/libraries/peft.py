"""PEFT's adapters of linear layers: LoRA's y = base(x) + s B(A(dropout(x))), and any other.

LoRA's parts are linear layers. Other adapters would store all that they compute, often whole
weights, so they are recomputed.
"""

from typing import Any, ClassVar

from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.by_type import linear_types
from razorctl.layers.known_forwards import is_known
from razorctl.layers.recompute.attention import CodeLayer
from razorctl.rules.base import Rule
from razorctl.rules.derived_norms import DerivedSum


class Adapter(CodeLayer):
    """Any adapter of a linear layer, recomputed from a copy of its input."""

    kind: ClassVar[str] = "linear"
    feeds = True
    merged: bool
    disable_adapters: bool

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        assert isinstance(module, BaseTunerLayer)
        return rule.tiled and stock_type(module.get_base_layer()) in linear_types()

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        return True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.merged or self.disable_adapters:
            return self.stock(x, *args, **kwargs)
        return super().forward(x, *args, **kwargs)


class AdaptedLinear(Adapter):
    """LoRA of a linear layer; its output is derived from the copy of its input.

    Its parts are linear layers with their own rules. Variants such as DoRA are recomputed.
    """

    base_layer: nn.Module
    lora_A: Any  # noqa: N815 - the name is PEFT's
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_variant: Any
    active_adapters: Any
    scaling: Any
    _cast_input_dtype: Any

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.again if not cls.covers(module) else super().fits(module, rule)

    @classmethod
    def covers(cls, module: nn.Module) -> bool:
        variants: Any = module.lora_variant
        return bool(variants)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.covers(self):
            again: Tensor = super().forward(x, *args, **kwargs)
            return again
        names = [name for name in self.active_adapters if name in self.lora_A]
        plain = not (args or kwargs or self.merged or self.disable_adapters) and len(names) == 1
        if not (self.saving and plain):
            return self.stock(x, *args, **kwargs)
        (name,) = names
        a, b, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        cast: Tensor = self._cast_input_dtype(x, a.weight.dtype)
        if isinstance(dropout, nn.Identity) and compute_dtype(cast) == x.dtype:
            cast = x  # autocast casts it back
        # The adapter comes first: it packs the copy that the frozen layer then finds.
        f: Tensor = b(a(dropout(cast)))
        base: Tensor = self.base_layer(x)
        y: Tensor = (base + f * self.scaling[name]).to(base.dtype)
        if self.memo is not None:
            sources = self.memo.both(base, f, self)
            if sources:
                form = DerivedSum(y.shape, y.dtype, sources, factor=self.scaling[name])
                self.memo.derive(y, form)
        return y


def recognized(kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of a PEFT adapter class, else None."""
    if kind is lora.Linear and is_known(kind):
        return AdaptedLinear
    return Adapter if issubclass(kind, BaseTunerLayer) else None
