"""Gated MLPs, down(f(gate) * up): one copy each of gate and up serves their gradients and down.

x -- gate_proj -- gate -- f --+
 +-- up_proj ---- up -------- * -- y -- down_proj      y = f(gate) * up, from the copies

Stock stores gate, f(gate), up and y.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, flat, save, saved
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.mlp_tiles import parts_of
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad
from razorctl.rules.base import Rule
from razorctl.rules.derived import Derived, DerivedCopy
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing


class GatedFunction(torch.autograd.Function):
    """y = f(gate) * up, the stock forward; both gradients come from the packed values."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        layer: "GatedMLP",
        function: str,
        copies: Sequence[Packed],
    ) -> Tensor:
        ctx.function, ctx.layer = function, layer
        save(ctx, *copies)
        return layer.of_gate(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = saved(ctx)
        if parts := parts_of(dy, gate):
            return *parts, None, None, None
        rows, dgate, dup = flat(dy), None, None
        with no_autocast(dy.device):
            if isinstance(gate, Derived) and all(ctx.needs_input_grad[:2]):
                x, y = gate.values().to(dy.dtype), up.values().to(dy.dtype)
                dgate, dup = (t.view(dy.shape) for t in gated_grad(rows, x, y, ctx.function))
                return dgate, dup, None, None, None
            if ctx.needs_input_grad[0]:
                dact = rows * up.values().to(dy.dtype)
                dgate = gate.function_grad(ctx.function, dact).view(dy.shape)
                del dact
            if ctx.needs_input_grad[1]:
                act = FUNCTIONS[ctx.function].forward(gate.values().to(dy.dtype))
                dup = act.mul_(rows).view(dy.shape)
        return dgate, dup, None, None, None


class GatedMLP(RazorLayer):
    """Base of razor gated MLPs. function: the name of f."""

    kind: ClassVar[str] = "activation"
    function: str

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    def of_gate(self, gate: Tensor) -> Tensor:
        """f(gate)."""
        raise NotImplementedError

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """f(gate) * up; its copy is offered to the linear layer after it."""
        same_kind = gate.dtype == up.dtype and gate.shape == up.shape
        if not (same_kind and (gate.requires_grad or up.requires_grad)):
            return self.of_gate(gate) * up
        rule, function = self.rules.of(gate.dtype), self.function
        with packing(), torch.no_grad():
            copies: Sequence[Packed] = [part.rows(part.dtype) for part in self.derived(gate, up)]
            copies = copies or [rule.pack(flat(part.detach())) for part in (gate, up)]
        y: Tensor = GatedFunction.apply(gate, up, self, function, copies)
        dtype = to_compute_dtype(y.detach()[:0]).dtype
        of_y = copies[0].of_gated(copies[1], function)
        if self.memo is not None and of_y is not None and dtype == y.dtype:
            self.memo.offer(y, layouts.of_rows(dtype), of_y)
            if self.memo.derives:  # for other layer kinds
                self.memo.derive(y, DerivedCopy(y.shape, y.dtype, (of_y,)))
        return y
