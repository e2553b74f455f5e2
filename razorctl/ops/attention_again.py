"""Fused attention of q, k, v [..., heads, tokens, columns] that a graph can recompute.

out = softmax(scale q k^T + mask) v. torch.compile treats stock attention as a random operation. It
never merges two of these, so a compiled backward pass would recompute attention for each reader of
its output. It cannot replay dropout either. This op draws dropout from a seed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard

from razorctl.ops.op import op
from razorctl.ops.random import replaying


@op(
    empty=lambda q, k, v, *_: q.new_empty(
        *q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1], dtype=q.dtype
    )
)
def attention_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention`, [..., tokens, heads, columns of v].

    Args:
        q: [..., heads, tokens, columns].
        k: [..., heads of keys, keys, columns].
        v: [..., heads of keys, keys, columns of v].
        mask, is_causal, dropout_p: As of the stock function.
        scale: Of the scores, None for 1 / sqrt(columns).
        enable_gqa: Whether k and v may have fewer heads than q.
        seed: int64 [1], on the CPU, None without dropout.
    """
    with replaying(seed, q.device):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out.transpose(-3, -2).contiguous()


@op(
    empty=lambda dout, with_mask, *inputs: [
        t.new_empty(t.shape) for t in inputs[: 4 if with_mask else 3]
    ]
)
def attention_again_grad(
    dout: Tensor,
    with_mask: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> list[Tensor]:
    """The gradients of q, k, v, and of the mask if `with_mask`, for the gradient `dout`."""
    keys = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView  # off inside an op
    on, views = (_SetExcludeDispatchKeyGuard(key, False) for key in keys)
    with torch.enable_grad(), on, views:
        q, k, v = inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        if mask is not None and with_mask:
            mask = mask.detach().requires_grad_()
            inputs.append(mask)
        settings = is_causal, scale, enable_gqa, dropout_p, seed
        out = attention_again.body(q, k, v, mask, *settings)
        return [t.contiguous() for t in torch.autograd.grad(out, inputs, dout)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4], inputs[-1])
    ctx.settings = inputs[4:-1]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, seed = ctx.saved_tensors
    with_mask = ctx.needs_input_grad[3]
    gradients: list[Tensor | None] = attention_again_grad.overload(
        dout, with_mask, *inputs, *ctx.settings, seed
    )
    return tuple(gradients + [None] * (9 - len(gradients)))


attention_again.definition.register_autograd(_backward, setup_context=_keep)
