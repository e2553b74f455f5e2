"""Whole decoder language models: forward passes, gradients, bytes, and the way back."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from razorctl import Recipe, restore, sparsify
from razorctl.config.recipe import METHODS
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import RazorLayer
from razorctl.layers.by_type import razor_of
from razorctl.layers.heads.token_logits import Head
from razorctl.memory.saved import traced_bytes, traced_bytes_by_module
from tests.forked import Forked, program

TOKENS, VOCABULARY = 13, 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE_HEADS = SIZES | {"head_dim": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
BERT = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
BUILDERS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=0.1)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE_HEADS)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**WIDE_HEADS, sliding_window=4)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**WIDE_HEADS)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**WIDE_HEADS, sliding_window=4)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "gpt neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**BERT)),
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT)),
}
every_model = pytest.mark.parametrize("name", BUILDERS)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    for parameter in model.parameters():  # norms have scales of their own
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def batch(kind: str = "plain") -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, 9:] = 0
    if kind == "packed":
        starts = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)])
        inputs["position_ids"] = starts.expand(2, -1).contiguous()
    return inputs


def run(model: nn.Module, inputs: dict[str, Tensor], autocast: bool = False) -> list[Tensor]:
    """Logits, loss and all gradients, as one."""
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs)
    output.loss.backward()
    grads = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return [output.logits.detach() + 0, output.loss.detach(), torch.cat(grads)]


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a, b, 0).item()


@every_model
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_the_forward_pass_is_stock_and_the_gradient_is_close(name, kind, precision):
    model, inputs = build(name), batch(kind)
    if precision == "bf16":
        model = model.bfloat16()
    want = run(model, inputs, precision == "autocast")
    sparsify(model, Recipe("razor", ratio=0.7))
    got = run(model, inputs, precision == "autocast")
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6 if precision == "fp32" else 1e-2, atol=0)
    assert cosine(got[2], want[2]) > 0.98


@every_model
def test_an_exact_method_is_exact(name):
    model = build(name)
    want = run(model, batch("padded"))
    sparsify(model, Recipe("checkpoint"))
    assert isinstance(model.get_output_embeddings(), Head)
    got = run(model, batch("padded"))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-5)
    assert not METHODS["checkpoint"].approximates
    restore(model)
    assert type(model.get_output_embeddings()) is nn.Linear


@every_model
def test_all_that_saves_much_is_swapped(name):
    model = build(name)
    sparsify(model, Recipe("razor"))
    assert sum(isinstance(m, Attention) for m in model.modules()) == 2
    left = {type(m).__name__ for m in model.modules() if not isinstance(m, RazorLayer)}
    left.discard("BertAttention")  # which holds the attention, and an output layer
    assert not {n for n in left if n.endswith(("Norm", "Linear", "Conv1D", "Attention"))}
    assert left.isdisjoint({"SiLU", "SiLUActivation", "GELUActivation", "GELUTanh"})


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "phi3", "gemma"])
@pytest.mark.parametrize("attention", ["stored", "flash", "sparse-flash"])
def test_attention_backends(name, attention):
    model = build(name)
    if attention == "stored":
        model.set_attn_implementation("eager")
    want = run(model, batch("padded"))
    sparsify(model, Recipe("razor", ratio=0.5, attention=attention))
    got = run(model, batch("padded"))
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0)
    assert cosine(got[2], want[2]) > 0.99


@every_model
def test_copies_pickles_state_and_the_way_back(name):
    model = build(name)
    types, state = [type(m) for m in model.modules()], list(model.state_dict())
    want = run(model, batch())
    sparsify(model, Recipe("razor"))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert list(twin.state_dict()) == state
        assert torch.equal(run(twin, batch())[0], want[0])
        restore(twin)
        assert [type(m) for m in twin.modules()] == types
        got = run(twin, batch())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not any(
            {"rules", "memo", "backend", "function"} & set(vars(m)) for m in twin.modules()
        )


def test_a_fresh_process_loads_a_pickle(tmp_path):
    model = build("llama")
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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral", "gemma2"])
def test_checkpointing_gives_the_same_gradient(name, reentrant):
    model = build(name)
    sparsify(model, Recipe("razor", ratio=0.7))
    want = run(model, batch("padded"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    got = run(model, batch("padded"))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-6)


def test_a_cache_changes_nothing():
    model, inputs = build("qwen3"), batch()
    want = run(model, inputs | {"use_cache": True})
    sparsify(model, Recipe("razor", ratio=0.7))
    got = run(model, inputs | {"use_cache": True})
    assert torch.equal(got[0], want[0])
    assert cosine(got[2], want[2]) > 0.98


def test_generation_is_stock():
    model = build("qwen3").eval()
    ids = batch()["input_ids"]
    want = model.generate(ids, max_new_tokens=4, do_sample=False)
    sparsify(model, Recipe("razor"))
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), want)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2"])
def test_exact_bytes(name):
    model = build(name)
    config, rows = model.config, 2 * TOKENS
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
    layer = packed(queries) + 2 * packed(inner) + packed(queries + 2 * groups * head, 2)
    layer += 2 * norm(width)
    if name == "olmo2":  # whose norms come after, so that q, k, v and gate, up have a copy for all
        layer += 2 * packed(width) + norm(queries) + norm(groups * head)
    else:
        layer += 2 * 4 * width
    if name == "qwen3":  # norms of the heads
        layer += norm(head, config.num_attention_heads * rows) + norm(head, groups * rows)
    parts = traced_bytes_by_module(model, batch())
    # Cosines and sines count where they are first saved.
    turned = 2 * 4 * TOKENS * head
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
    model = build("llama")
    sparsify(model, Recipe("int8"))
    layer = model.model.layers[0].self_attn
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 2, 5, 8).unbind()
    bias = torch.randn(1, 4, 5, 5)
    for options in ({"position_bias": bias}, {"is_causal": False}, {}):
        got, _ = functions.get_interface("sdpa", None)(layer, q, k, v, None, **options)
        want, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](layer, q, k, v, None, **options)
        assert torch.equal(got, want)
        assert (
            "Sparse" in type(got.grad_fn.next_functions[0][0].next_functions[0][0]).__name__
        ) == ("position_bias" not in options)


class TestAlike:
    def test_other_formulas_and_other_packages_are_not_known(self):
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
        from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

        class Mine(LlamaRMSNorm):
            pass

        assert razor_of(MixtralRMSNorm) is razor_of(LlamaRMSNorm) is not None
        assert razor_of(Llama4TextRMSNorm) is None
        assert razor_of(Mine) is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_of_peft_and_of_lora(name):
    from peft import LoraConfig, get_peft_model

    model = build(name)
    names = sparsify(model, Recipe("lora"))
    assert "lm_head" in names
    assert len([n for n in names if n != "lm_head"]) == (8 if name == "gpt2" else 14)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    want = run(model, batch())
    assert want[2].any()
    restore(model)
    assert all(p.requires_grad for p in model.parameters())
    own = get_peft_model(
        build(name), LoraConfig(init_lora_weights=False, target_modules="all-linear")
    )
    stock = run(own, batch())
    sparsify(own, Recipe("razor", ratio=0.7))
    got = run(own, batch())
    assert torch.equal(got[0], stock[0])
    assert cosine(got[2], stock[2]) > 0.97


def test_saved_bytes_do_not_grow_with_the_vocabulary():
    sizes = []
    for vocabulary in (61, 610):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": vocabulary}))
        sparsify(model, Recipe("razor"))
        sizes.append(traced_bytes(model, batch()))
    assert sizes[0] == sizes[1]
