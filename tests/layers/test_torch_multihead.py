"""torch's MultiheadAttention and the layers that it is in, against themselves in stock."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.layers.base import RazorLayer
from razorctl.layers.kinds.linear import Linear
from razorctl.rules.dense import Dense
from tests import zoo
from tests.cases import razor
from tests.layers.test_every_layer import TOLERANCE, assert_close

BATCH, QUERIES, KEYS, WIDTH, HEADS = 4, 5, 7, 24, 3
PADDING = torch.arange(KEYS) >= torch.tensor([[7], [5], [3], [7]])
GENERATOR = torch.Generator().manual_seed(0)
OF_HEADS = torch.randn(BATCH * HEADS, QUERIES, KEYS, generator=GENERATOR)
SCORES = torch.randn(QUERIES, KEYS, generator=GENERATOR)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(QUERIES)

# What an attention is built with, which of its inputs are one, and what it is called with.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "self": ({"batch_first": True}, "xxx", {}),
    "tokens first": ({}, "xxx", {"attn_mask": CAUSAL, "is_causal": True}),
    "cross": ({"batch_first": True}, "xyy", {"attn_mask": SCORES > 1, "key_padding_mask": PADDING}),
    "cross, tokens first": ({"bias": False}, "xyy", {"key_padding_mask": PADDING}),
    "separate": ({}, "xyz", {"attn_mask": SCORES > 1}),
    "positions": ({"batch_first": True}, "xxz", {}),
    "sizes": ({"kdim": 12, "vdim": 8, "batch_first": True}, "xyz", {"attn_mask": OF_HEADS}),
    "bias of keys": ({"add_bias_kv": True}, "xyy", {"key_padding_mask": PADDING}),
    "zero key": ({"add_zero_attn": True}, "xyz", {"attn_mask": SCORES}),
    "dropout": ({"dropout": 0.3}, "xyy", {}),
}


def attention(options: dict[str, Any]) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layer


def inputs(layer: nn.MultiheadAttention, same: str, batched: bool = True) -> list[Tensor]:
    """Query, key and value, each a leaf; equal letters of `same` are one tensor."""
    torch.manual_seed(1)
    keys = QUERIES if same[0] == same[1] else KEYS
    leaves: dict[str, Tensor] = {}
    sizes = zip(same, (QUERIES, keys, keys), (WIDTH, layer.kdim, layer.vdim), strict=True)
    for letter, tokens, width in sizes:
        batch = (BATCH,) if batched else ()
        shape = (*batch, tokens) if layer.batch_first else (tokens, *batch)
        leaves.setdefault(letter, torch.randn(*shape, width, requires_grad=True))
    return [leaves[letter] for letter in same]


def step(layer: nn.Module, given: list[Tensor], precision: Any = None, **options: Any) -> Any:
    """The results of the layer, and the gradients of inputs and parameters."""
    layer.zero_grad()
    torch.manual_seed(7)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        y, weights = layer(*given, **options)
    loss = (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
    if weights is not None:
        loss = loss + weights.float().square().sum()
    leaves = [*{id(t): t for t in given}.values(), *layer.parameters()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [y] if weights is None else [y, weights], list(gradients)


def exact(layer: nn.Module) -> RazorLayer:
    """A razor layer that keeps everything."""
    return razor(layer, Dense(), "sparse-flash")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [False, True], ids=["fused", "weights"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_outputs_are_stock_and_gradients_of_what_is_kept_exact(name, weights, precision):
    options, same, call = CASES[name]
    layer = attention(options)
    given = inputs(layer, same)
    want, gradients = step(layer, given, precision, need_weights=weights, **call)
    got, others = step(exact(layer), given, precision, need_weights=weights, **call)
    assert all(map(torch.equal, got, want))
    assert_close(others, gradients, TOLERANCE[precision])


@pytest.mark.parametrize("weights", [False, True], ids=["fused", "weights"])
def test_a_mask_that_is_learned_gets_its_gradient(weights):
    results = []
    padding = torch.zeros(BATCH, KEYS).masked_fill(PADDING, -torch.inf)
    for change in (lambda layer: layer, exact):
        layer, bias = attention({}), SCORES.clone().requires_grad_()
        call = {"attn_mask": bias * 2, "key_padding_mask": padding, "need_weights": weights}
        y, _ = change(layer)(*inputs(layer, "xyy"), **call)
        results.append(torch.autograd.grad(y.square().sum(), bias))
    assert_close(*results, 2e-5)


def test_errors_are_those_of_stock():
    for change in (lambda layer: layer, exact):
        layer = change(attention({}))
        given = inputs(layer, "xyy")
        with pytest.raises(RuntimeError, match="shape of the 2D attn_mask is"):
            layer(*given, attn_mask=SCORES.T)
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            layer(*given, is_causal=True)


def encoder(activation: Any = F.gelu, norm_first: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout, activation, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


class Translator(nn.Module):
    """An encoder and a decoder, whose layers all attend to one memory."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
        self.model = nn.Transformer(32, 4, 1, 2, **sizes, norm_first=norm_first)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        masks = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(16)}
        padding = src_key_padding_mask
        y: Tensor = self.model(
            src,
            tgt,
            **masks,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return y


TOKENS, OTHERS = (torch.randn(8, 16, 32, generator=GENERATOR) for _ in range(2))
PAD = torch.zeros(8, 16).masked_fill(torch.arange(16) >= torch.arange(9, 17)[:, None], -torch.inf)
TEXTS = {"src": TOKENS, "src_key_padding_mask": PAD}
TRANSLATED = TEXTS | {"tgt": OTHERS}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_a_translator(norm_first, precision):
    model = Translator(norm_first).train()
    names = list(model.state_dict())
    want, _, exact = zoo.step(model, TRANSLATED, precision)
    full = saved_bytes(model, TRANSLATED, autocast=precision)
    for method, cosine, share in (("half", 0.9999, 0.8), ("int8", 0.999, 0.45)):
        sparsify(model, Recipe(method))
        got, _, close = zoo.step(model, TRANSLATED, precision)
        assert torch.equal(got, want)
        assert torch.cosine_similarity(close, exact, dim=0) > cosine
        assert saved_bytes(model, TRANSLATED, autocast=precision) < share * full
        assert list(model.state_dict()) == names
        restore(model)
    assert torch.equal(zoo.step(model, TRANSLATED, precision)[2], exact)


@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_takes_the_fast_path(padded, monkeypatch):
    """Of torch, which reads the weights, and not the layers that it is in."""
    model = encoder().eval()
    given = TEXTS if padded else {"src": TOKENS}
    with torch.no_grad():
        want = model(**given)
        sparsify(model, Recipe("int8"))
        monkeypatch.setattr(Linear, "forward", None)
        assert torch.equal(model(**given), want)


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, torch.relu, nn.GELU()])
def test_an_activation_that_is_a_function_keeps_by_its_rule(activation):
    model = encoder(activation)
    before = model.layers[0].activation
    sparsify(model, Recipe("int8"))
    assert isinstance(model.layers[0].activation, RazorLayer)
    restore(model)
    assert model.layers[0].activation is before
    assert not isinstance(model.layers[0].activation, RazorLayer)


def test_another_function_stays_stock():
    model = encoder(F.mish)
    sparsify(model, Recipe("int8"))
    assert not isinstance(model.layers[0], RazorLayer)
    assert isinstance(model.layers[0].self_attn, RazorLayer)


def test_a_memory_is_packed_once_for_all_layers():
    model = Translator(False).train()
    sparsify(model, Recipe("int8"))
    packed = []
    layers = [m for m in model.modules() if isinstance(m, RazorLayer)]
    rules = {id(rule): rule for m in layers if m.rules for rule in m.rules.each}
    memories = []
    for rule in rules.values():
        pack = rule.pack
        rule.pack = lambda x, pack=pack: packed.append(x) or pack(x)
    model.model.encoder.register_forward_hook(lambda m, args, y: memories.append(y.detach()))
    model(**TRANSLATED)
    flat = memories[0].flatten(0, 1)
    assert sum(x.shape == flat.shape and torch.equal(x, flat) for x in packed) <= 1
