"""Attention of transformers, which asks an AttentionInterface for a function.

The function is the one that the model's configuration names. While a model is sparsified, the
configuration names `razor_eager` in place of `eager`, or `razor_sdpa` in place of `sdpa`. These
functions call `attend` of a module of a razor class, and the stock function for any other module
and for whatever `attend` cannot do.
"""

import sys
import threading
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from razorctl.layers.attention import Attention, apply_mask
from razorctl.layers.base import LayerSettings, stock_base
from razorctl.rules.base import Rules
from razorctl.rules.derived import DerivedCall

PREFIX = "razor_"


class InterfaceAttention(Attention):
    """Base of attentions that call an AttentionInterface."""

    scales_query = False
    config: Any
    derived_forward: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.derived_forward = staticmethod(_deriving(stock_base(cls).forward))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.saving or self.memo is None or not self.memo.derives:
            return super().forward(*args, **kwargs)
        self.memo.note_views(True)
        y = self.derived_forward(self, *args, **kwargs)
        self.memo.note_views(False)
        return y

    def rotary(self, stock: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock rotary positions of q and k [batch, heads, tokens, columns]."""
        turned = stock(q, k, *args, **kwargs)
        kept = [isinstance(arg, Tensor) for arg in args]
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        others = [None if isinstance(arg, Tensor) else arg for arg in args]

        def again(x: Tensor, *tensors: Tensor) -> Tensor:
            left = iter(tensors)
            filled = [next(left) if k else arg for k, arg in zip(kept, others, strict=True)]
            y: Tensor = stock(x, x[:, :0], *filled, **kwargs)[0]
            return y

        for y, copy in zip(turned, self.derived(q, k), strict=False):
            assert self.memo is not None
            self.memo.derive(y, DerivedCall(y.shape, y.dtype, (copy,), tensors, call=again))
        return turned

    @property
    def softmax_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Single precision if the stock eager attention takes its softmax so."""
        eager = _eager(self)
        code = getattr(eager, "__code__", None)
        return torch.float32 if code is not None and "float32" in code.co_names else None

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        """The columns of q and k in one head; 0 if they are unknown."""
        sizes = [getattr(module, name, None) for name in ("attention_head_size", "head_dim")]
        return next((size for size in sizes if isinstance(size, int)), 0)

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module) or 1

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        config: Any = module.config
        if config._attn_implementation.startswith(PREFIX):
            return (
                "shares its config with a model that is sparsified already; build it with "
                "a copy of that config."
            )
        if config._attn_implementation not in ("eager", "sdpa"):
            return (
                f"runs {config._attn_implementation!r}; build the model with "
                "attn_implementation='sdpa'."
            )
        if config._attn_implementation == "eager" and getattr(
            module, "reorder_and_upcast_attn", False
        ):
            return "reorders its eager attention; build the model with attn_implementation='sdpa'."
        if config.output_attentions:
            return (
                "returns its probabilities, which razor attention cannot; set "
                "config.output_attentions to False."
            )
        return super().refusal(module, backend)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        config: Any = module.config
        if not config._attn_implementation.startswith(PREFIX):  # layers share it
            config._attn_implementation = PREFIX + config._attn_implementation

    def detach(self) -> None:
        self.config._attn_implementation = self.config._attn_implementation.removeprefix(PREFIX)
        super().detach()


ROTARY = "apply_rotary_pos_emb"


class _Running:
    """The attention whose forward runs: of each thread, or of the program that is compiled."""

    attention: "InterfaceAttention | None" = None


class _RunningThread(threading.local, _Running):
    pass


_compiled, _eager_thread = _Running(), _RunningThread()


@cache
def _deriving(forward: Any) -> Any:
    """A forward with the code of `forward` whose rotary positions go through `rotary`."""
    code, variables = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    stock = variables.get(ROTARY)
    if code is None or ROTARY not in code.co_names or stock is None:
        return forward

    def rotary(*args: Any, **kwargs: Any) -> Any:
        running = _compiled if torch.compiler.is_compiling() else _eager_thread
        assert running.attention is not None
        return running.attention.rotary(stock, *args, **kwargs)

    variables = {**variables, ROTARY: rotary}
    twin = FunctionType(code, variables, closure=forward.__closure__)
    twin.__defaults__, twin.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__

    def run(attention: "InterfaceAttention", *args: Any, **kwargs: Any) -> Any:
        running = _compiled if torch.compiler.is_compiling() else _eager_thread
        running.attention = attention
        try:
            return twin(attention, *args, **kwargs)
        finally:
            running.attention = None  # a model that is gone frees its memory

    return run


def _eager(module: nn.Module) -> Any:
    """The eager attention of the file that a module is from; None if there is none."""
    homes = (vars(sys.modules[c.__module__]) for c in type(module).__mro__)
    name = "eager_attention_forward"
    return next((home[name] for home in homes if name in home), None)


def _interface(name: str) -> Any:
    """The attention function that replaces the stock one of that name."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        razor = module if isinstance(module, InterfaceAttention) and module.saving else None
        stored = razor is not None and razor.backend == "stored" and razor.rules is None
        if razor is not None and not stored:
            out = _attended(razor, query, key, value, attention_mask, kwargs)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if stored and attention_mask is not None and attention_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
            attention_mask = apply_mask(zeros, attention_mask)
        used = "eager" if stored else name
        function = ALL_ATTENTION_FUNCTIONS.get_interface(used, _eager(module))
        return function(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    return attention


# Arguments that change the result, beside queries, keys, values and mask.
_MORE = ("position_bias", "softcap", "s_aux", "cache", "head_mask", "sinks")


def _attended(
    razor: InterfaceAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output of `sdpa_attention_forward` of transformers, computed by `attend`.

    None where that function does more than fused attention.
    """
    causal = kwargs.get("is_causal")
    causal = getattr(razor, "is_causal", True) if causal is None else causal
    queries, keys = query.shape[2], key.shape[2]
    causal = bool(causal and mask is None and queries > 1)
    groups = getattr(razor, "num_key_value_groups", 1)
    single = queries == 1 and groups > 1  # then stock joins the queries of a group
    if any(kwargs.get(name) is not None for name in _MORE) or single or (causal and keys > queries):
        return None
    native = groups > 1 and use_gqa_in_sdpa(mask, key, value)
    return razor.attend(
        query,
        key,
        value,
        mask,
        dropout_p=kwargs.get("dropout", 0.0),
        is_causal=causal,
        scale=kwargs.get("scaling"),
        enable_gqa=native,
        repeats=1 if native else groups,
    )


for name, mask in (("eager", eager_mask), ("sdpa", sdpa_mask)):
    AttentionInterface.register(PREFIX + name, _interface(name))
    AttentionMaskInterface.register(PREFIX + name, mask)
