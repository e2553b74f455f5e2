"""Scaled dot-product attention that keeps q, k, v, and maybe the probabilities, by a rule.

There are three backends, named as in `Recipe.attention`. `stored` keeps the probabilities too.
`flash` is the stock fused attention, which keeps q, k, v dense. `sparse-flash` packs q, k, v by the
rule, and runs fused attention again in the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.errors import UsageError
from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import LayerSettings, RazorLayer, save, saved
from razorctl.layers.handover import Int8, Int8Gradient
from razorctl.ops.dropout import dropout
from razorctl.ops.int8 import adjoined, int8_heads
from razorctl.rules.base import Rule, Rules
from razorctl.rules.prune import Centered
from razorctl.spans import packing

WIDEST_HEAD = 256  # columns of a head: the most that fused kernels take


class StoredFunction(torch.autograd.Function):
    """softmax(q k^T scale + mask) v with gradients from pruned q, k, v and probabilities.

    Unpacked probabilities are normalized again, so that every row of the scores' gradient sums to
    0, as a row of the exact gradient does; Back Razor does not normalize them. A probability that
    dropout zeroed is kept with a minus sign, so that the dropout mask takes no bytes of its own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        layer: "Attention",
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        if scale != 1:
            scores = scores * scale
        if mask is not None:
            scores = apply_mask(scores, mask)
        probabilities = layer.softmax(scores)
        attended, signed = probabilities, probabilities
        if dropout_p:
            attended, on = dropout(probabilities, dropout_p)
            signed = torch.where(on, probabilities, -probabilities)
        ctx.layer, ctx.scale, ctx.dropout_p = layer, scale, dropout_p
        ctx.mask_shape = None if mask is None else mask.shape
        _save(ctx, [to_compute_dtype(t) for t in (q, k, v, signed)], join=False)
        return attended @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dq = dk = dv = dmask = None
        with no_autocast(dout.device):
            q, k, v, signed = _saved(ctx)
            dtype = dout.dtype
            probabilities = signed.abs()
            wide = torch.promote_types(probabilities.dtype, torch.float32)
            total = probabilities.sum(-1, keepdim=True, dtype=wide)
            # A row whose elements are all pruned gets no gradient.
            probabilities = (probabilities / total.clamp(min=1e-20)).to(dtype)
            dattended = dout @ v.to(dtype).transpose(-2, -1)
            attended = probabilities
            if ctx.dropout_p:
                on = (signed > 0) / (1 - ctx.dropout_p)
                attended, dattended = (probabilities * on).to(dtype), (dattended * on).to(dtype)
            del signed
            if ctx.needs_input_grad[2]:
                dv = attended.transpose(-2, -1) @ dout
            if any(ctx.needs_input_grad[i] for i in (0, 1, 3)):
                along = (dattended * probabilities).sum(-1, keepdim=True)
                dscores = dattended.sub_(along).mul_(probabilities)
                if ctx.needs_input_grad[3]:
                    dmask = dscores.sum_to_size(ctx.mask_shape)
                if ctx.needs_input_grad[0]:
                    dq = dscores @ k.to(dtype) * ctx.scale
                if ctx.needs_input_grad[1]:
                    dk = dscores.transpose(-2, -1) @ q.to(dtype) * ctx.scale
        return dq, dk, dv, dmask, None, None, None


def _save(ctx: Any, tensors: list[Tensor], *others: Tensor | None, join: bool) -> None:
    """Packs `tensors` by the rules of the layer; keeps them and `others` for backward.

    tensors: q, k, v and maybe probabilities. join: packs a tensor as [batch, tokens, columns of all
    heads] where it lies so in memory, without a copy.
    """
    rule = ctx.layer.rules.of(tensors[0].dtype)
    # Probabilities are not centered: the mean of one of their columns has no meaning.
    of_scores = rule.rule if isinstance(rule, Centered) else rule
    rules, ctx.shapes = [rule, rule, rule, of_scores], [t.shape for t in tensors]
    ctx.joined = [join and _heads_adjoin(t) for t in tensors]
    with packing():
        packed = [
            rule.pack(t.transpose(1, 2).flatten(2) if joined else t.reshape(-1, *t.shape[-2:]))
            for rule, t, joined in zip(rules, tensors, ctx.joined, strict=False)
        ]
    save(ctx, *others, *packed)


def _heads_adjoin(t: Tensor) -> bool:
    """Whether [batch, heads, tokens, columns] is a view of [batch, tokens, heads * columns]."""
    return t.dim() == 4 and t.stride(1) == t.shape[3] and t.stride(3) == 1


def _saved(ctx: Any) -> list[Any]:
    """The arguments of `_save`: `others`, then the unpacked tensors."""
    parts = saved(ctx)
    others = len(parts) - len(ctx.shapes)
    for i, (shape, joined) in enumerate(zip(ctx.shapes, ctx.joined, strict=True)):
        t = parts[others + i].values()
        if joined:
            batch, heads, tokens, columns = shape
            parts[others + i] = t.view(batch, tokens, heads, columns).transpose(1, 2)
        else:
            parts[others + i] = t.view(shape)
    return parts


def apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` under a mask: bool masks are True where a key takes part; other masks are added."""
    if mask.dtype == torch.bool:
        # Not minus infinity: a row in which no key takes part would become NaN.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


class SparseFlashFunction(torch.autograd.Function):
    """Fused attention whose gradient is that of the same attention of pruned q, k, v.

    The backward pass runs fused attention again (CVPR 2024, supplement, Sec. 8). The dense output
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
        layer: "Attention",
        options: dict[str, Any],
    ) -> Tensor:
        q, k, v = (to_compute_dtype(t) for t in (q, k, v))
        ctx.layer, ctx.options, ctx.heads = layer, options, None if joint is None else q.shape
        state = _random_state(q.device) if options["dropout_p"] else None
        if joint is None:
            _save(ctx, [q, k, v], mask, state, join=True)
        else:
            assert layer.rules is not None
            ctx.wanted = layer.memo is not None and layer.memo.handover.wanted(joint)
            with packing():
                packed = layer.rules.of(q.dtype).pack(to_compute_dtype(joint.detach()))
            save(ctx, mask, state, packed)
        return fused_attention(q, k, v, mask, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        djoint = dq = dk = dv = None
        with no_autocast(dout.device):
            if ctx.heads is None:
                mask, state, *unpacked = _saved(ctx)
            else:
                mask, state, packed = saved(ctx)
                unpacked = list(_parts(packed.values(), ctx.heads))
            q, k, v = (t.to(dout.dtype) for t in unpacked)
            if mask is not None and mask.dtype == torch.bool and torch.compiler.is_compiling():
                # Else the compiler keeps the forward pass's float mask, four times as large.
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            dq, dk, dv, *dmask = _attention_gradient(q, k, v, mask, state, dout, ctx.options)
            if ctx.heads is not None:
                djoint = _joined(dq, dk, dv, ctx.wanted)
                dq = dk = dv = None
        return djoint, dq, dk, dv, dmask[0] if ctx.needs_input_grad[4] else None, None, None


def _joined(dq: Tensor, dk: Tensor, dv: Tensor, int8: bool) -> Tensor:
    """The gradient of a joint output from those of its `_parts`, in int8 if that is wanted."""
    batch, heads, tokens, columns = dq.shape
    shape = torch.Size((batch, tokens, 3 * heads * columns))
    if int8:
        return Int8Gradient(shape, dq.dtype, Int8(*int8_heads(dq, dk, dv)))
    return adjoined(dq, dk, dv).view(shape)


def _parts(joint: Tensor, heads: torch.Size) -> tuple[Tensor, ...]:
    """q, k, v, each of the shape `heads` [batch, heads, tokens, columns], as views of `joint`."""
    batch, count, tokens, columns = heads
    return joint.view(batch, tokens, 3, count, columns).permute(2, 0, 3, 1, 4).unbind(0)


def _joint(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The output [batch, tokens, 3 * columns of all heads] of one layer that q, k, v view, if any.

    Its gradient is then made at once. Autograd would put the gradients of three views together in
    two passes.
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


def _attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    dout: Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Runs the attention again; returns the gradients of q, k, v, and of a mask that needs one."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    if mask is not None and mask.requires_grad:
        mask = mask.detach().requires_grad_()
        inputs.append(mask)
    with torch.enable_grad(), _replaying(state, q.device):
        out = fused_attention(inputs[0], inputs[1], inputs[2], mask, **options)
    return torch.autograd.grad(out, inputs, dout)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, repeats: int = 1, **options: Any
) -> Tensor:
    """`F.scaled_dot_product_attention`, with each head of k and v in place of `repeats` heads."""
    if repeats > 1:
        k, v = (t.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def _random_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device."""
    if torch.compiler.is_compiling():
        raise UsageError(
            "sparse-flash attention with dropout cannot be compiled; "
            "set the attention dropout to 0 or choose attention='flash'."
        )
    backend = getattr(torch, device.type)
    return backend.get_rng_state(device) if device.type != "cpu" else torch.get_rng_state()


@contextmanager
def _replaying(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside, random numbers follow `state`; afterwards the generator is as it was before.

    state: as `_random_state` returns it; None changes nothing.
    """
    if state is None:
        yield
        return
    accelerator = None if device.type == "cpu" else getattr(torch, device.type)
    with torch.random.fork_rng([device] if accelerator else [], device_type=device.type):
        accelerator.set_rng_state(state, device) if accelerator else torch.set_rng_state(state)
        yield


class Attention(RazorLayer):
    """Base of razor attentions, whose forward calls `attend` in place of the stock function.

    Attributes:
        backend: as `Recipe.backend`.
        rules: None under `flash`, and where a method has no rule for attention; then the backend
            alone decides what is kept.
        scales_query: whether the stock eager attention scales q, and not the scores.
        softmax_dtype: the dtype of the softmax in the stock eager attention; None is that of the
            scores.
    """

    kind: ClassVar[str] = "attention"
    scales_query: ClassVar[bool] = True
    softmax_dtype: ClassVar[torch.dtype | None] = None
    rules: Rules | None  # type: ignore[assignment]
    backend: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not a decorator: it loads torch._dynamo, which a library that has attention loads anyway.
        torch.compiler.allow_in_graph(_attention_gradient)  # type: ignore[no-untyped-call]

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return (rule.rule if isinstance(rule, Centered) else rule).elementwise

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        """The end of an error message if a stock module cannot run on a backend, else None.

        It says why, and what to do.
        """
        width = cls.head_width(module)
        if backend in ("flash", "sparse-flash") and width > WIDEST_HEAD:
            return (
                f"has heads of {width} columns and fused attention takes at most {WIDEST_HEAD}; "
                "choose attention 'stored'."
            )
        return None

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, Attention)
        module.backend = settings.attention

    def detach(self) -> None:
        del self.backend
        super().detach()

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        """Columns of q and k in one head."""
        raise NotImplementedError

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over keys, as the stock eager attention computes it."""
        if self.softmax_dtype is None:
            return scores.softmax(-1)
        return scores.softmax(-1, dtype=self.softmax_dtype).to(scores.dtype)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        repeats: int = 1,
    ) -> Tensor:
        """`fused_attention`, with activations kept as the backend and the rules say."""
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        options |= {"enable_gqa": enable_gqa, "repeats": repeats}
        gradient = any(t.requires_grad for t in (query, key, value))
        if self.rules is None or not (self.saving and gradient):
            return fused_attention(query, key, value, attn_mask, **options)
        if self.backend == "sparse-flash":
            # A rule that selects elements selects them of q, k and v separately.
            joins = self.rules.wide.tiled and not torch.compiler.is_compiling()
            joint = _joint(query, key, value) if joins else None
            if joint is not None:
                query, key, value = query.detach(), key.detach(), value.detach()
            out: Tensor = SparseFlashFunction.apply(
                joint, query, key, value, attn_mask, self, options
            )
            return out
        repeats = query.shape[-3] // key.shape[-3] if enable_gqa else repeats
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
        if is_causal:
            square = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
            attn_mask = square.tril()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.scales_query:
            query, scale = query * scale, 1.0
        out = StoredFunction.apply(query, key, value, attn_mask, self, scale, dropout_p)
        return out
