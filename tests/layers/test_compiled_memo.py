"""Layers share in a program that torch.compile traces what they share in an eager one."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from packaging.version import Version
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import BertConfig, BertForSequenceClassification

from razorctl import Recipe, sparsify
from razorctl.layers.kinds.linear import Linear
from razorctl.methods import EXACT, METHODS
from tests.kept import held_bytes
from tests.models import llama

LENGTHS = torch.tensor([[32], [20], [8], [31]])  # of texts; the rest is padding


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=1, img_size=64)
    return model, {"x": torch.randn(4, 3, 64, 64)}


def bert(**dropout: float) -> tuple[nn.Module, dict[str, Tensor]]:
    model = BertForSequenceClassification(
        BertConfig(
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=128,
            vocab_size=50,
            **{"attention_probs_dropout_prob": 0.0} | dropout,
        )
    )
    ids = torch.randint(50, (4, 32))
    return model, {"input_ids": ids, "attention_mask": (torch.arange(32) < LENGTHS).long()}


def decoder() -> tuple[nn.Module, dict[str, Tensor]]:
    return llama(num_hidden_layers=1), {"input_ids": torch.randint(50, (4, 32))}


def step(
    model: nn.Module, forward: Callable[..., Any], seed: int = 1, **inputs: Tensor
) -> list[Tensor | None]:
    """The bytes of activations that a forward pass saves, and the gradients of all parameters.

    seed: of dropout.
    """
    model.zero_grad()
    torch.manual_seed(seed)
    outputs: list[Any] = []
    size = held_bytes(model, lambda: outputs.append(forward(**inputs)))
    (output,) = outputs
    getattr(output, "logits", output).square().sum().backward()
    return [torch.tensor(size), *(p.grad for p in model.parameters())]


MADE = Counter[str]()  # calls of operations in the backward pass that was compiled last


def _boxed(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def _counted(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
    MADE.clear()
    MADE.update(str(node.target) for node in graph.graph.nodes)
    return make_boxed_func(graph.forward)


AOT_EAGER = aot_autograd(
    fw_compiler=_boxed, bw_compiler=_counted, partition_fn=min_cut_rematerialization_partition
)


def both(
    model: nn.Module, seed: int = 1, **inputs: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """`step` of a model, and of the same one compiled as a whole; seed: of dropout in the first."""
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(twin, fullgraph=True, backend=AOT_EAGER)
    return step(model, model, seed, **inputs), step(twin, compiled, **inputs)


def assert_close(
    got: list[Tensor | None], want: list[Tensor | None], precision: torch.dtype | None
) -> None:
    for a, b in zip(got, want, strict=True):
        if precision is None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        else:
            assert (a - b).norm() <= 0.1 * b.norm()


@pytest.mark.parametrize(
    ("build", "precision", "ratio"), [(decoder, None, 0.9), (vit, torch.bfloat16, 0.8)]
)
def test_a_compiled_model_saves_no_more_than_an_eager_one(build, precision, ratio):
    model, inputs = build()
    sparsify(model.train(), Recipe("razor", ratio))
    with torch.autocast("cpu", precision, enabled=precision is not None):
        (eager, *want), (compiled, *got) = both(model, **inputs)
    assert 0 < compiled <= eager
    assert_close(got, want, precision)


def test_dropout_of_attention_takes_no_more_bytes_compiled():
    model, inputs = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.2)
    sparsify(model.train(), Recipe("razor", 0.9))
    torch.manual_seed(1)
    drawn = int(torch.randint(2**62, (1,)))  # as a compiled program draws it
    (eager, *want), (compiled, *got) = both(model, drawn, **inputs)
    assert 0 < compiled < eager  # which keeps the whole state of the generator
    assert_close(got, want, None)


def test_inductor_drops_the_same_attention_in_both_passes():
    model, x = nn.MultiheadAttention(32, 2, dropout=0.5, batch_first=True), torch.randn(4, 16, 32)
    sparsify(model.train(), Recipe("half"))  # few kernels of C++
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)  # by Inductor, whose draws are its own

    def value(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(x, x, x, need_weights=False)[0].square().sum()

    value(1).backward()
    bias = model.in_proj_bias
    gradient = torch.cat([torch.zeros(64), bias.grad[64:]])  # of v

    def slope(seed: int) -> float:
        """The derivative along the gradient, by what the forward pass drops."""
        step, ends = 0.01 / float(gradient.norm()), []
        for change in (step, -2 * step):
            with torch.no_grad():
                bias.add_(gradient, alpha=change)
            ends.append(float(value(seed)))
        with torch.no_grad():
            bias.add_(gradient, alpha=step)
        return (ends[0] - ends[1]) / (2 * step)

    want = float(gradient.square().sum())
    assert abs(slope(1) - want) <= 0.01 * want
    assert abs(slope(2) - want) > 0.05 * want  # what another draw drops has another gradient


def test_what_is_made_again_compiles_as_a_whole(monkeypatch):
    method = METHODS["int8"]
    rules = {kind: f"{rule}-again" for kind, rule in method.rules.items() if kind not in EXACT}
    monkeypatch.setitem(METHODS, "int8", replace(method, rules=rules | EXACT))
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    model, inputs = vit()
    sparsify(model.train(), Recipe("int8"))
    with torch.autocast("cpu", torch.bfloat16):
        (eager, *want), (compiled, *got) = both(model, **inputs)
    assert MADE["razorctl.attention_again.default"] == MADE["razorctl.norm_again.default"] == 1
    if Version(torch.__version__) >= Version("2.15"):  # 2.11 keeps what it could recompute
        assert 0 < compiled <= eager
    assert_close(got, want, torch.bfloat16)


def test_neither_what_has_changed_nor_what_is_seen_in_another_precision_is_shared():
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)
            self.head = nn.Linear(32, 3)  # the last, which stays stock

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            x.mul_(torch.linspace(-2, 2, 32))
            y = self.left(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = y.sigmoid() * self.right(x.contiguous())  # the same fake tensor
            z: Tensor = self.head(y.float())
            return z

    model = Changes()
    sparsify(model, Recipe("int8"))
    (_, *want), (_, *got) = both(model, x=torch.randn(12, 32))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_graph_may_break_inside_an_attention():
    def breaks(*_: Any) -> None:
        torch._dynamo.graph_break()

    model, inputs = decoder()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(breaks)
    _, *exact = step(model.train(), model, **inputs)
    sparsify(model, Recipe("razor", 0.9))
    torch.compiler.reset()
    model.model.layers[0].self_attn.compile(backend="eager")
    _, *got = step(model, model, **inputs)
    assert_close(got, exact, torch.bfloat16)
