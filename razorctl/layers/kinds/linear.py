"""Linear layers that store their input by a rule, and can run their GEMMs in int8.

The output is the stock one unless the forward pass runs in int8. The bias gradient is exact, and so
is the input gradient unless its GEMM runs in int8.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import (
    LayerSettings,
    Swaps,
    WeightLayer,
    flat,
    name_of,
    save,
    saved,
    shaped,
)
from razorctl.layers.fsdp import gather
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.int8_cost import Int8Cost
from razorctl.layers.shared_copies.int8_gradients import Int8, Int8Gradient
from razorctl.layers.shared_copies.mlp_tiles import hidden
from razorctl.ops import weight_copies
from razorctl.ops.cast import cast_weight
from razorctl.ops.gemm import int8_linear, scaled_gemm
from razorctl.ops.int8 import int8_columns, int8_rows, inverse, roots
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.kernels import fused
from razorctl.ops.linear_operands import linear_operands
from razorctl.ops.weight_copies import Columns
from razorctl.ops.weight_grad import linear_weight_grad
from razorctl.rules.base import Rules
from razorctl.rules.derived import Derived, DerivedLinear
from razorctl.rules.packed import Packed, PackedCodes, in_codes


class Gemms:
    """The GEMMs of a linear layer's backward pass.

    Args:
        dy: [rows, out]; if both GEMMs run in int8, only its int8 copy is needed.
        weight_int8, input_int8: whether the GEMMs of dW and of dX run in int8.
        int8: the int8 copy of dy for both GEMMs, if it exists already.
        weight: [out, in]; None if dX is not needed.
        columns: the int8 copy of the weight; None until it is computed.
        dtype: of dW from an int8 GEMM; None for the dtype of its scales.
    """

    def __init__(
        self,
        dy: Tensor,
        weight_int8: bool,
        input_int8: bool,
        int8: Int8 | None = None,
        weight: Tensor | None = None,
        columns: Columns | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.dy, self.weight_int8, self.input_int8 = dy, weight_int8, input_int8
        self.weight, self.columns = weight, columns
        # The kernels need a contiguous weight. Asked before autocast is disabled: the tracer of a
        # compiled program restarts here, and would leave it disabled.
        self._fits = weight is not None and fused(dy.device) and weight.is_contiguous()
        # Not functools.cached_property, which torch.compile cannot trace.
        self._int8 = int8

    @property
    def total(self) -> Tensor:
        """dy summed over rows, [out]: the gradient of a bias."""
        return self.int8.total if self.weight_int8 or self.input_int8 else self.dy.sum(0)

    @property
    def int8(self) -> Int8:
        """dy in int8."""
        if self._int8 is None:
            self._int8 = Int8(*int8_rows(self.dy))
        return self._int8

    def exact(self, step: int) -> "Gemms":
        """The GEMMs for every `step`-th column of dy, in its dtype."""
        return Gemms(self.dy[:, ::step].contiguous(), False, False)

    def product(self, x: Tensor | Packed) -> Tensor:
        """dy^T x, [out, columns of x]."""
        int8 = self.weight_int8 and x.shape[1] > 1  # int8 copies of a single column do not pay
        if isinstance(x, PackedCodes) or (int8 and isinstance(x, Packed)):
            return self.product_of_codes(x.codes())
        x = x.values() if isinstance(x, Packed) else x
        return self.product_of_codes(in_codes(x)) if int8 else self.dy.T @ x

    def product_of_codes(self, packed: PackedCodes) -> Tensor:
        """`product`, with x given as codes."""
        operand = packed.copy, packed.function
        del packed  # so that codes of no other reader are freed before the product
        if not self.weight_int8:
            return linear_weight_grad(self.dy, *operand)
        rows, row_scale, total, largest = self.int8
        if fused(rows.device):
            wanted = self.input_int8 and self.columns is None and self._fits
            weight = self.weight if wanted else None
            dy, dy_scale, x, scale, center, *columns = linear_operands(
                rows, row_scale, largest, *operand, weight
            )
            if weight is not None:
                self.columns = columns[0], columns[1]
        else:  # one operand at a time, so that the other GEMM's does not wait in memory
            root = roots(row_scale)
            dy, dy_scale = int8_columns(self.dy, inverse(root), largest)
            x, scale, center = int8_operand(operand[0], root, operand[1])
        del operand
        dtype = self.dtype or scale.dtype
        return scaled_gemm(dy, x, dy_scale[:, None], scale, dtype, total, center)

    def input_grad(self, part: slice | None = None) -> Tensor:
        """dX = dy W, [rows, in]; part: of these rows alone."""
        assert self.weight is not None
        if not self.input_int8:
            dy = self.dy if part is None else self.dy[part]
            return dy @ cast_weight(self.weight, dy.dtype)
        rows, row_scale, *_ = self.int8
        if part is not None:
            rows, row_scale = rows[part], row_scale[part]
        if self.columns is None:
            self.columns = int8_columns(self.weight)
        return scaled_gemm(rows, self.columns[0], row_scale, self.columns[1], self.dy.dtype)


@dataclass(frozen=True)
class LinearCall:
    """A call of a linear layer, for the layer scale that reads its output y.

    Args:
        layer: the linear layer.
        x, weight, bias: the inputs of the autograd node that computed y.
        copy: the packed x.
        node: that autograd node.
    """

    layer: "Linear"
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    copy: Packed
    node: Any

    def leads_to(self, y: Tensor) -> bool:
        """Whether y is the node's output, and nothing else observes the gradient of y."""
        return y.grad_fn is self.node and not y._backward_hooks and not y.retains_grad


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with dW from the packed x (Back Razor, Sec. 3; CVPR 2024, Alg. 1).

    int8: the int8 copy of x if the forward pass runs in int8; the gradient is the exact pass's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "Linear",
        p: float,
        packed: Packed | None,
        int8: Int8 | None,
    ) -> Tensor:
        ctx.layer, ctx.p, ctx.shape = layer, p, x.shape
        ctx.int8 = layer.int8_gemms(x)
        ctx.set_materialize_grads(False)
        # Stock autocast stores a low-precision copy of the weight. The parameter adds no bytes.
        save(ctx, weight if ctx.needs_input_grad[0] else None, packed)
        if int8 is None:
            y = layer.product(x, weight, bias)
            if torch.compiler.is_compiling() or y._base is None:
                return y
            # torch refuses in-place changes of a view that a custom function returned.
            whole: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
            return whole
        with no_autocast(x.device):
            y = int8_linear(int8, layer.matrix(weight), bias, x.dtype)
        # Not a view of y, as in stock: attention recognizes q, k, v by the tensor that they view.
        out: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])
        return layer.arranged(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # a layer scale has computed the gradients
            return None, None, None, None, None, None, None
        weight, packed = saved(ctx)
        weight_int8 = ctx.int8[0] and ctx.layer.int8_weight_grad  # off if it is an output layer
        input_int8 = ctx.int8[1] and ctx.layer.int8_input_grad
        both = weight_int8 and input_int8
        int8 = dy.int8 if isinstance(dy, Int8Gradient) and both else None
        matrix = None if weight is None else ctx.layer.matrix(weight)
        rows = flat(ctx.layer.arranged(dy)) if int8 is None else dy
        columns = weight_copies.find(weight) if input_int8 else None
        narrow = ctx.layer.weight.dtype  # rounded once, as if the engine cast it
        dtype = narrow if narrow.itemsize == 2 else None
        gemms = Gemms(rows, weight_int8, input_int8, int8, matrix, columns, dtype)
        dx = dw = db = None
        tiles = hidden(packed, gemms) if ctx.needs_input_grad[0] else None
        # Gradients in dy's dtype are cast to their parameter's by the engine, as in stock.
        with no_autocast(dy.device):
            if tiles is not None:
                dx, a = tiles.run(gemms, ctx.shape, dy.dtype)
            # dW first: its unpacked input is freed before dX, which is as large, is allocated.
            if ctx.needs_input_grad[1]:
                layer = ctx.layer
                if tiles is not None:
                    products = [gemms.product_of_codes(a.pop())]
                else:
                    products = layer.int8_cost.products(gemms, packed.operands(), name_of(layer))
                dw = ctx.layer.matrix(ctx.layer.weight_grad(packed, products, ctx.p))
            if ctx.needs_input_grad[2]:
                db = gemms.total
            if ctx.needs_input_grad[0]:
                dx = shaped(gemms.input_grad(), ctx.shape) if dx is None else dx
                weight_copies.keep(weight, gemms.columns)
        return dx, dw, db, None, None, None, None


class Linear(WeightLayer):
    """Base of layers that multiply by a matrix and store their input by a rule.

    If a joint budget does not draw the weight in a step, no input is stored.
    int8_weight_grad, int8_input_grad, int8_forward: whether these GEMMs run in int8 if they have at
    least SMALLEST multiplications. Below that, int8 copies cost more time than they gain. A forward
    pass that stores nothing, as in evaluation, is always the stock one.
    """

    kind: ClassVar[str] = "linear"
    SMALLEST: ClassVar[int] = 2**26
    bias: Any  # Tensor or None
    int8_weight_grad: bool = False
    int8_input_grad: bool = False
    int8_forward: bool = False
    int8_cost: Int8Cost

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        weight: Tensor = module.weight  # type: ignore[assignment]
        return cls.matrix(weight).shape[1]

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """Views a weight as [out, in], or a gradient [out, in] in the shape of the weight."""
        return weight

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The stock output."""
        return F.linear(x, weight, bias)

    def arranged(self, t: Tensor) -> Tensor:
        """Converts between the axis order of the input and that order of the output."""
        return t

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, Linear)
        module.int8_weight_grad = settings.int8_weight_grad
        module.int8_input_grad = settings.int8_input_grad
        module.int8_forward = settings.int8_forward
        module.int8_cost = Int8Cost()

    def detach(self) -> None:
        del self.int8_weight_grad, self.int8_input_grad, self.int8_forward, self.int8_cost
        super().detach()

    @property
    def saving(self) -> bool:
        return self.rules is not None and self.training and self.may_save

    def forward(self, input: Tensor) -> Tensor:
        return self.multiplied(input, self.bias) if self.saving else self.stock(input)

    def multiplied(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """The forward pass that stores its input, with `bias` in place of the layer's own."""
        x = to_compute_dtype(input)
        weight, p, copy = self.pack(input, x, layouts.of_rows(x.dtype))
        int8 = None
        if self.int8_forward and self.large(x):
            int8 = self.int8_rows(input, flat(x.detach()))
        y: Tensor = LinearFunction.apply(x, weight, bias, self, p, copy, int8)
        if self.memo is not None and all(self.int8_gemms(x)):
            self.memo.handover.want(y)
        self.offer_call(x, weight, bias, copy, y)
        if self.memo is not None and self.memo.derives:
            # A layer with a frozen weight packs no copy, but another reader may have.
            copy = copy or self.memo.find(input, layouts.of_rows(x.dtype), self)
            if copy is not None and copy.elementwise:
                self.memo.derive(y, self.output_of(copy, x, bias, y))
        return y

    def offer_call(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Packed | None, y: Tensor
    ) -> None:
        """Offers this call to a layer scale that reads y, which then stores no copy of y."""
        if torch.compiler.is_compiling() or self.memo is None or self.blocks is not None:
            return
        if y.shape[-1] in self.memo.scaled and copy is not None and copy.shareable:
            self.memo.offer_call(y, LinearCall(self, x, weight, bias, copy, y.grad_fn))

    def output_of(self, copy: Packed, x: Tensor, bias: Tensor | None, y: Tensor) -> Derived:
        """The output y as derived from a copy of x."""
        tensors = self.weight.detach(), None if bias is None else bias.detach()
        both = self.int8_gemms(x)
        form = DerivedLinear(y.shape, y.dtype, (copy,), tensors, matrix=self.matrix, int8=both[1])
        form = form.using(self.weight, self).replaced(handed=all(both) and fused(x.device))
        return form if torch.compiler.is_compiling() else form.replaced(gather=self.gather)

    def gather(self, weight: Tensor) -> None:
        """See `fsdp.gather`."""
        gather(self, weight)

    def int8_rows(self, input: Tensor, rows: Tensor) -> Int8:
        """The int8 copy of `rows`: the input as rows, in the dtype of the GEMM."""
        return Int8(*int8_rows(rows)) if self.memo is None else self.memo.int8(input, rows, self)

    def large(self, x: Tensor) -> bool:
        """Whether GEMMs with the input `x` have at least SMALLEST multiplications."""
        return x.numel() * self.matrix(self.weight).shape[0] >= self.SMALLEST

    def int8_gemms(self, x: Tensor) -> tuple[bool, bool]:
        """Whether the GEMMs of dW and of dX run in int8, for the input `x`."""
        int8 = self.large(x) and self.int8_cost.allowed
        return int8 and self.int8_weight_grad, int8 and self.int8_input_grad


SWAPS: Swaps = {nn.Linear: Linear}
