"""Fused attention of q, k, v [batch, heads, tokens, columns] that is made again, without dropout.

out = softmax(scale q k^T + mask) v. torch.compile counts stock attention among random operations,
which it never joins: a compiled backward pass would run it for each reader of its output.
"""

import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.op import op


@op(empty=lambda q, k, v, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
def attention_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`F.scaled_dot_product_attention`, [batch, tokens, heads, columns of v].

    Args:
        q: [batch, heads, tokens, columns].
        k: [batch, heads of keys, keys, columns].
        v: [batch, heads of keys, keys, columns of v].
        mask: As of the stock function.
        is_causal: As of the stock function.
        scale: Of the scores, None for 1 / sqrt(columns).
        enable_gqa: Whether k and v may have fewer heads than q.
    """
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2).contiguous()
