"""Fused attention that is recomputed in the backward pass from packed or derived q, k, v."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.random_state import random_state
from razorctl.layers.shared_copies.int8_gradients import Int8, Int8Gradient
from razorctl.ops.attention_again import attention_again
from razorctl.ops.int8 import adjoined, int8_heads
from razorctl.ops.random import replaying
from razorctl.rules.base import Rule
from razorctl.rules.derived import Derived
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing

aten = torch.ops.aten


@dataclass(frozen=True)
class MaskParts:
    """The tensors that a mask is made from; stored in place of the mask, as they are smaller.

    Args:
        tensors: the parts; each may be None.
        merge: computes the mask from them; None if the only part is the mask.
    """

    tensors: tuple[Tensor | None, ...]
    merge: Callable[..., Tensor | None] | None


@dataclass(frozen=True)
class Attended(Derived):
    """The output of fused attention, [batch, heads, tokens, columns]; it is recomputed.

    Args:
        sources: the packed q, k and v, or one joint tensor that all three view.
        others: the mask or its parts; last the state of the random number generator (in a
            compiled program the seed). Each may be None.
        merge: see `MaskParts`.
        shapes: the shapes of q, k and v.
        joined: for each of q, k and v, whether its source is [batch, tokens, heads * columns].
        options: keywords of `fused_attention`.
    """

    merge: Callable[..., Tensor | None] | None = None
    shapes: tuple[torch.Size, ...] = ()
    joined: tuple[bool, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> Tensor | None:
        """The mask."""
        parts = self.others[:-1]
        mask = parts[0] if self.merge is None else self.merge(*parts)
        if torch.compiler.is_compiling() and mask is not None and mask.dtype == torch.bool:
            # Else the compiler keeps the forward pass's float mask, four times as large.
            return torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, -torch.inf)
        return mask

    @property
    def state(self) -> Tensor | None:
        """The state of the random number generator, or the seed."""
        return self.others[-1]

    def q_k_v(self) -> tuple[Tensor, ...]:
        """q, k, v in the dtype of the output."""
        values = [source.values().to(self.dtype) for source in self.sources]
        if len(values) == 1:
            return _parts(values[0], self.shapes[0])
        parts = zip(values, self.shapes, self.joined, strict=True)
        return tuple(
            _heads(t, shape) if joined else _shaped(t, shape) for t, shape, joined in parts
        )

    def output(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The stock output."""
        q, k, v = (to_compute_dtype(t) for t in (q, k, v))
        seed = self.state if torch.compiler.is_compiling() else None
        return fused_attention(q, k, v, _as_cast(mask, q.dtype), seed, **self.options)

    def run(self) -> tuple[list[Tensor], Tensor]:
        """The inputs, as leaves of a graph, and the `output`."""
        inputs = [t.detach().requires_grad_() for t in self.q_k_v()]
        q, k, v = inputs
        mask = self.mask
        if mask is not None and mask.requires_grad:
            mask = mask.detach().requires_grad_()
            inputs.append(mask)
        with torch.enable_grad(), replaying(self.state, q.device):
            return inputs, self.output(q, k, v, mask)

    def values(self) -> Tensor:
        if self.cell is None:  # in a compiled program
            q, k, v = self.q_k_v()
            return fused_attention(q, k, v, self.mask, self.state, again=True, **self.options)
        out: Tensor = self.cell.read(self.run)[1]
        return out.detach()

    codes = Packed.codes

    def gradients(self, dout: Tensor) -> tuple[Tensor, ...]:
        """The gradients of q, k, v and a mask that needs one, from the gradient of the output."""
        assert self.cell is not None
        inputs, out = self.cell.take(self.run)
        gradients: tuple[Tensor, ...] = torch.autograd.grad(out, inputs, dout)
        return gradients


class SparseFlashFunction(torch.autograd.Function):
    """Fused attention; its gradient is the gradient of attention with packed q, k, v.

    The backward pass recomputes the attention (CVPR 2024, supplement, Sec. 8). The dense output
    and log-sum-exp do not belong to pruned q, k, v: a gradient from both can become NaN.
    """

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        layer: RazorLayer,
        attended: Attended,
    ) -> Tensor:
        ctx.heads = None if joint is None else q.shape
        ctx.wanted = (
            joint is not None and layer.memo is not None and layer.memo.handover.wanted(joint)
        )
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        save(ctx, attended)
        out = attended.output(q, k, v, mask)
        return by_token(out) if layer.memo is not None and layer.memo.derives else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return None, None, None, None, None, None, None
        djoint = None
        (attended,) = saved(ctx)
        dq: Tensor | None
        dk: Tensor | None
        dv: Tensor | None
        with no_autocast(dout.device):
            if torch.compiler.is_compiling():
                q, k, v = attended.q_k_v()
                mask, state, options = attended.mask, attended.state, attended.options
                dq, dk, dv, *dmask = attention_gradient(q, k, v, mask, state, dout, options)
            else:
                dq, dk, dv, *dmask = attended.gradients(dout)
            if ctx.heads is not None:
                djoint = _joined(dq, dk, dv, ctx.wanted)
                dq = dk = dv = None
        return djoint, dq, dk, dv, dmask[0] if ctx.needs_input_grad[4] else None, None, None


def _joined(dq: Tensor, dk: Tensor, dv: Tensor, int8: bool) -> Tensor:
    """The gradient of a joint output from dq, dk and dv; int8: as an `Int8Gradient`."""
    batch, heads, tokens, columns = dq.shape
    shape = torch.Size((batch, tokens, 3 * heads * columns))
    if int8:
        return Int8Gradient(shape, dq.dtype, Int8(*int8_heads(dq, dk, dv)))
    return adjoined(dq, dk, dv).view(shape)


def _parts(joint: Tensor, heads: torch.Size) -> tuple[Tensor, ...]:
    """q, k, v, each of the shape `heads` [batch, heads, tokens, columns], as views of `joint`."""
    batch, count, tokens, columns = heads
    return joint.view(batch, tokens, 3, count, columns).permute(2, 0, 3, 1, 4).unbind(0)


def joint_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The tensor [batch, tokens, 3 * heads * columns] that q, k, v are views of, else None.

    `_joined` then writes its gradient in one pass. Autograd would add up the gradients of three
    views in two passes.
    """
    joint = q._base
    if joint is None or q.dim() != 4 or not joint.is_contiguous():
        return None
    shape = batch, heads, tokens, columns = q.shape
    width = heads * columns
    if joint.shape != (batch, tokens, 3 * width):
        return None
    stride, start = (3 * width * tokens, columns, 3 * width, 1), joint.storage_offset()
    for number, t in enumerate((q, k, v)):
        part = t.shape == shape and t.stride() == stride  # as `_parts` returns it
        if t._base is not joint or not part or t.storage_offset() != start + number * width:
            return None
    return joint


def attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    dout: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, and of a mask that needs one, in a compiled program."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    if mask is not None and mask.requires_grad:
        mask = mask.detach().requires_grad_()
        inputs.append(mask)
    with torch.enable_grad():
        out = fused_attention(inputs[0], inputs[1], inputs[2], mask, state, **options)
    return torch.autograd.grad(out, inputs, dout)


def _as_cast(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as autocast passes it: one that gets a gradient is cast to the dtype of q, k, v.

    SDPA chooses other kernels for such a mask.
    """
    if mask is None or not mask.requires_grad or mask.dtype == dtype:
        return mask
    return mask if torch.compiler.is_compiling() else mask.to(dtype).requires_grad_()


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None = None,
    repeats: int = 1,
    again: bool = False,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`; each head of k and v serves `repeats` heads of q.

    seed: of the dropout in a compiled program. again: recomputes an output in a compiled program,
    once for all its readers.
    """
    if repeats > 1:
        k, v = (t.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
    compiling = torch.compiler.is_compiling()  # not where a graph calls `attention_gradient`
    if seed is not None or (compiling and again and q.dim() == 4):
        causal, scale = options["is_causal"], options["scale"]
        more = options["enable_gqa"], options["dropout_p"], seed
        return attention_again(q, k, v, mask, causal, scale, *more).transpose(-3, -2)
    # A compiled program redirects F's to `Attention.attend`, planning to a card's attention.
    if compiling:
        out: Tensor = aten.scaled_dot_product_attention(q, k, v, mask, **options)
        return out
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def by_token(out: Tensor) -> Tensor:
    """`out` [batch, heads, tokens, columns] in the memory order [batch, tokens, heads, columns].

    The rows that a projection after it reads are then a view, so the memo recognizes them.
    """
    if out.transpose(1, 2).is_contiguous():
        return out
    _, heads, tokens, columns = out.shape
    strides = tokens * heads * columns, columns, heads * columns, 1
    return out.new_empty_strided(out.shape, strides).copy_(out)


def _heads_adjoin(t: Tensor) -> bool:
    """Whether [batch, heads, tokens, columns] is a view of [batch, tokens, heads * columns]."""
    return t.dim() == 4 and t.stride(1) == t.shape[3] and t.stride(3) == 1


def _heads(t: Tensor, shape: torch.Size) -> Tensor:
    """[batch, tokens, heads * columns] as the `shape` [batch, heads, tokens, columns]."""
    batch, heads, tokens, columns = shape
    return t.view(batch, tokens, heads, columns).transpose(1, 2)


def _shaped(t: Tensor, shape: torch.Size) -> Tensor:
    return t if t.shape == shape else t.view(shape)


def attended(
    rule: Rule,
    joint: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    derived: tuple[Packed, ...],
    options: Mapping[str, Any],
    parts: MaskParts | None = None,
) -> Attended:
    """The output of attention as `Attended`: packs its inputs, does not compute it.

    Args:
        rule: packs q, k and v.
        joint: the result of `joint_of`.
        derived: the derived q, k and v; empty if they are not derived.
        mask, options: arguments of `fused_attention`.
        parts: stored in place of the mask, unless the mask gets a gradient.
    """
    tensors = [to_compute_dtype(t.detach()) for t in (q, k, v)]
    shapes, dtype = tuple(t.shape for t in tensors), tensors[0].dtype
    joined = (False,) * 3 if derived else tuple(_heads_adjoin(t) for t in tensors)
    with packing(), torch.no_grad():
        if derived:
            sources = derived
        elif joint is not None:
            sources = (rule.pack(to_compute_dtype(joint.detach())),)
        else:
            sources = tuple(
                rule.pack(t.transpose(1, 2).flatten(2) if side else t.reshape(-1, *t.shape[-2:]))
                for t, side in zip(tensors, joined, strict=True)
            )
    state = random_state(q.device) if options["dropout_p"] else None
    shape = torch.Size((*shapes[0][:-1], shapes[2][-1]))
    if parts is None or (mask is not None and mask.requires_grad):
        parts = MaskParts((mask,), None)
    form = Attended(shape, dtype, sources, (*parts.tensors, state), merge=parts.merge)
    return form.replaced(shapes=shapes, joined=joined, options=options)
