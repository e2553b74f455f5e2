"""Attention with large logits: what it measures, and how it then keeps q and k."""

import copy
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.layers.recompute import large_logits
from razorctl.layers.recompute.large_logits import AMPLIFIED, LIMIT, Measured
from razorctl.layers.shared_copies.memo import Memo
from razorctl.rules.dense import Half
from razorctl.rules.quantized import Quantized
from razorctl.surgery import reruns
from razorctl.training import state


class OwnAttention(nn.Module):
    """Attention that razor knows by its code alone, with logits that are not divided."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Scaled(nn.Module):
    """A layer between an input that is scaled and a classifier."""

    def __init__(self, layer: nn.Module, width: int, scale: float) -> None:
        super().__init__()
        self.layer, self.head, self.scale = layer, nn.Linear(width, 5), scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x * self.scale).mean(1))
        return y


def encoder(scale: float, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True, **options)
    return Scaled(layer, 64, scale), torch.randn(8, 32, 64)


def own(scale: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Scaled(OwnAttention(64), 64, scale), torch.randn(8, 32, 64)


class Text(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits[:, -1, :5]
        return logits


def gpt2(scale: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, **none)
    model = Text(transformers.GPT2LMHeadModel(config))
    with torch.no_grad():
        model.model.transformer.h[0].attn.c_attn.weight.mul_(scale)
    return model, torch.randint(64, (8, 32))


LARGE: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "encoder": lambda: encoder(14),
    "own": lambda: own(6),
    "gpt2": lambda: gpt2(100),
}


def gradient(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The gradient of all that is called attention."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    F.cross_entropy(y.float(), torch.arange(len(x)) % 5).backward()
    every = model.named_parameters()
    parts = [p.grad.flatten() for n, p in every if "at" in n or n.startswith("layer.")]
    return torch.cat(parts)


def closeness(model: nn.Module, x: Tensor, exact: Tensor, **options: Any) -> float:
    return F.cosine_similarity(gradient(model, x, **options), exact, dim=0).item()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about logits."""
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    return [r.getMessage() for r in records if r.name == large_logits.__name__]


def sizes(model: nn.Module) -> dict[str, int]:
    """The bits of q and k of each attention that has measured, by name; 0 if by its rules."""
    every = ((n, m.logit_bits) for n, m in model.named_modules() if isinstance(m, Measured))
    return {name: bits for name, bits in every if bits is not None}


def measured(model: nn.Module) -> Measured:
    return next(module for module in model.modules() if isinstance(module, Measured))


@pytest.mark.parametrize("ratio", [0.5, 0.97])
@pytest.mark.parametrize("name", LARGE)
def test_gradients_are_close(name: str, ratio: float) -> None:
    model, x = LARGE[name]()
    exact = gradient(model.train(), x)
    sparsify(model, Recipe("razor", ratio))
    assert closeness(model, x, exact) >= 0.995


@pytest.mark.parametrize(
    "build",
    [encoder, own, gpt2],
    ids=lambda build: build.__name__,
)
def test_small_logits_change_nothing(
    build: Callable[[float], tuple[nn.Module, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = build(1)
    sparsify(model.train(), Recipe("razor", 0.97))
    rules = measured(model).rules
    kept = saved_bytes(model, x)
    gradient(model, x)
    assert set(sizes(model).values()) == {0}
    assert measured(model).rules is rules
    assert saved_bytes(model, x) == kept
    assert not said(caplog)


def test_one_warning_names_a_layer_and_its_error(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = Scaled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 64, 1).train()
    with torch.no_grad():
        for each in model.layer.layers:
            each.self_attn.in_proj_weight.mul_(14)
    sparsify(model, Recipe("razor", 0.9))
    x = torch.randn(8, 32, 64)
    gradient(model, x)
    assert list(sizes(model).values()) == [16, 16]
    (words,) = said(caplog)
    assert "layer.layers.0.self_attn (MultiheadAttention)" in words
    assert "which the byte budget does not count" in words


def test_only_the_first_pass_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = own(6)
    sparsify(model.train(), Recipe("razor", 0.9))
    first = gradient(model, x)
    before = saved_bytes(model, x)
    monkeypatch.setattr(Measured, "settle", None)
    assert torch.equal(gradient(model, x), first)
    assert saved_bytes(model, x) == before


@pytest.mark.parametrize("build", [lambda: encoder(14), lambda: own(6)])
def test_traces_do_not_measure_and_random_states_stay(
    build: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    model, x = build()
    sparsify(model.train(), Recipe("razor", 0.9))
    fewer = saved_bytes(model, x)
    assert sizes(model) == {}
    before = torch.get_rng_state()
    gradient(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert saved_bytes(model, x) > fewer
    restore(model)
    assert "logit_bits" not in vars(measured_stock(model))


def measured_stock(model: nn.Module) -> nn.Module:
    return model.layer.self_attn if hasattr(model.layer, "self_attn") else model.layer


def test_checkpoints_say_which_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = encoder(14)
    sparsify(model.train(), Recipe("razor", 0.9))
    gradient(model, x)
    kept = state.transient(model)
    want = gradient(model, x)
    twin, _ = encoder(14)
    sparsify(twin.train(), Recipe("razor", 0.9))
    monkeypatch.setattr(Measured, "settle", None)
    state.load_transient(twin, kept)
    assert torch.equal(gradient(twin, x), want)
    assert sizes(copy.deepcopy(twin)) == sizes(model)


def test_baselines_keep_what_their_papers_keep() -> None:
    model, x = encoder(14)
    sparsify(model.train(), Recipe("int8"))
    gradient(model, x)
    assert sizes(model) == {}


TINY, WIDE = 1e-6, 1e-4  # errors of copies within the rounding of bf16, and beyond


@pytest.mark.parametrize(
    ("errors", "bits"),
    [
        ([(LIMIT, 0.0)], 0),
        ([(1.0, 1.01 / AMPLIFIED)], 0),  # so few bits are off as far with any logits
        ([(math.nan, 0.0)], 0),
        ([(1.0, 0.99 / AMPLIFIED), (LIMIT / 4, WIDE)], 8),
        ([(1.0, 0.99 / AMPLIFIED), (1.01 * LIMIT / 4, WIDE)], 16),
        ([(3 * LIMIT, WIDE), (1.9 * LIMIT, TINY)], 8),  # what 8 bits leave is of bf16 itself
        ([(3 * LIMIT, WIDE), (2.1 * LIMIT, TINY)], 0),
    ],
)
def test_logits_are_to_blame_where_they_amplify_the_error(
    errors: list[tuple[float, float]], bits: int
) -> None:
    model, _ = encoder(1)
    sparsify(model, Recipe("razor", 0.97))
    layer = measured(model)
    rules, each = layer.rules, iter(errors)
    layer.settle(lambda: next(each), torch.bfloat16)
    assert next(each, None) is None
    assert layer.logit_bits == bits
    if bits:
        assert isinstance(layer.rules.wide, Half if bits == 16 else Quantized)
    else:
        assert layer.rules is rules


@pytest.mark.parametrize(("build", "scale"), [(encoder, 4), (gpt2, 20)])
def test_eight_bits_are_kept_where_they_are_enough(
    build: Callable[[float], tuple[nn.Module, Tensor]], scale: float
) -> None:
    model, x = build(scale)
    full = gradient(model.train(), x, torch.bfloat16)
    sparsify(model, Recipe("razor", 0.9))
    first = closeness(model, x, full, dtype=torch.bfloat16)
    assert set(sizes(model).values()) == {8}
    assert first >= 0.9995
    assert closeness(model, x, full, dtype=torch.bfloat16) == first


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_measure_once(reentrant: bool) -> None:
    model, x = encoder(14)
    exact = gradient(model.train(), x)
    sparsify(model, Recipe("razor", 0.9))
    layer = model.layer.forward
    model.layer.forward = partial(checkpoint, layer, use_reentrant=reentrant)
    assert closeness(model, x.requires_grad_(), exact) >= 0.995


class AttentionBlock(nn.Module):
    """Attention, by its interface or by its code, with statistics and dropout."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.drop = nn.BatchNorm1d(64), attention, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        some = isinstance(self.attention, nn.MultiheadAttention)
        return x + self.drop(self.attention(y, y, y)[0] if some else self.attention(y))


@pytest.mark.parametrize(
    "attention", [OwnAttention(64), nn.MultiheadAttention(64, 2, batch_first=True)]
)
def test_blocks_that_run_again_measure_before_their_first_run(attention: nn.Module) -> None:
    torch.manual_seed(0)
    model = Scaled(AttentionBlock(copy.deepcopy(attention)), 64, 1).train()
    with torch.no_grad():
        for name, weight in model.layer.attention.named_parameters():
            weight.mul_(14 if "in_proj" in name or name[0] in "qk" else 1)
    x = torch.randn(8, 32, 64)

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return gradient(model, x), torch.get_rng_state()

    exact, state = step(copy.deepcopy(model))
    sparsify(model, Recipe("razor", 0.9))
    reruns.attach(model.layer, "layer", 8, Memo())
    got, after = step(model)
    assert set(sizes(model).values()) == {16}
    assert torch.equal(after, state)
    assert model.layer.norm.num_batches_tracked == 1
    assert F.cosine_similarity(got, exact, dim=0) >= 0.99


@pytest.mark.parametrize("batch", [8, 32])  # 32 are as many as tokens
@pytest.mark.parametrize("padded", [False, True])
def test_masks_take_part(batch: int, padded: bool) -> None:
    model, _ = encoder(14)
    x = torch.randn(batch, 32, 64)
    mask = nn.Transformer.generate_square_subsequent_mask(32).isinf()
    padding = (torch.arange(32) > 20).expand(batch, 32) if padded else None
    model.layer.forward = partial(model.layer.forward, src_mask=mask, src_key_padding_mask=padding)
    exact = gradient(model.train(), x)
    del model.layer.forward
    sparsify(model, Recipe("razor", 0.9))
    model.layer.forward = partial(model.layer.forward, src_mask=mask, src_key_padding_mask=padding)
    assert closeness(model, x, exact) >= 0.995
