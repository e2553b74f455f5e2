"""Cross-entropy of the logits of a linear layer, which never exist as a whole.

Logits z = x W^T + b [tokens, classes], loss = logsumexp(z) - sum t z of each token; and the
gradients dx = g W, dW = g^T x, db = sum g, for g = factor (p - t).

With p the softmax of the logits and t the target, smoothed or not, the gradient of a token's loss
with respect to its logits is p - t. So the pass over parts of the tokens that computes the losses
computes the gradients of the layer's input and weight too, and nothing of the vocabulary's size is
kept for backward, as in Liger-Kernel's fused linear cross-entropy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.op import op

BYTES = 2**28  # of the logits of a part in single precision
SINGLE = 2**23  # elements of logits that are in single precision at a time
PRODUCT = 2**24  # elements of a product that is cast
LEAST = 128  # tokens of a part, whatever the vocabulary


def part_tokens(classes: int) -> int:
    """The number of tokens whose logits exist at the same time."""
    return max(LEAST, BYTES // (torch.float32.itemsize * max(1, classes)))


def _empty(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `linear_cross_entropy`, without values."""
    *_, input_grad, weight_grad, bias_grad = others
    dtype = torch.promote_types(x.dtype, torch.float32)
    of_bias = weight.shape[0] if bias_grad else 0
    return (
        x.new_empty(x.shape[0], dtype=dtype),
        x.new_empty(x.shape if input_grad else 0),
        weight.new_empty(weight.shape if weight_grad else 0),
        weight.new_empty(of_bias, dtype=dtype if bias is None else bias.dtype),
    )


def _to_gradient(logs: Tensor, index: Tensor, factors: Tensor, smoothing: float) -> None:
    """Turns log-probabilities [rows, classes] into the gradient of the logits, in place."""
    logs.exp_().scatter_add_(1, index, torch.full_like(factors, smoothing - 1))
    if smoothing:
        logs -= smoothing / logs.shape[1]
    logs.mul_(factors)


@op(empty=_empty)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    smoothing: float,
    factor: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cross-entropy of each row of x W^T + b, and the gradient of the sum of factor * loss.

    Returns the losses [tokens], in single precision at least, and the gradients of x, of the weight
    and of the bias, each in the dtype of its tensor. A gradient that is not wanted is empty, [0].

    Args:
        x: [tokens, columns], in the dtype of the products.
        weight: [classes, columns], cast to that dtype.
        bias: [classes], cast to that dtype; None for 0.
        target: Classes, int64 [tokens].
        ignore_index: A row with this target has loss 0 and no gradient.
        smoothing: As `label_smoothing` of `F.cross_entropy`.
        factor: [tokens], None for 1.
        input_grad: Whether the gradient of x is wanted.
        weight_grad: Whether the gradient of the weight is wanted.
        bias_grad: Whether the gradient of the bias is wanted.
    """
    dtype, classes = torch.promote_types(x.dtype, torch.float32), len(weight)
    w, b = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    losses, size = x.new_empty(len(x), dtype=dtype), part_tokens(classes)
    dx = x.new_empty(x.shape if input_grad else 0)
    dw = weight.new_zeros(weight.shape if weight_grad else 0)
    db = weight.new_zeros(classes if bias_grad else 0, dtype=dtype)
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        grad = F.linear(x[rows], w, b)  # logits, which their gradient replaces
        first = start
        for span in torch.split(grad, max(1, SINGLE // max(1, classes))):
            part = slice(first, first := first + len(span))
            logs = span.to(dtype).log_softmax(1)
            taken = target[part] != ignore_index
            index = torch.where(taken, target[part], 0).unsqueeze(1)
            loss = logs.gather(1, index).squeeze(1).mul_(smoothing - 1)
            if smoothing:
                loss -= smoothing * logs.mean(1)
            losses[part] = torch.where(taken, loss, 0)
            if not (input_grad or weight_grad or bias_grad):
                continue
            factors = taken.to(dtype) if factor is None else taken.to(dtype) * factor[part]
            _to_gradient(logs, index, factors.unsqueeze(1), smoothing)
            if bias_grad:
                db += logs.sum(0)
            span.copy_(logs)
            del logs
        if input_grad:
            dx[rows] = grad @ w
        if weight_grad and dw.dtype == grad.dtype:
            dw.addmm_(grad.t(), x[rows])
        elif weight_grad:  # of some classes at a time, since both products are of another dtype
            each = max(1, PRODUCT // max(1, x.shape[1]))
            for first in range(0, classes, each):
                some = slice(first, first + each)
                dw[some] += (grad[:, some].t() @ x[rows]).to(dw.dtype)
        del grad  # before the next logits are computed
    return losses, dx, dw, db if bias is None else db.to(bias.dtype)
