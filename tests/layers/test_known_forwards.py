"""Forwards that razor classes write again: those of known releases, and patched ones."""

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP

from razorctl.layers import by_type
from razorctl.layers.known_forwards import FILE, fingerprint, is_known, name_of, release

# Of EvaAttention before timm 1.0.28, which has no gate: it runs as attention that nobody knows.
OTHERS = ("41f4e6f25f207200", "475daff770740fb2")


def registered() -> list[type[nn.Module]]:
    """The classes whose forward a razor class, or the connections of a block, write again."""
    from peft.tuners import lora

    from razorctl.layers.libraries.transformers import ALIKE

    kinds = {reference for razor in ALIKE for reference in razor.references}
    for file in by_type._files(by_type.LIBRARIES):
        swaps = getattr(file, "SWAPS", {})
        kinds |= {kind for kind, razor in swaps.items() if razor.rewrites}
        kinds |= {*getattr(file, "PRE_NORM", ()), *getattr(file, "LINEAR_FIRST", ())}
    return sorted({*kinds, lora.Linear}, key=name_of)


def test_the_installed_releases_are_known(pytestconfig):
    """`--write-forwards` adds them, once someone has read what has changed in them."""
    table = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    listed = registered()
    for kind in listed:
        own, prints = fingerprint(kind), table.setdefault(name_of(kind), {})
        if own not in OTHERS:
            prints.setdefault(own, release(kind))
    lines = (f" {json.dumps({k: table[k]}, sort_keys=True)[1:-1]}" for k in sorted(table))
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if pytestconfig.getoption("--write-forwards"):
        FILE.write_text(text, "utf-8")
    assert FILE.read_text("utf-8") == text
    assert {name_of(kind) for kind in listed} == table.keys()


def other(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that returns other values than `forward`."""

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        y = forward(self, *args, **kwargs)
        return (1.5 * y[0], *y[1:]) if isinstance(y, tuple) else 1.5 * y

    return changed


class Renamed(nn.Module):
    """LlamaMLP in other words."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Another docstring."""
        out = self.down_proj(self.act_fn(self.gate_proj(value)) * self.up_proj(value))  # a note
        return out


class Swapped(nn.Module):
    def forward(self, x):
        out = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return out


def test_words_do_not_count_and_names_of_layers_do():
    assert fingerprint(MistralMLP) == fingerprint(LlamaMLP)
    changed = {name: fingerprint(kind) for name, kind in {"a": Renamed, "b": Swapped}.items()}
    assert changed["a"] == fingerprint(LlamaMLP) != changed["b"]


def test_methods_that_a_forward_calls_count(monkeypatch):
    for kind, name in ((nn.TransformerEncoderLayer, "_ff_block"), (nn.Conv2d, "_conv_forward")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, other(getattr(kind, name)))
            assert not is_known(kind)
        assert is_known(kind)


def test_decorators_of_a_library_do_not_count_and_others_do(monkeypatch):
    assert is_known(LlamaDecoderLayer)  # which transformers wraps from 5.18 on
    stock = BertOutput.forward
    wrapper = functools.wraps(stock)(lambda self, *inputs: 2 * stock(self, *inputs))
    monkeypatch.setattr(BertOutput, "forward", wrapper)
    assert not is_known(BertOutput)


def test_a_forward_without_source_is_unknown(monkeypatch):
    space: dict[str, Any] = {}
    exec("def forward(self, x):\n    return x", space)
    for forward in (space["forward"], len, functools.partial(print)):
        monkeypatch.setattr(nn.SiLU, "forward", forward)
        assert fingerprint(nn.SiLU) is None
        assert by_type.razor_of(nn.SiLU) is None
