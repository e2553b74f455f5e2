"""Fused attention of q, k, v [..., heads, tokens, columns] that can be made again in a graph.

out = softmax(scale q k^T + mask) v. torch.compile counts stock attention among random operations:
it never joins them, so a compiled backward pass would run it for each reader of its output, and it
cannot repeat the draw of a dropout. Here a seed says what is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard

from razorctl.ops.op import op


@contextmanager
def seeded(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside, the default generator of a device follows `seed`; afterwards it is as it was before.

    seed: int64 [1]; None changes nothing.
    """
    if seed is None:
        yield
        return
    accelerator = None if device.type == "cpu" else getattr(torch, device.type)
    with torch.random.fork_rng([device] if accelerator else [], device_type=device.type):
        drawn = int(seed)
        accelerator.manual_seed(drawn) if accelerator else torch.default_generator.manual_seed(
            drawn
        )
        yield


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
        mask: As of the stock function.
        is_causal: As of the stock function.
        scale: Of the scores, None for 1 / sqrt(columns).
        enable_gqa: Whether k and v may have fewer heads than q.
        dropout_p: As of the stock function; 0 without a seed.
        seed: As of `seeded`, on the CPU.
    """
    with seeded(seed, q.device):
        out = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out.transpose(-3, -2).contiguous()


@op(
    empty=lambda dout, q, k, v, mask, with_mask, *_: [
        t.new_empty(t.shape) for t in ((q, k, v, mask) if with_mask else (q, k, v))
    ]
)
def attention_again_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    with_mask: bool,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    dropout_p: float,
    seed: Tensor | None,
) -> list[Tensor]:
    """The gradients of q, k, v, and of the mask if `with_mask`; the others as `attention_again`."""
    keys = DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView  # off inside an op
    on, views = (_SetExcludeDispatchKeyGuard(key, False) for key in keys)
    with torch.enable_grad(), on, views:
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        if mask is not None and with_mask:
            mask = mask.detach().requires_grad_()
            inputs.append(mask)
        with seeded(seed, q.device):
            q, k, v, *_ = inputs
            out = F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        given = torch.autograd.grad(out.transpose(-3, -2), inputs, dout)
    return [t.detach().contiguous() for t in given]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, *settings, seed = inputs
    ctx.settings = settings
    ctx.save_for_backward(q, k, v, mask, seed)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, seed = ctx.saved_tensors
    with_mask = ctx.needs_input_grad[3]
    settings: tuple[Any, Any, Any, Any] = ctx.settings
    given = attention_again_grad(dout, q, k, v, mask, with_mask, *settings, seed)
    return (*given[:3], given[3] if with_mask else None, *(None,) * 5)


attention_again.definition.register_autograd(_backward, setup_context=_keep)
