"""Whole decoder language models: masks, caches, adapters and bytes."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from razorctl import Recipe, restore, sparsify
from razorctl.layers.by_type import razor_of
from razorctl.memory.saved import traced_bytes, traced_bytes_by_module
from tests.forked import Forked, program
from tests.models import TEXT
from tests.zoo import IDS, TEXTS, cosine, small, step


def batch(kind: str) -> dict[str, Tensor]:
    labels = IDS.clone()
    labels[0, :4] = -100
    inputs = {"input_ids": IDS, "labels": labels}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(IDS)
        inputs["attention_mask"][1, 5:] = 0
    else:
        starts = torch.cat([torch.arange(3), torch.arange(5)])
        inputs["position_ids"] = starts.expand(3, -1).contiguous()
    return inputs


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_texts_that_are_padded_or_packed(name, kind, precision):
    model, _ = small(name)
    if precision:
        model = model.bfloat16()
    want = step(model, batch(kind))
    sparsify(model, Recipe("razor", ratio=0.7))
    got = step(model, batch(kind))
    assert torch.equal(got[0], want[0])
    assert cosine(got[2], want[2]) > 0.98


def test_a_fresh_process_loads_a_pickle(tmp_path):
    model, _ = small("llama")
    sparsify(model, Recipe("razor"))
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "ids = torch.ones(1, 5, dtype=torch.long)\n"
        "model(input_ids=ids, labels=ids).loss.backward()\n"
        "print(type(model.model.norm).__name__)"
    )
    _, out, errors = Forked(program, code, "model.pt", folder=tmp_path).ended()
    assert out.strip() == "RazorLlamaRMSNorm", errors


def test_a_cache_changes_nothing():
    model, inputs = small("qwen3")
    want = step(model, inputs | {"use_cache": True})
    sparsify(model, Recipe("razor", ratio=0.7))
    got = step(model, inputs | {"use_cache": True})
    assert torch.equal(got[0], want[0])
    assert cosine(got[2], want[2]) > 0.98


def test_generation_is_stock():
    model = small("qwen3")[0].eval()
    want = model.generate(IDS, max_new_tokens=4, do_sample=False)
    sparsify(model, Recipe("razor"))
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), want)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2"])
def test_exact_bytes(name):
    model, _ = small(name)
    config, rows = model.config, IDS.numel()
    sparsify(model, Recipe("int8"))
    width, inner = config.hidden_size, config.intermediate_size
    head, groups = model.model.layers[0].self_attn.head_dim, config.num_key_value_heads
    queries = config.num_attention_heads * head

    def packed(columns: int, tiles: int = 1) -> int:
        """A byte for each element, and 4 of scale and zero point for each tile."""
        return columns * (rows + 4 * tiles)

    def norm(columns: int, rows: int = rows) -> int:
        """x_hat and 1 / std."""
        return columns * (rows + 4) + 4 * rows

    # The input of the output layer of the attention, gate and up; q, k and v in tiles of a
    # sequence, each k and v once for the queries that share it. What the norm before gives has the
    # codes of x_hat, with scales of its own.
    layer = packed(queries) + 2 * packed(inner) + packed(queries + 2 * groups * head, len(IDS))
    layer += 2 * norm(width)
    if name == "olmo2":  # whose norms come after, so that q, k, v and gate, up have a copy for all
        layer += 2 * packed(width) + norm(queries) + norm(groups * head)
    else:
        layer += 2 * 4 * width
    if name == "qwen3":  # norms of the heads
        layer += norm(head, config.num_attention_heads * rows) + norm(head, groups * rows)
    parts = traced_bytes_by_module(model, TEXTS)
    # Cosines and sines count where they are first saved.
    turned = 2 * 4 * IDS.shape[1] * head
    sizes = [sum(n for part, n in parts.items() if f"layers.{i}." in part) for i in range(2)]
    assert sizes == [layer + turned, layer]
    rest = {part: size for part, size in parts.items() if "layers" not in part}
    assert rest == {
        "model.embed_tokens": 8 * rows,
        "model.norm": norm(width),
        "lm_head": 4 * rows * width,  # the hidden states
        "": 4 * rows * width + 8,  # their gradient, and the divisor of the loss
    }


def test_what_attention_alone_cannot_do_runs_stock():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from razorctl.layers.attention.transformers import Functions

    functions = Functions(ALL_ATTENTION_FUNCTIONS)
    model, _ = small("llama")
    sparsify(model, Recipe("int8"))
    layer = model.model.layers[0].self_attn
    q = torch.randn(2, 4, 5, 6, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 5, 6).unbind()
    bias = torch.randn(1, 4, 5, 5)
    for options in ({"position_bias": bias}, {"is_causal": False}, {}):
        got, _ = functions.get_interface("sdpa", None)(layer, q, k, v, None, **options)
        want, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, None, **options)
        assert torch.equal(got, want)
        assert (
            "Sparse" in type(got.grad_fn.next_functions[0][0].next_functions[0][0]).__name__
        ) == ("position_bias" not in options)


def test_other_formulas_and_other_packages_are_not_known():
    from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
    from transformers.models.roberta.modeling_roberta import RobertaOutput

    class Mine(BertOutput):
        pass

    assert razor_of(RobertaOutput) is razor_of(BertOutput) is not None
    assert razor_of(BertIntermediate) is None
    assert razor_of(Mine) is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_of_lora(name):
    model, inputs = small(name)
    names = sparsify(model, Recipe("lora"))
    assert "lm_head" in names
    tied = {"lm_head", "transformer.wte"}
    assert len([n for n in names if n not in tied]) == (8 if name == "gpt2" else 14)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    assert step(model, inputs)[2].any()
    restore(model)
    assert all(p.requires_grad for p in model.parameters())


def test_saved_bytes_do_not_grow_with_the_vocabulary():
    sizes = []
    for vocabulary in (61, 610):
        model = LlamaForCausalLM(LlamaConfig(**TEXT | {"vocab_size": vocabulary}))
        sparsify(model, Recipe("razor"))
        sizes.append(traced_bytes(model, TEXTS))
    assert sizes[0] == sizes[1]
