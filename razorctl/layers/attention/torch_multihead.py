"""torch's MultiheadAttention; its projections store their inputs as linear layers do.

x -- in_proj -- q, k, v -- attention -- out_proj     self-attention: one projection of one input
x -- q_proj -- q           memory -- kv_proj -- k, v       attention to another input

The operations and their order are the same as in `F.multi_head_attention_forward`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import has_torch_function

from razorctl.layers.attention.fused import MaskParts
from razorctl.layers.attention.stored import WIDEST_HEAD, Attention
from razorctl.layers.base import LayerSettings, RazorLayer, Swaps, name_of
from razorctl.layers.kinds.in_projection import Projection
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.recompute.code import LayerCode
from razorctl.rules.base import Rule, Rules
from razorctl.rules.derived import DerivedCall

Masks = tuple[Tensor | None, Tensor | None]  # `attn_mask` and `key_padding_mask`


@dataclass(frozen=True)
class Merge:
    """Computes the mask of fused attention from the masks that MultiheadAttention takes.

    Args:
        batch, heads: of the attention.
        dtype: of the mask.
        more: the number of keys beyond the input's; they are never masked.
    """

    batch: int
    heads: int
    dtype: torch.dtype
    more: int

    def merged(self, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """The mask [1 or batch * heads, 1 or queries, keys] that is added to scores."""
        other = None if attn_mask is None else attn_mask.dtype
        padding = F._canonical_mask(padding, "key_padding_mask", other, "attn_mask", self.dtype)
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", self.dtype, check_other=False)
        if mask is not None:
            mask = mask if mask.dim() == 3 else mask.unsqueeze(0)
            mask = F.pad(mask, (0, self.more)) if self.more else mask
        if padding is None:
            return mask
        padding = F.pad(padding, (0, self.more)) if self.more else padding
        keys = padding.shape[-1]
        padding = padding.view(self.batch, 1, 1, keys).expand(-1, self.heads, -1, -1)
        padding = padding.reshape(self.batch * self.heads, 1, keys)
        return padding if mask is None else mask + padding

    def for_heads(self, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """The mask [1 or batch, 1 or heads, 1 or queries, keys]."""
        mask = self.merged(attn_mask, padding)
        if mask is None or mask.shape[0] == 1:
            return None if mask is None else mask.unsqueeze(0)
        return mask.view(self.batch, self.heads, -1, mask.shape[-1])


def weighted_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """The stock attention of q, k, v [batch * heads, tokens, columns], and its probabilities."""
    q = q * math.sqrt(1.0 / float(q.shape[-1]))
    transposed = k.transpose(-2, -1)
    scores = torch.bmm(q, transposed) if mask is None else torch.baddbmm(mask, q, transposed)
    weights = F.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, p=dropout_p)
    return torch.bmm(weights, v), weights


PARTS = ("in_proj", "q_proj", "k_proj", "v_proj", "kv_proj")


class MultiheadAttention(Attention):
    """torch's MultiheadAttention.

    Its projections take no part in a joint budget. If the probabilities are requested, q, k and v
    are stored and the attention is recomputed, whatever the backend.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: Any
    in_proj: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    kv_proj: Any
    in_proj_weight: Tensor | None

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        plain = type(module.out_proj) is NonDynamicallyQuantizableLinear
        return plain and cls.head_width(module) <= WIDEST_HEAD and super().fits(module, rule)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, MultiheadAttention)
        settings = replace(settings, blocks=None)
        for name, part in _projections(module).items():
            linear = settings.rules_of(Linear.kind, part.in_features)
            Projection.attach(part, linear, settings)
            part.train(module.training)
            module.add_module(name, part)
        linear = settings.rules_of(Linear.kind, module.embed_dim)
        if linear is not None:
            Linear.attach(module.out_proj, linear, settings)

    def detach(self) -> None:
        for name in PARTS:
            if hasattr(self, name):
                delattr(self, name)
        if isinstance(self.out_proj, RazorLayer):
            self.out_proj.detach()
        super().detach()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        inputs, masks = (query, key, value), (attn_mask, key_padding_mask)
        strange = has_torch_function((*inputs, *masks)) or any(t.is_nested for t in inputs)
        if not self.saving or strange or (is_causal and attn_mask is None):
            return super().forward(  # type: ignore[no-any-return]
                query,
                key,
                value,
                key_padding_mask=key_padding_mask,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
                is_causal=is_causal,
            )
        if self.memo is not None:
            self.memo.note_views(True)
        check: Any = F._mha_shape_check  # type: ignore[attr-defined]
        batched = check(*inputs, key_padding_mask, attn_mask, self.num_heads)
        q, k, v = self._projected(*inputs)  # [tokens, batch, embed_dim]
        self._check(q, k, attn_mask)
        merge = Merge(q.shape[1], self.num_heads, query.dtype, self._further_keys)
        k, v = self._further(k, self.bias_k), self._further(v, self.bias_v)
        if need_weights:
            y, weights = self._weighted(q, k, v, masks, merge)
            if average_attn_weights:
                weights = weights.mean(dim=1)
        else:
            is_causal = is_causal and key_padding_mask is None
            y = self._fused(q, k, v, (None, None) if is_causal else masks, merge, is_causal)
            weights = None
        if self.memo is not None:
            self.memo.note_views(False)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(1, 0) if self.batch_first else y, weights

    @property
    def _further_keys(self) -> int:
        """The number of keys that do not come from the input."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _check(self, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        """Raises the stock error for a mask of another shape."""
        if mask is None:
            return
        batch = () if mask.dim() == 2 else (q.shape[1] * self.num_heads,)
        if mask.shape != (*batch, q.shape[0], k.shape[0]):
            raise RuntimeError(
                f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be "
                f"{(*batch, q.shape[0], k.shape[0])}."
            )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, [tokens, batch, embed_dim]; batch is 1 for inputs without a batch."""

        def batched(t: Tensor) -> Tensor:
            return t if t.dim() == 3 else t.unsqueeze(1)

        if not hasattr(self, "in_proj") or key is not value:
            return tuple(
                batched(layer(t))
                for layer, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
            )
        if query is key:
            joint = batched(self.in_proj(query))
            return self._apart(joint, 3).unbind(0)
        return batched(self.q_proj(query)), *self._apart(batched(self.kv_proj(key)), 2).unbind(0)

    def _apart(self, joint: Tensor, count: int) -> Tensor:
        """[tokens, batch, count * embed_dim] as [count, tokens, batch, embed_dim]."""
        call = partial(_apart, count=count)
        y = call(joint)
        self._hand_on(joint, y, call)
        return y

    def _further(self, t: Tensor, bias: Tensor | None) -> Tensor:
        """k or v with a bias as one more key or value."""
        return t if bias is None else torch.cat([t, bias.repeat(1, t.shape[1], 1)])

    def _heads(self, t: Tensor) -> Tensor:
        """[tokens, batch, embed_dim] as [batch * heads, tokens, columns]."""
        tokens, batch, _ = t.shape
        return t.reshape(tokens, batch * self.num_heads, self.head_dim).transpose(0, 1)

    def _keys(self, t: Tensor) -> Tensor:
        """`_heads` of k or v, with one more key or value of zeros if `add_zero_attn` is set."""
        t = self._heads(t)
        if not self.add_zero_attn:
            return t
        zeros = torch.zeros((t.shape[0], 1, t.shape[2]), dtype=t.dtype, device=t.device)
        return torch.cat([t, zeros], dim=1)

    def _each_head(self, t: Tensor) -> Tensor:
        """[batch * heads, tokens, columns] as [batch, heads, tokens, columns]."""
        return t.view(t.shape[0] // self.num_heads, self.num_heads, *t.shape[1:])

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, merge: Merge, is_causal: bool
    ) -> Tensor:
        """The output [tokens, batch, embed_dim], by fused attention."""
        q, k, v = map(self._each_head, (self._heads(q), self._keys(k), self._keys(v)))
        mask, parts = merge.for_heads(*masks), MaskParts(masks, merge.for_heads)
        out = self.attend(q, k, v, mask, self.dropout, is_causal, parts=parts)
        by_token = out.permute(2, 0, 1, 3)
        flat = partial(_rows, columns=self.embed_dim)
        rows = flat(by_token)
        self._hand_on(by_token, rows, flat)
        return self._output(rows, q.shape[2])

    def _weighted(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, merge: Merge
    ) -> tuple[Tensor, Tensor]:
        """The output [tokens, batch, embed_dim], and the probabilities of each head."""

        def call(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None) -> Any:
            q, k, v = self._heads(q), self._keys(k), self._keys(v)
            return weighted_attention(q, k, v, merge.merged(*masks), self.dropout)

        if self.rules is not None and not torch.compiler.is_compiling():
            names = ("q", "k", "v", "attn_mask", "key_padding_mask")
            call = LayerCode(self, name_of(self), call, [self.out_proj], names).first
        out, weights = call(q, k, v, *masks)
        y = self._output(_rows(out.transpose(0, 1), self.embed_dim), len(q))
        return y, self._each_head(weights)

    def _output(self, rows: Tensor, tokens: int) -> Tensor:
        """The output [tokens, batch, embed_dim] for rows [tokens * batch, embed_dim]."""
        y: Tensor = self.out_proj(rows)
        return y.view(tokens, -1, y.shape[1])

    def _hand_on(self, x: Tensor, y: Tensor, call: Callable[[Tensor], Tensor]) -> None:
        """Offers y = call(x) as a derived activation, if x is one."""
        if self.memo is None:
            return
        derived = self.memo.derived((x,), self)
        if derived:
            self.memo.derive(y, DerivedCall(y.shape, y.dtype, derived, call=call))


def _apart(joint: Tensor, count: int) -> Tensor:
    """[tokens, batch, count * columns] as [count, tokens, batch, columns], by stock operations."""
    parts = joint.view(*joint.shape[:-1], count, joint.shape[-1] // count)
    return parts.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()


def _rows(t: Tensor, columns: int) -> Tensor:
    """[tokens, ...] as [rows, columns]."""
    return t.reshape(t.numel() // columns, columns)


def _projections(owner: MultiheadAttention) -> dict[str, Any]:
    """The projections of an attention by name, as stock linear layers."""
    width, one = owner.embed_dim, PARTS[1:4]
    thirds = [slice(i * width, (i + 1) * width) for i in range(3)]
    if owner.in_proj_weight is None:
        return {
            name: Projection.of(owner, f"{name}_weight", None, third)
            for name, third in zip(one, thirds, strict=True)
        }
    rows = (None, *thirds, slice(width, 3 * width))
    return {
        name: Projection.of(owner, "in_proj_weight", part, part)
        for name, part in zip(PARTS, rows, strict=True)
    }


SWAPS: Swaps = {nn.MultiheadAttention: MultiheadAttention}
