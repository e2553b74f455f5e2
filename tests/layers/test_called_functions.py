"""Modules whose forward calls dropout and activation functions as functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BartConfig, BartModel
from transformers.models.bart.modeling_bart import BartEncoderLayer
from transformers.models.esm.modeling_esm import EsmIntermediate

from razorctl import Recipe, restore, sparsify
from razorctl.layers.recognition.called_functions import Calling, CallingActivation, recognized
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.surgery.excess import uncompressed
from tests.cases import Functions

INT8 = Recipe("int8", int8_weight_grad=False, int8_input_grad=False)
WIDTH, ROWS, TOKENS = 24, 2, 9
SCALE = 1.0  # what forwards read


def helped(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x, p=p, training=training)


class Helped(nn.Module):
    """A block that calls dropout in a function, and is called with more than one input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        return helped(self.dense(x) * scale, residual, 0.5, self.training)


class Plain(nn.Module):
    """A module with layers by the names of functions, which it does not call as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.relu = nn.Dropout(0.5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.relu(F.normalize(torch.tanh(x))))


class Named(nn.Module):
    """A module with an attribute by the name of one that razor layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.memo = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) * self.memo


class Global(nn.Module):
    """A module whose forward reads a global and calls a function of the file."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(helped(x, x, 0.5, self.training)) * SCALE


class Writing(nn.Module):
    """A module whose forward writes to a global."""

    def forward(self, x: Tensor) -> Tensor:
        global SCALE
        SCALE += 1
        return F.relu(x) * SCALE


class Later(nn.Module):
    """A module whose functions run in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda x: F.dropout(F.gelu(x)), x, use_reentrant=False)
        return F.relu(y)


class Passing(nn.Module):
    """A module that passes on a function, which then runs in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x)
        y.register_hook(F.relu)
        return y


def bart(dropout: float = 0.1) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_layers": 2, "vocab_size": 50}
    model = BartModel(
        BartConfig(
            d_model=WIDTH,
            decoder_layers=2,
            dropout=dropout,
            activation_dropout=dropout,
            max_position_embeddings=32,
            use_cache=False,
            **heads,
            **sizes,
        )
    )
    ids = torch.randint(3, 50, (ROWS, TOKENS))
    return model.train(), {"input_ids": ids, "decoder_input_ids": ids}


def step(model: nn.Module, inputs: dict[str, Tensor], precision: torch.dtype | None = None):
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        y = model(**inputs).last_hidden_state
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin().to(y.dtype))
    return y.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def test_what_is_recognized():
    assert recognized(Functions) is CallingActivation
    assert recognized(Helped) is recognized(BartEncoderLayer) is Calling
    assert recognized(EsmIntermediate) is CallingActivation  # which has a GELU of its own
    assert recognized(Plain) is recognized(nn.GELU) is recognized(BartModel) is None


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_blocks_of_bart_are_stock_but_for_masks_in_bits(precision):
    model, inputs = bart()
    full = traced_bytes_by_module(model, inputs)
    want, want_grads = step(model, inputs, precision)
    sparsify(model, INT8)
    assert isinstance(model.encoder.layers[0], Calling)
    kept = traced_bytes_by_module(model, inputs)
    # Masks of the attention's output, the activation function's and the MLP's.
    bits = ROWS * TOKENS * (2 * WIDTH + 40) // 8
    assert kept["encoder.layers.0"] == bits
    assert full["encoder.layers.0"] >= 4 * 8 * bits
    got, grads = step(model, inputs, precision)
    assert torch.equal(got, want)
    for a, b in zip(grads, want_grads, strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99 or b.norm() < 1e-3
    restore(model)
    assert type(model.encoder.layers[0]) is BartEncoderLayer
    assert torch.equal(step(model, inputs, precision)[0], want)


def test_options_of_functions():
    class Options(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(x + 1, inplace=True) + F.gelu(x, approximate="tanh")
            return y + F.leaky_relu(x, 0.2) + F.silu(x, inplace=False)

    x, results = torch.randn(40, 33), []
    model = nn.Sequential(nn.Linear(33, 33), Options())
    for sparse in (False, True):
        if sparse:
            sparsify(model, Recipe("half", int8_weight_grad=False, int8_input_grad=False))
        model.zero_grad()
        y = model(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin())
        results.append((y.detach(), model[0].weight.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    (want, near) = (grad for _, grad in results)
    assert (want - near).norm() < 2e-3 * want.norm()
    # x in half for GELU and for SiLU, dense for the unknown slope, and the bits of ReLU.
    n = x.numel()
    assert traced_bytes_by_module(model, x)["1"] == 2 * 2 * n + 4 * n + (n + 7) // 8


def test_a_function_of_the_file_and_an_input_by_name(device):
    block = Helped().to(device)
    x, residual = torch.randn(2, 40, WIDTH, device=device).unbind()
    results = []
    for sparse in (False, True):
        if sparse:
            sparsify(nn.Sequential(block), Recipe("half"))
            assert isinstance(block, Calling)
        torch.manual_seed(0)
        results.append(block(x, residual=residual, scale=2.0))
    assert torch.equal(*results)
    assert traced_bytes_by_module(block, (x, residual))[""] == x.numel() // 8


def test_a_module_with_an_attribute_of_a_razor_layer_stays_stock():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Named(), nn.Linear(WIDTH, 2))
    sparsify(model, INT8)
    assert type(model[1]) is Named
    assert model(torch.randn(3, WIDTH)).shape == (3, 2)


def test_what_else_a_module_keeps_is_named_as_stock():
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(torch.softmax(x @ x.mT, -1), 0.5, self.training) @ x

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scores()), torch.randn(4, 64, WIDTH)
    full = traced_bytes_by_module(model, x)
    sparsify(model, INT8)
    assert isinstance(model[1], Calling)
    kept = traced_bytes_by_module(model, x)
    assert kept["1"] < 0.9 * full["1"]  # from which on a razor layer counts as stock
    assert uncompressed(model, kept, sum(full.values()), 0, full).startswith("1 Scores layer (")


@pytest.mark.parametrize("kind", [Global, Writing, Later, Passing])
def test_globals_are_those_of_now_and_functions_may_run_later(kind, monkeypatch):
    x, results = torch.randn(5, 33), []
    model = nn.Sequential(nn.Linear(33, 33), kind())
    for sparse in (False, True):
        if sparse:
            sparsify(model, INT8)
            assert isinstance(model[1], Calling) == (kind in (Global, Passing))
        for scale, residual in ((2.0, 1), (3.0, 2)):
            monkeypatch.setitem(globals(), "SCALE", scale)
            monkeypatch.setitem(globals(), "helped", lambda x, r, *rest, k=residual: k * r)
            torch.manual_seed(0)
            y = model(x)
            dx = torch.autograd.grad(y.sin().sum(), model[0].bias)[0]
            results.append((y.detach(), dx, SCALE))
    for want, got in zip(results[:2], results[2:], strict=True):
        assert torch.equal(got[0], want[0])
        assert F.cosine_similarity(got[1], want[1], 0) > 0.999
        assert got[2] == want[2]
