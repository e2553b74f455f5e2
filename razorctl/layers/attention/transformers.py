"""Attention of transformers, which looks its function up in an AttentionInterface.

A razor attention runs the stock forward with another interface. Its functions call `attend` if it
computes the same, else the stock function. The model's configuration does not change. Eager
attention stays eager: its stock function runs forward, and is recomputed in the backward pass.
"""

import sys
from copy import copy as shallow_copy
from functools import cache, partial
from inspect import unwrap
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.modeling_utils import AttentionInterface
from transformers.utils import output_capturing

from razorctl.layers.attention.stored import Attention, apply_mask
from razorctl.layers.attention.twin import decorated, run_in, running
from razorctl.layers.base import in_backward, name_of, stock_base
from razorctl.layers.known_forwards import forward_names
from razorctl.layers.recompute.code import LayerCode, code_of
from razorctl.layers.recompute.replayed_state import unknown
from razorctl.layers.recompute.runs import first_of
from razorctl.rules.derived import DerivedCall


class InterfaceAttention(Attention):
    """Base of attentions that call an AttentionInterface."""

    scales_query = False
    config: Any
    redirected_forward: ClassVar[Any]
    makes_mask: ClassVar[bool]  # of weights, as large as the scores; then all is recomputed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = stock_base(cls).forward
        cls.redirected_forward = staticmethod(redirecting(forward) or forward)
        cls.makes_mask = "relative_position_bias" in forward_names(stock_base(cls))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.saving:
            return super().forward(*args, **kwargs)
        if self.makes_mask and self.again_allowed:
            code = code_of(self, args, kwargs)
            if code is not None:
                return code.first(*args, **kwargs)
        if self.memo is None:
            return self.redirected_forward(self, *args, **kwargs)
        self.memo.note_views(True)
        named = {name: _handing(value) for name, value in kwargs.items()}
        y = self.redirected_forward(self, *map(_handing, args), **named)
        self.memo.derive_view(first_of(y))  # for the projection after this module
        self.memo.note_views(False)
        return y

    def rotary(self, stock: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock rotary positions of q and k [batch, heads, tokens, columns]."""
        turned = stock(q, k, *args, **kwargs)
        if self.rules is None:
            return turned
        kept = [isinstance(arg, Tensor) for arg in args]
        tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
        others = [None if isinstance(arg, Tensor) else arg for arg in args]

        def again(x: Tensor, *tensors: Tensor) -> Tensor:
            left = iter(tensors)
            filled = [next(left) if k else arg for k, arg in zip(kept, others, strict=True)]
            try:
                y: Tensor = stock(x, x[:, :0], *filled, **kwargs)[0]
            except RuntimeError:  # it reshapes k by a size that no heads leave open
                y = stock(x, x[:, :1], *filled, **kwargs)[0]
            return y

        for y, copy in zip(turned, self.derived(q, k, by=stock), strict=False):
            assert self.memo is not None
            self.memo.derive(y, DerivedCall(y.shape, y.dtype, (copy,), tensors, call=again))
        return turned

    @property
    def again_allowed(self) -> bool:
        """Whether stock functions may be recomputed in the backward pass."""
        return self.backend == "sparse-flash" and self.rules is not None

    @property
    def softmax_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Single precision if the stock eager attention computes its softmax in it, else None."""
        eager = _eager(self)
        code = getattr(eager, "__code__", None)
        return torch.float32 if code is not None and "float32" in code.co_names else None

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        """The columns of q and k in one head; 0 if they are unknown."""
        sizes = [getattr(module, name, None) for name in ("attention_head_size", "head_dim")]
        return next((size for size in sizes if isinstance(size, int)), 0)

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        config: Any = module.config
        if config._attn_implementation not in ("eager", "sdpa"):
            return (
                f"runs {config._attn_implementation!r}; build the model with "
                "attn_implementation='sdpa'."
            )
        if config._attn_implementation == "eager" and getattr(
            module, "reorder_and_upcast_attn", False
        ):
            return "reorders its eager attention; build the model with attn_implementation='sdpa'."
        return super().refusal(module, backend)


class _Handing:
    """A key/value cache that returns the first keys and values unchanged.

    Models fill a cache in training too, unless `use_cache` is off. A cache returns copies, which
    attention would not recognize as derived. In a recomputed checkpoint region the cache holds the
    keys already, so they are not appended again.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`DynamicCache.update`."""
        compiling = torch.compiler.is_compiling()
        again = not compiling and in_backward()
        if again and self.cache.get_seq_length(layer) == keys.shape[-2]:
            return keys, values
        both: tuple[Tensor, Tensor] = self.cache.update(keys, values, layer, *args, **kwargs)
        return (keys, values) if both[0].shape == keys.shape else both


def _handing(value: Any) -> Any:
    """Wraps a cache, or both parts of an `EncoderDecoderCache`, in `_Handing`."""
    if isinstance(value, DynamicCache):
        return _Handing(value)
    if isinstance(value, EncoderDecoderCache) and not torch.compiler.is_compiling():
        value = shallow_copy(value)
        for name, part in list(vars(value).items()):
            if isinstance(part, Cache):
                setattr(value, name, _handing(part))
    return value


INPUTS = ("query", "key", "value", "attention_mask")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
ROTARY = "apply_rotary_pos_emb"


@cache
def redirecting(forward: Any) -> Any:
    """A copy of `forward` that looks functions up in `Functions` and calls `rotary`.

    None if its code names no AttentionInterface, or if a decorator cannot be copied.
    """
    code, variables = getattr(unwrap(forward), "__code__", None), unwrap(forward).__globals__
    names = () if code is None else code.co_names
    asked = [name for name in names if isinstance(variables.get(name), AttentionInterface)]
    if not asked:
        return None
    stock: Any = variables.get(ROTARY)

    def rotary(*args: Any, **kwargs: Any) -> Any:
        attention = running().module
        if attention is None:  # a graph that begins inside the forward does not know it
            return stock(*args, **kwargs)
        return attention.rotary(stock, *args, **kwargs)

    changed: dict[str, Any] = {name: Functions(variables[name]) for name in asked}
    changed |= {} if stock is None else {ROTARY: rotary}
    scope = {**variables, **changed}
    scope.pop("__name__", None)  # torch.compile of torch 2.11 would read the module's
    twin = decorated(forward, scope)
    if stock is None or twin is None:
        return twin

    def run(attention: "InterfaceAttention", *args: Any, **kwargs: Any) -> Any:
        return run_in(attention, twin, *args, **kwargs)

    return run


def _eager(module: nn.Module) -> Any:
    """The eager attention of the file that defines a module's class; None if there is none."""
    homes = (vars(sys.modules[c.__module__]) for c in type(module).__mro__)
    name = "eager_attention_forward"
    return next((home[name] for home in homes if name in home), None)


class Functions:
    """An AttentionInterface in place of the stock one, for the forward of a razor attention."""

    def __init__(self, interface: AttentionInterface) -> None:
        self.interface = interface

    def get_interface(self, name: str, default: Any) -> Any:
        """The attention function that replaces the stock one of that name."""
        stock = self.interface.get_interface(name, default)
        plain = name in ("eager", "sdpa")
        return partial(_attention, stock, default, name == "eager") if plain else stock


def _attention(
    stock: Any,
    eager: Any,
    is_eager: bool,
    razor: InterfaceAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *more: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output of the stock function for a `saving` module, and the probabilities."""
    inputs = query, key, value, attention_mask
    if razor.backend == "stored" and razor.rules is None:
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
            attention_mask = apply_mask(zeros, attention_mask)
        return eager(  # type: ignore[no-any-return]
            razor, query, key, value, attention_mask, *more, **kwargs
        )
    again = razor.again_allowed
    names = (name for name, x in kwargs.items() if x is not None and x is not False)
    others = tuple(sorted({*names}.difference(KNOWN)))
    if not (more or (is_eager and (again or _asked(kwargs)))) and is_plain(stock, others):
        out = _attended(razor, inputs, kwargs)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    call = partial(stock, razor)
    if again and not torch.compiler.is_compiling() and not unknown(tree_leaves(kwargs)):
        code = LayerCode(razor, name_of(razor), call, names=INPUTS, feeds=True)
        return code.first(*inputs, *more, **kwargs)  # type: ignore[no-any-return]
    return call(*inputs, *more, **kwargs)  # type: ignore[no-any-return]


def _asked(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model asks for the probabilities of attention."""
    collected = output_capturing._active_collector.get() or {}
    return bool(kwargs.get("output_attentions")) or any("attentions" in key for key in collected)


KNOWN = ("dropout", "scaling", "is_causal")  # what `_attended` reads beside INPUTS


class _Unread(Tensor):
    """An argument that raises TypeError when it is used."""

    @classmethod
    def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{func} reads it")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_plain(function: Any, names: tuple[str, ...]) -> bool:
    """Whether a function of an AttentionInterface computes softmax(q k^T scaling + mask) v.

    It is run on small inputs. Its arguments `names` must not be read.
    """
    return _is_plain(function, names)


@cache  # in a function of its own, as the compiler would trace through the cache
def _is_plain(function: Any, names: tuple[str, ...]) -> bool:
    module = SimpleNamespace(training=False, is_causal=False, num_key_value_groups=1)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _disable_current_modes():
        q, k, v = (torch.arange(48, device="cpu").float() + 7 * i for i in range(3))
        q, k, v = (x.sin().view(1, 2, 6, 4) for x in (q, k, v))
        for mask in (None, (q @ k.mT).sin()[:, :1]):
            want = F.scaled_dot_product_attention(q, k, v, mask, scale=0.7).transpose(1, 2)
            unread = {name: torch.empty(0, device="cpu").as_subclass(_Unread) for name in names}
            try:
                y = function(module, q, k, v, mask, dropout=0.0, scaling=0.7, **unread)[0]
                if y.shape != want.shape or not torch.allclose(y, want, atol=1e-5):
                    return False
            except Exception:  # it reads one of `names`, or another attribute of the module
                return False
    return True


def _attended(razor: InterfaceAttention, inputs: Inputs, kwargs: dict[str, Any]) -> Tensor | None:
    """The output of a plain attention function, computed by `attend`.

    None if fused attention cannot compute it.
    """
    query, key, value, mask = inputs
    causal = kwargs.get("is_causal")
    causal = getattr(razor, "is_causal", True) if causal is None else causal
    queries, keys = query.shape[2], key.shape[2]
    causal = bool(causal and mask is None and queries > 1)
    groups = getattr(razor, "num_key_value_groups", 1)
    single = queries == 1 and groups > 1  # then stock joins the queries of a group
    if single or (causal and keys > queries):
        return None
    native = groups > 1 and use_gqa_in_sdpa(mask, key, value)
    dropout, scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    return razor.attend(*inputs, dropout, causal, scale, native, 1 if native else groups)
