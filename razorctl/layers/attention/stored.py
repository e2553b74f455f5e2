"""Scaled dot-product attention that stores q, k, v, and maybe the probabilities, by a rule.

There are three backends, named as in `Recipe.attention`. `stored` stores the probabilities too.
`flash` is the stock fused attention, which stores q, k, v dense. `sparse-flash` packs q, k, v by
the rule, and recomputes fused attention in the backward pass.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.attention.fused import (
    MaskParts,
    SparseFlashFunction,
    attended,
    attention_gradient,
    fused_attention,
    joint_of,
)
from razorctl.layers.autocast import compute_dtype, no_autocast, to_compute_dtype
from razorctl.layers.base import LayerSettings, save, saved, stock_base
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.recompute.large_logits import Measured, drawn, error, unhooked
from razorctl.ops.dropout import dropout
from razorctl.rules.base import Rule, Rules
from razorctl.rules.derived import apart
from razorctl.rules.prune import Centered
from razorctl.system.spans import packing

EXAMPLES = 4  # of a batch, for measuring the error of gradients
WIDEST_HEAD = 256  # columns of a head, at most, for fused kernels


class StoredFunction(torch.autograd.Function):
    """softmax(q k^T scale + mask) v with gradients from pruned q, k, v and probabilities.

    Pruned probabilities are normalized again: each row of the scores' gradient then sums to 0,
    as in the exact gradient. Back Razor does not normalize them. A probability that dropout
    zeroed is stored with a minus sign, so the dropout mask takes no bytes of its own.
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
        _save(ctx, [to_compute_dtype(t) for t in (q, k, v, signed)])
        return attended @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dq = dk = dv = dmask = None
        with no_autocast(dout.device):
            parts = zip(saved(ctx), ctx.shapes, strict=True)
            q, k, v, signed = (packed.values().view(shape) for packed, shape in parts)
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


def _save(ctx: Any, tensors: list[Tensor]) -> None:
    """Packs q, k, v and the probabilities by the rules of the layer, and saves them."""
    rule = ctx.layer.rules.of(tensors[0].dtype)
    # Probabilities are not centered: the mean of a column of them has no meaning.
    of_scores = rule.rule if isinstance(rule, Centered) else rule
    rules, ctx.shapes = [rule, rule, rule, of_scores], [t.shape for t in tensors]
    with packing():
        packed = [
            each.pack(t.reshape(-1, *t.shape[-2:])) for each, t in zip(rules, tensors, strict=True)
        ]
    save(ctx, *packed)


def apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """`scores` under a mask: bool masks are True where a key takes part; other masks are added."""
    if mask.dtype == torch.bool:
        # Not minus infinity: a row in which no key takes part would become NaN.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


class Attention(Measured):
    """Base of razor attentions, whose forward calls `attend` in place of the stock function.

    Attributes:
        backend: as `Recipe.backend`.
        rules: None under `flash`, and if a method has no rule for attention; then the backend
            decides what is stored.
        scales_query: whether the stock eager attention scales q instead of the scores.
        softmax_dtype: the dtype of the softmax in the stock eager attention; None for the dtype of
            the scores.
    """

    kind: ClassVar[str] = "attention"
    scales_query: ClassVar[bool] = True
    softmax_dtype: ClassVar[torch.dtype | None] = None
    rules: Rules | None  # type: ignore[assignment]
    backend: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if stock_base(cls) is nn.Module:  # it loads torch._dynamo, which few models need
            return
        torch.compiler.allow_in_graph(attention_gradient)  # type: ignore[no-untyped-call]

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return (rule.rule if isinstance(rule, Centered) else rule).elementwise

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        """The end of an error message if a stock module cannot run on a backend, else None.

        It says why and how to avoid the error.
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
        width: int = module.head_dim  # type: ignore[assignment]
        return width

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
        parts: MaskParts | None = None,
    ) -> Tensor:
        """`fused_attention`; the backend and the rules decide what is stored.

        parts: stored in place of the mask if possible.
        """
        options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        options |= {"enable_gqa": enable_gqa, "repeats": repeats}
        gradient = any(t.requires_grad for t in (query, key, value))
        if self.rules is None or not (self.saving and gradient):
            return fused_attention(query, key, value, attn_mask, **options)
        if self.backend == "sparse-flash":
            return self.again(query, key, value, attn_mask, options, parts)
        repeats = query.shape[-3] // key.shape[-3] if enable_gqa else repeats
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
        if is_causal:
            square = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
            attn_mask = square.tril()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if self.scales_query:
            query, scale = query * scale, 1.0
        out: Tensor = StoredFunction.apply(query, key, value, attn_mask, self, scale, dropout_p)
        return out

    @unhooked()
    @torch.no_grad()
    def measure(
        self, views: tuple[Tensor, ...], mask: Tensor | None, options: Mapping[str, Any]
    ) -> None:
        """Measures the relative error of dq and dk from copies, on the first EXAMPLES."""
        query, key, value = views
        options = {**options, "dropout_p": 0.0}
        some = slice(EXAMPLES if query.dim() > 3 else None)
        if mask is not None:
            each = mask.dim() == query.dim() and len(mask) == len(query)
            mask = mask.detach()[some if each else slice(None)]

        def gradients(q: Tensor, k: Tensor) -> dict[int, Tensor]:
            q, k, v = (to_compute_dtype(t.detach())[some] for t in (q, k, value))
            with no_autocast(q.device):
                dout = drawn((*q.shape[:-1], v.shape[-1]), q)
                return dict(enumerate(attention_gradient(q, k, v, mask, None, dout, options)))

        want = gradients(query, key)

        def errors() -> tuple[float, float]:
            assert self.rules is not None
            rule, derived = self.rules.of(compute_dtype(query)), self.derived(*views, by=object())
            form = attended(rule, None, query, key, value, None, derived, options)
            sources = tuple(map(apart, form.sources))
            if None in sources:
                return 0.0, 0.0
            q, k, _ = form.replaced(sources=sources).q_k_v()
            return error(gradients(q, k), want), error({0: q, 1: k}, {0: query, 1: key})

        self.settle(errors, compute_dtype(query))

    def again(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        parts: MaskParts | None = None,
    ) -> Tensor:
        """Attention that is recomputed in the backward pass from packed or derived q, k, v.

        options, parts: as in `fused_attention.attended`.
        """
        assert self.rules is not None
        if self.measures(query):
            self.measure((query, key, value), mask, options)
        # A rule that selects elements does so in q, k and v separately.
        joins = self.rules.wide.tiled and not torch.compiler.is_compiling()
        joint = joint_of(query, key, value) if joins else None
        derived, rule = self.derived(query, key, value), self.rules.of(compute_dtype(query))
        form = attended(rule, joint, query, key, value, mask, derived, options, parts)
        form = form.using(mask, self)
        if joint is not None:
            query, key, value = query.detach(), key.detach(), value.detach()
        out: Tensor = SparseFlashFunction.apply(joint, query, key, value, mask, self, form)
        if self.memo is not None and self.memo.derives:
            self.memo.derive(out, form, whole=False)
        return out
