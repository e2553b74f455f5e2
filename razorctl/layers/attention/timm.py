"""timm's attention classes. They call fused attention if `fused_attn` is set."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from razorctl.layers.attention.redirected_functions import FunctionalRedirect, redirected
from razorctl.layers.attention.stored import Attention
from razorctl.layers.kinds.linear import Linear
from razorctl.rules.derived import DerivedCall


class TimmAttention(Attention):
    """Base of attentions that project to q, k, v and call fused attention if `fused_attn`."""

    rewrites = False
    fused_attn: bool

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        stock: Any = module
        width: int = getattr(stock, "head_dim", 0) or stock.qkv.out_features // 3 // stock.num_heads
        return width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.saving:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        stock, self.fused_attn = self.fused_attn, self.backend != "stored" or self.rules is not None
        if self.memo is not None:
            self.memo.note_views(True)
        try:
            run = super().forward if self.rules is None else self.attended
            return run(*args, **kwargs)
        finally:
            self.fused_attn = stock
            if self.memo is not None:
                self.memo.note_views(False)

    def attended(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stock forward, with `attend` in place of fused attention."""
        stock: Any = super().forward
        if not torch.compiler.is_compiling():
            return redirected(self, stock.__func__, *args, **kwargs)  # type: ignore[no-any-return]
        with FunctionalRedirect(self):
            return stock(*args, **kwargs)  # type: ignore[no-any-return]

    def functional_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, which some classes call with the weight of a layer and another bias."""
        for layer in self.children():
            if isinstance(layer, Linear) and layer.weight is weight and layer.saving:
                return layer.multiplied(x, bias)
        return F.linear(x, weight, bias)


class EvaAttention(TimmAttention):
    """EVA's attention, with rotary positions and an optional gate."""

    rewrites = True
    num_heads: int
    qkv: Any
    q_bias: Tensor | None
    k_bias: Tensor
    v_bias: Tensor
    qkv_bias_separate: bool
    attn_drop: Any
    proj: Any
    proj_drop: Any
    num_prefix_tokens: int
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_norm: Any
    k_norm: Any
    norm: Any
    gate: Any

    def attended(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        gate = None if self.gate is None else self.gate(x).sigmoid()
        if self.qkv is not None:
            y = self._joint(x).view(*x.shape[:2], 3, self.num_heads, -1)
            q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (self._heads(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self._rotated(q, k, rope, v.dtype)
        out = self.attend(q, k, v, attn_mask, self.attn_drop.p, is_causal)
        y = self.norm(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        y = self.proj(y if gate is None else y * gate)
        return self.proj_drop(y)  # type: ignore[no-any-return]

    def _joint(self, x: Tensor) -> Tensor:
        """q, k and v of x, [batch, tokens, 3 * heads * columns]."""
        if self.q_bias is None:
            return self.qkv(x)  # type: ignore[no-any-return]
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if not self.qkv_bias_separate:
            return self.functional_linear(x, self.qkv.weight, bias)
        y: Tensor = self.qkv(x)
        y += bias
        return y

    def _heads(self, t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:2], self.num_heads, -1).transpose(1, 2)

    def _rotated(
        self, q: Tensor, k: Tensor, rope: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """q and k with their rotary positions, in the dtype of v."""
        half: bool = getattr(self, "rotate_half", False)
        call = partial(_rotated, first=self.num_prefix_tokens, half=half, dtype=dtype)
        turned = call(q, rope), call(k, rope)
        for y, copy in zip(turned, self.derived(q, k, by=_rotated), strict=False):
            assert self.memo is not None
            self.memo.derive(y, DerivedCall(y.shape, y.dtype, (copy,), (rope,), call=call))
        return turned


def _rotated(t: Tensor, rope: Tensor, first: int, half: bool, dtype: torch.dtype) -> Tensor:
    """t [batch, heads, tokens, columns]; all but its `first` tokens get rotary positions."""
    turned = apply_rot_embed_cat(t[:, :, first:], rope, half=half)
    return torch.cat([t[:, :, :first], turned], dim=2).to(dtype)
