"""Attention of transformers in other words: what other releases may have, and models of users."""

import functools

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as STOCK
from transformers.modeling_utils import AttentionInterface
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from razorctl.config.recipe import Recipe
from razorctl.layers.attention.transformers import InterfaceAttention
from razorctl.layers.recompute.attention import AttentionAgain
from razorctl.surgery.byte_budget import saved_bytes
from razorctl.surgery.sparsify import sparsify

FUNCTIONS = STOCK  # by another name
SDPA = STOCK["sdpa"]


class Other(LlamaAttention):
    """Llama's attention, whose argument of a cache has another name. more: of the function."""

    more: dict[str, object] = {}  # noqa: RUF012

    def forward(self, hidden_states, position_embeddings, attention_mask, *, memory, **kwargs):
        q, k, v = turned(self, hidden_states, position_embeddings)
        if memory is not None:
            k, v = memory.update(k, v, self.layer_idx)
        function = FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        options = {"dropout": 0.0, "scaling": self.scaling} | self.more
        y, weights = function(self, q, k, v, attention_mask, **options)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights


class OtherBetween(Other):
    """Llama's attention, whose forward calls a method that asks."""

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        q, k, v = turned(self, hidden_states, position_embeddings)
        y, weights = self.attended(q, k, v, attention_mask)
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights

    def attended(self, *inputs):
        function = FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return function(self, *inputs, dropout=0.0, scaling=self.scaling)


def turned(attention, x, positions):
    shape = (*x.shape[:-1], -1, attention.head_dim)
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in layers)
    return *apply_rotary_pos_emb(q, k, *positions), v


def renaming(forward):
    """A decorator that gives an argument its new name."""

    @functools.wraps(forward)
    def renamed(*args, **kwargs):
        old, new = kwargs.pop("past_key_values", None), kwargs.pop("cache", None)
        return forward(*args, memory=old if new is None else new, **kwargs)

    return renamed


class Unbound:
    """A decorator that is an object, with no closure."""

    def __init__(self, forward):
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __get__(self, module, kind):
        return self if module is None else functools.partial(self, module)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


def hotter(module, query, *inputs, temperature=None, **kwargs):
    return SDPA(module, query if temperature is None else query / temperature, *inputs, **kwargs)


def passing_on(module, *inputs, **kwargs):
    return hotter(module, *inputs, **kwargs)


def capped(module, query, key, value, mask, scaling, **kwargs):
    """Has no further argument, but caps the scores."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = (query @ key.mT * scaling).tanh() * 0.1
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -1e4).softmax(-1) @ value).transpose(1, 2), None


def llama(kind: type[Other] | None, more: dict[str, Tensor]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")).train()
    for layer in model.model.layers:
        if kind is not None:
            layer.self_attn.__class__ = kind
            layer.self_attn.more = more
    return model


def named(forward) -> type[Other]:
    """A class of transformers with that forward."""
    return type("Named", (Other,), {"forward": forward, "__module__": "transformers.other"})


RENAMED = named(renaming(Other.forward))
TWO = torch.tensor(2.0)
CASES = {
    "stock": (None, SDPA, {}, InterfaceAttention),
    "decorated": (RENAMED, SDPA, {}, InterfaceAttention),
    "an argument that nothing reads": (
        *(RENAMED, SDPA, {"segments": torch.zeros(4, 32)}),
        InterfaceAttention,
    ),
    "an argument that changes the result": (
        *(RENAMED, hotter, {"temperature": TWO}),
        InterfaceAttention,
    ),
    "one that is passed on": (
        *(RENAMED, passing_on, {"temperature": TWO}),
        InterfaceAttention,
    ),
    "a function that caps": (None, capped, {}, InterfaceAttention),
    "a decorator without a closure": (
        named(Unbound(renaming(Other.forward))),
        SDPA,
        {},
        AttentionAgain,
    ),
    "a method between": (OtherBetween, SDPA, {}, AttentionAgain),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_in_other_words_is_as_exact_and_keeps_as_little(name, monkeypatch):
    kind, function, more, razor = CASES[name]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", function)
    model, ids = llama(kind, more), torch.randint(20, (4, 32))
    batch = {"input_ids": ids, "labels": ids}

    def gradients() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss.detach(), [p.grad.flatten() for p in model.parameters()]

    loss, want = gradients()
    full = saved_bytes(model, batch)
    sparsify(model, Recipe("razor", ratio=0.9))
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, razor)
    got_loss, got = gradients()
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0)
    for a, b in zip(got, want, strict=True):
        assert torch.cosine_similarity(a, b, dim=0) > 0.995
    assert saved_bytes(model, batch) < 0.14 * full  # .124 with the stock attention
