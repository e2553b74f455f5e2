"""The gradients of the product of a gated MLP, in one pass.

Forward: y = f(gate) up. Backward: dgate = f'(gate) up dy, dup = f(gate) dy, all [rows, columns].
"""

from torch import Tensor

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import Fused, op


@op(
    empty=lambda dy, gate, up, function: (dy.new_empty(dy.shape), dy.new_empty(dy.shape)),
    fused=Fused(),
)
def gated_grad(dy: Tensor, gate: Tensor, up: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """dgate and dup, in the dtype of dy, gate and up.

    Args:
        dy: [rows, columns].
        gate: [rows, columns].
        up: [rows, columns].
        function: The name of f in `functions.FUNCTIONS`.
    """
    f = FUNCTIONS[function]
    return f.backward(dy * up, gate), f.forward(gate).mul_(dy)
