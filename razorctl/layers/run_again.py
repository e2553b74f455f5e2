"""Layers that run again in the backward pass, from a copy of their input.

y = f(x, w), the stock forward, which keeps nothing; x' is the copy of x. In the backward pass
f(x', w) runs again with a graph of its own, and dx and dw are those of f at x'. So f may be any
function; what reads y there reads that of the same run.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razorctl.layers import layouts
from razorctl.layers.autocast import AVAILABLE, compute_dtype, no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, flat, save, saved
from razorctl.layers.fused_attention import random_state, replaying
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.sharded import gather
from razorctl.layers.sharing import copy_of
from razorctl.rules.derived import Derived
from razorctl.rules.packed import Packed
from razorctl.spans import packing


@dataclass(frozen=True)
class DerivedRun(Derived):
    """The output of a layer, which runs again. others: all of the layer's parameters.

    Args:
        layer: the layer.
        of: the shape and the dtype of its input.
        through: whether the input gets a gradient.
        autocast: the dtype of autocast as it ran, None without autocast.
        state: of the random number generator before it ran.
    """

    layer: Any = None
    of: tuple[torch.Size, torch.dtype] = torch.Size(), torch.float32
    through: bool = False
    autocast: torch.dtype | None = None
    state: Tensor | None = None

    def run(self) -> tuple[list[Tensor], Tensor]:
        """The values of the copy as a leaf of a graph, if they get a gradient, and the output."""
        for parameter in self.others:
            if parameter is not None:
                gather(self.layer, parameter)
        shape, dtype = self.of
        x = self.sources[0].values().to(dtype).reshape(shape)
        x = x.detach().requires_grad_(self.through)
        autocast: Any = nullcontext()
        if self.autocast is not None:
            autocast = torch.autocast(x.device.type, self.autocast)
        with torch.enable_grad(), replaying(self.state, x.device), autocast:
            return [x] * self.through, self.layer.stock(x)

    def values(self) -> Tensor:
        assert self.cell is not None
        y: Tensor = self.cell.read(self.run)[1]
        return self._shaped(y.detach())

    codes = Packed.codes

    def gradients(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input, if it gets one, and of the trainable parameters."""
        assert self.cell is not None
        inputs, y = self.cell.take(self.run)
        inputs = [*inputs, *trained(self.layer)]
        given: tuple[Tensor | None, ...] = torch.autograd.grad(y, inputs, dy, allow_unused=True)
        return given


class RunAgainFunction(torch.autograd.Function):
    """y = f(x, w), with the gradients of f at x'; `made` gets the form of y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: "RunAgain", copy: Packed, made: list[DerivedRun], *_: Tensor
    ) -> Tensor:
        ctx.layer = layer
        device = x.device.type
        on = device in AVAILABLE and torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if on else None
        state = random_state(x.device)
        y: Tensor = layer.stock(x)
        form = DerivedRun(
            y.shape,
            y.dtype,
            (copy,),
            tuple(p.detach() for p in layer.parameters()),
            layer=layer,
            of=(x.shape, x.dtype),
            through=ctx.needs_input_grad[0],
            autocast=autocast,
            state=state,
        )
        made.append(form.using(next(iter(trained(layer)), None), layer))
        save(ctx, made[0])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (form,) = saved(ctx)
        if ctx.layer.memo is not None:
            ctx.layer.memo.clear()  # a later forward pass packs again, even the same tensor
        with no_autocast(dy.device):
            gradients = list(form.gradients(dy))
        dx = gradients.pop(0) if form.through else None
        return dx, None, None, None, *gradients


class RunAgain(RazorLayer):
    """Base of layers that run again; the modules inside stay stock.

    The input is packed as rows. Anything else than one input runs the stock forward, which keeps
    in full, and so does a compiled program.
    """

    @classmethod
    def covers(cls, module: torch.nn.Module) -> bool:
        return True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not self.runs_again(x):
            return self.stock(x, *args, **kwargs)
        made: list[DerivedRun] = []
        y: Tensor = RunAgainFunction.apply(x, self, self.copy(x), made, *trained(self))
        if self.memo is not None and self.memo.derives:
            self.memo.derive(y, made[0])
        return y

    def runs_again(self, x: Tensor) -> bool:
        """Whether this forward pass keeps a copy of the input x [..., columns] alone."""
        if torch.compiler.is_compiling() or not self.saving:
            return False
        rows = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1
        return rows and (x.requires_grad or bool(trained(self)))

    def copy(self, x: Tensor) -> Packed:
        """The copy of the input, which other layers may have."""

        def make() -> Packed:
            with packing(), torch.no_grad():
                return self.derived_rows(x) or copy_of(
                    flat(to_compute_dtype(x.detach())), self.rules
                )

        if self.memo is None:
            return make()
        return self.memo.pack(x, layouts.of_rows(compute_dtype(x)), make, self)[0]


def trained(layer: torch.nn.Module) -> list[Tensor]:
    """The parameters of a layer that get a gradient."""
    return [p for p in layer.parameters() if p.requires_grad]
