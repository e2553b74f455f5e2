"""Packing: the layout of sequences, their labels, and the same gradient as of padded texts."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.config.job import Job
from razorctl.models import joined_texts, tokens
from razorctl.models.transformers.language import LanguageModel
from razorctl.step import losses_of
from razorctl.training.loading import Order

TOKENIZER = SimpleNamespace(pad_token_id=0)
JOB = Job("any", "any", task="causal-lm")
LENGTHS = (5, 23, 9, 2, 31, 12)


def rows(lengths=LENGTHS, prompt=3):
    draw = random.Random(0)
    ids = [[draw.randint(1, 63) for _ in range(length)] for length in lengths]
    labels = [[-100] * min(prompt, len(own) - 1) + own[min(prompt, len(own) - 1) :] for own in ids]
    return {"input_ids": ids, "labels": labels}


def batch(packed, most=64, shapes=(), **made):
    options = {"tokens": most, "packing": packed, "shapes": shapes}
    found = tokens.causal_inputs(TOKENIZER, made or rows(), **options)
    stacked = {
        name: torch.stack([own[name] for own in found["inputs"]]) for name in found["inputs"][0]
    }
    return stacked, torch.stack(found["labels"])


@pytest.mark.parametrize("most", [31, 32, 40, 64, 1024])
def test_a_layout_has_every_text_once_and_never_more_tokens(most):
    draw = random.Random(most)
    for _ in range(50):
        lengths = [draw.randint(1, min(most, 200)) for _ in range(draw.randint(1, 16))]
        groups, width = joined_texts.layout(lengths, most)
        assert sorted(text for group in groups for text in group) == [*range(len(lengths))]
        assert all(sum(lengths[text] for text in group) <= width <= most for group in groups)
        assert len(groups) * width <= len(lengths) * joined_texts.rounded(max(lengths), most)
    groups, width = joined_texts.layout([8] * 4, most)
    assert len(groups) * width == 32  # nothing is padding


def test_every_token_of_a_packed_sequence():
    made = rows()
    inputs, labels = batch(True, most=40)
    assert inputs.keys() == {"input_ids", "position_ids"}
    groups, width = joined_texts.layout([*map(len, made["input_ids"])], 40)
    assert inputs["input_ids"].shape == labels.shape == (len(groups), width)
    for row, group in enumerate(groups):
        place = 0
        for text in group:
            own, said = made["input_ids"][text], made["labels"][text]
            for at, token in enumerate(own):
                assert inputs["input_ids"][row, place] == token
                assert inputs["position_ids"][row, place] == at
                following = said[at + 1] if at + 1 < len(said) else -100
                assert labels[row, place] == following
                place += 1
        assert (labels[row, place:] == -100).all()
        assert inputs["position_ids"][row, place:].tolist() == [*range(width - place)]


SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, use_cache=False,
                   resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZES)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**HIDDEN, **HEADS, **SIZES, use_cache=False)),
    "a window": lambda: MistralForCausalLM(
        MistralConfig(**HIDDEN, **HEADS, **SIZES, use_cache=False, sliding_window=6)
    ),
}  # fmt: skip


def model(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def gradient(net, packed, dtype=None, shapes=()):
    """The loss of all answers and its gradient, as a step computes them."""
    inputs, labels = batch(packed, shapes=shapes)
    net.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = losses_of(net(**inputs).logits, labels, JOB, "sum") / (labels != -100).sum()
    loss.backward()
    parts = [p.grad.flatten().double() for p in net.parameters() if p.grad is not None]
    return loss.item(), torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_that_of_padded_texts(name):
    net = model(name)
    (padded, expected), (packed, found) = gradient(net, False), gradient(net, True)
    assert packed == pytest.approx(padded, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * expected.abs().max())


# Shapes, and the one of the batch.
SHAPES = {
    "padded": (False, [(6, 32), (6, 48)], (6, 32)),
    "padded more": (False, [(6, 8), (6, 48)], (6, 48)),
    "joined": (True, [(4, 24), (1, 48), (4, 48)], (4, 48)),  # two sequences are empty
    "more sequences": (True, [(2, 32)], (4, 32)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_same_in_a_shape_for_graphs(name, shape):
    net = model(name)
    packed, shapes, wanted = SHAPES[shape]
    inputs, _ = batch(packed, shapes=shapes)
    assert inputs["input_ids"].shape == wanted
    (loss, expected), (padded, found) = gradient(net, packed), gradient(net, packed, shapes=shapes)
    assert padded == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * expected.abs().max())


def test_widths_for_graphs_are_few_and_cost_the_fewest_tokens():
    assert joined_texts.few_widths([1, 64, 65, 200], 1000) == (8, 64, 72, 200)
    assert joined_texts.few_widths([1, 90], 90) == (8, 90)
    draw = random.Random(0)
    lengths = [min(112, int(draw.expovariate(1 / 25)) + 1) for _ in range(500)]
    widths = joined_texts.few_widths(lengths, 112)

    def cost(widths=()):
        return sum(joined_texts.rounded(length, 112, widths) for length in lengths)

    every = [*range(8, 112, 8)]
    least = min(cost((*some, widths[-1])) for some in itertools.combinations(every, 5))
    assert len(widths) == 6
    assert cost() < least <= cost(widths) < 1.05 * least


def test_shapes_of_joined_texts_for_graphs():
    """Six shapes have few more tokens than a shape for each micro-batch."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 60) for _ in range(300)]
    some = joined_texts.drawn(lengths, 8, 64)
    shapes = joined_texts.few_shapes(some, max(lengths), 64)
    assert len(shapes) <= 6
    tokens = own_tokens = 0
    for own in some:
        rows, width = joined_texts.layout(own, 64, shapes)
        assert (len(rows), width) in shapes
        assert sorted(itertools.chain(*rows)) == [*range(8)]
        tokens += len(rows) * width
        rows, width = joined_texts.layout(own, 64)
        own_tokens += len(rows) * width
    assert own_tokens <= tokens < 1.1 * own_tokens
    full, width = joined_texts.layout([60] * 8, 64, shapes)
    assert (len(full), width) == (8, shapes[-1][1])  # no more sequences than texts
    (one,) = joined_texts.few_shapes(some, max(lengths), 64, 1)
    assert all(len(joined_texts.layout(own, 64, [one])[0]) == one[0] for own in some)


@pytest.mark.parametrize("attention", ["auto", "stored", "flash"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_razor_takes_packed_texts(attention, dtype):
    net, same = model("llama"), model("llama")
    sparsify(net, Recipe("razor", ratio=0.5, attention=attention))
    loss, exact = gradient(same, True, dtype)
    packed, found = gradient(net, True, dtype)
    assert packed == pytest.approx(loss, rel=1e-6 if dtype is None else 1e-2)
    assert torch.cosine_similarity(found, exact, 0) > 0.999
    _, padded = gradient(net, False, dtype)
    assert torch.cosine_similarity(found, padded, 0) > 0.998


@pytest.mark.parametrize("method", ["full", "razor", "checkpoint"])
def test_no_text_reaches_another_one(method):
    """The loss of the second text has no gradient at the first one, exactly."""
    net = model("llama")
    recipe = Recipe("full", activation_checkpointing=True)
    sparsify(
        net,
        recipe
        if method == "checkpoint"
        else Recipe(method, **({"ratio": 0.5} if method == "razor" else {})),
    )
    inputs, _ = batch(True, input_ids=[[*range(1, 10)], [*range(20, 27)]])
    ids, positions = inputs.values()
    assert ids.shape == (1, 16)
    embedded = net.get_input_embeddings()(ids).detach().requires_grad_()
    out = net(inputs_embeds=embedded, position_ids=positions).logits
    out[0, 9:].square().sum().backward()
    assert (embedded.grad[0, :9] == 0).all()
    assert (embedded.grad[0, 9:].abs().amax(1) > 0).all()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("method", ["full", "razor"])
def test_traced_bytes_are_those_of_a_full_micro_batch(method, packed):
    """The example of a plan keeps what real texts do that fill its shape."""
    net = model("llama")
    sparsify(net, Recipe("full") if method == "full" else Recipe("razor", ratio=0.5))
    files = SimpleNamespace(length=lambda size, usual: size)
    family = LanguageModel(
        name="any", summary="", task="causal-lm", pretrained=files, packing=packed
    )
    example = family.example(net, 2, 64)
    texts = rows((40, 24, 33, 31) if packed else (64, 40))
    inputs, _ = batch(packed, **texts)
    assert inputs["input_ids"].shape == (2, 64)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = net(**inputs).logits
    assert out.requires_grad
    assert sum(kept.values()) == saved_bytes(net, example)


def test_models_that_carry_texts_into_the_next_are_known():
    for name in MODELS:
        assert joined_texts.keeps_apart(model(name), lambda net, inputs: net(**inputs).logits)
    width = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48}
    opt = OPTConfig(**width, **SIZES, num_hidden_layers=2, num_attention_heads=2, use_cache=False)
    net = OPTForCausalLM(opt).train()
    assert not joined_texts.keeps_apart(net, lambda net, inputs: net(**inputs).logits)
    assert net.training


def test_texts_are_packed_each_alone_if_asked(hub):
    texts = ["a b c", "d e", "f g h i j k l", "m"]
    words = Tokenizer(
        tokenizers.WordLevel({w: i for i, w in enumerate("#" + "abcdefghijklm")}, "#")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="#", pad_token="#")
    found = tokens.single_texts(Dataset.from_dict({"text": texts}), own, 6)["input_ids"]
    assert found == [[1, 2, 3, 0], [4, 5, 0], [6, 7, 8, 9, 10, 11], [12, 0], [13, 0]]
    inputs, labels = batch(True, most=6, input_ids=[*found])
    assert inputs["input_ids"].tolist() == [
        [6, 7, 8, 9, 10, 11], [1, 2, 3, 0, 12, 0], [4, 5, 0, 13, 0, 0]
    ]  # fmt: skip
    assert inputs["position_ids"].tolist()[1:] == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 0]]
    assert labels.tolist()[1:] == [[2, 3, 0, -100, 0, -100], [5, 0, -100, 0, -100, -100]]


def test_the_gain_is_that_of_the_layouts():
    even = joined_texts.gain([64] * 100, 8, 64)
    assert (even.share, even.pays) == (1, False)
    mixed = joined_texts.gain([8] * 90 + [64] * 10, 8, 64)
    assert mixed.texts == pytest.approx(90 * 8 + 640, rel=0.2)
    assert mixed.texts <= mixed.packed < 0.6 * mixed.padded
    assert mixed.pays
    assert mixed.texts <= mixed.grouped < 0.5 * mixed.padded
    assert joined_texts.gain([8, 64] * 50, 2, 64, 1).grouped == pytest.approx(100 * 36, rel=0.05)
    for packed, computed in ((True, mixed.packed), (False, mixed.grouped)):
        rows, tokens = mixed.average(packed, 100 / 8, 8, 64)
        assert rows == (math.ceil(computed * 8 / 100 / 64) if packed else 8)
        assert tokens <= 64
        assert 0 <= rows * tokens - computed * 8 / 100 < 9 * rows
    graphs = joined_texts.gain([8] * 90 + [64] * 10, 8, 64, graphs=True)
    assert graphs.texts == mixed.texts
    assert mixed.packed <= graphs.packed < 1.2 * mixed.packed
    assert (graphs.padded, graphs.grouped) == (mixed.padded, mixed.grouped)  # of two lengths


def test_batches_are_grouped_by_length():
    draw = random.Random(0)
    lengths = [draw.randint(1, 99) for _ in range(103)]
    job = Job("any", "any", batch_size=4)
    order = Order(103, job, lengths)
    batches = [*order.batches()]
    assert len({row for own in batches for row in own}) == 100
    spread = [
        max(lengths[row] for row in own) - min(lengths[row] for row in own) for own in batches
    ]
    assert max(spread) < 20
    order.first = 7
    assert [*order.batches()] == batches[7:]
    assert [*Order(103, job, lengths).batches()] == batches
