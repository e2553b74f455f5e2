"""Inputs and labels of language models, with tokenizers that are trained here."""

import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from razorctl.errors import DataError, UsageError
from razorctl.models import chats, tokens

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away"]
TEXTS = ["the cat sat", "on a mat and", "the dog", "ran far away\nand sat on a mat"]
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "on a mat"},
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat far away"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "ran"},
]


@pytest.fixture(autouse=True)
def caches(hub):
    """Files go to a cache of this test."""


@pytest.fixture(scope="module")
def bpe():
    """Byte-level, as GPT-2's: nothing is put around a text, and <end> ends it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<end>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def bert():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return BertTokenizer(vocab={word: i for i, word in enumerate([*special, *WORDS])})


@pytest.fixture
def chatty(bpe, request):
    bpe.chat_template = request.param
    yield bpe
    bpe.chat_template = None


def rows(texts):
    return Dataset.from_dict({"text": texts})


def talks(*conversations):
    return Dataset.from_dict({"messages": list(conversations)})


def test_blocks_are_the_texts_one_after_the_other(bpe):
    told = []
    found = tokens.token_blocks(rows(TEXTS), bpe, 5, told.append)
    stream = [token for text in TEXTS for token in [*bpe.encode(text), bpe.eos_token_id]]
    assert {len(block) for block in found["input_ids"]} == {5}
    assert [*chain.from_iterable(found["input_ids"])] == stream[: len(stream) // 5 * 5]
    assert len(stream) % 5  # so that some are left out
    assert "int32" in str(found.features["input_ids"])
    assert told == ["tokenizing, 0 of 4 texts"]


def test_blocks_of_bert_begin_and_end_as_its_texts(bert):
    found = tokens.token_blocks(rows(TEXTS), bert, 6)["input_ids"]
    cls, sep = bert.cls_token_id, bert.sep_token_id
    assert all(block[0] == cls and block[-1] == sep and len(block) == 6 for block in found)
    plain = [token for text in TEXTS for token in [*bert.encode(text)[1:-1], sep]]
    assert [*chain.from_iterable(block[1:-1] for block in found)] == plain[: len(plain) // 4 * 4]


def test_large_texts_make_the_same_blocks_in_a_file(bpe, monkeypatch):
    texts = ["\n".join(TEXTS) + "\n", *TEXTS] * 3
    whole = tokens.token_blocks(rows(texts), bpe, 7)
    for name, size in (("BATCH", 2), ("PIECE", 16), ("GROUP", 30), ("SMALL", 100)):
        monkeypatch.setattr(tokens, name, size)
    filed = tokens.token_blocks(rows(texts), bpe, 7)
    assert filed.cache_files
    assert not whole.cache_files
    assert filed["input_ids"] == whole["input_ids"]
    again = tokens.token_blocks(rows(texts), bpe, 7)
    assert again.cache_files == filed.cache_files
    assert tokens.token_blocks(rows(texts), bpe, 8).cache_files != filed.cache_files
    assert tokens.token_blocks(rows(texts[1:]), bpe, 7).cache_files != filed.cache_files


def test_too_few_tokens_are_counted(bpe):
    count = len(bpe.encode("the cat")) + 1
    with pytest.raises(DataError, match=f"have {count} tokens, too few .* at most {count}"):
        tokens.token_blocks(rows(["the cat"]), bpe, 99)
    assert len(tokens.token_blocks(rows(["the cat"]), bpe, count)) == 1


def test_what_a_tokenizer_must_have(bpe, bert):
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    nothing = PreTrainedTokenizerFast(tokenizer_object=inner)
    with pytest.raises(UsageError, match="no token that ends a text; choose"):
        tokens.token_blocks(rows(TEXTS), nothing, 4)
    with pytest.raises(UsageError, match="input size 2 leaves no room"):
        tokens.token_blocks(rows(TEXTS), bert, 2)
    with pytest.raises(UsageError, match=r"no mask token, .* or --task causal-lm"):
        tokens.masked_inputs(bpe, True, {"input_ids": [[1, 2]]})
    with pytest.raises(UsageError, match=r"neither a chat template nor a token that ends an answ"):
        chats.conversation_tokens(talks(CHAT), nothing, 99)
    with pytest.raises(UsageError, match=r"no chat template, .* choose a run that was trained on"):
        chats.prompt(bpe, {"messages": CHAT})


@pytest.mark.parametrize("chatty", [PLAIN, MARKED], indirect=True, ids=["plain", "marked"])
def test_only_what_an_assistant_says_has_labels(chatty):
    (row,) = chats.conversation_tokens(talks(CHAT), chatty, 99)
    text = (
        "<|system|>on a mat<end><|user|>the cat<end><|assistant|>sat far away<end>"
        "<|user|>the dog<end><|assistant|>ran<end>"
    )
    assert row["input_ids"] == chatty.encode(text)
    said = [token for token in row["labels"] if token != -100]
    assert said == chatty.encode("sat far away<end>ran<end>")
    assert all(label in (-100, token) for token, label in zip(*row.values(), strict=True))


@pytest.mark.parametrize("chatty", [PLAIN], indirect=True)
def test_long_conversations_are_cut_and_counted(chatty, caplog):
    late = [{"role": "user", "content": "far away " * 9}, CHAT[2]]
    with caplog.at_level(logging.WARNING):
        found = chats.conversation_tokens(talks(CHAT, CHAT[1:3], late), chatty, 12)
    assert [len(ids) for ids in found["input_ids"]] == [12, len(found[1]["input_ids"])]
    assert found[0]["input_ids"] == chatty.apply_chat_template(CHAT, return_dict=False)[:12]
    (record,) = caplog.records
    assert record.getMessage() == (
        "of 3 conversations, 1 is cut after 12 tokens, and 1 is left out, since no answer begins "
        "before that; a larger --input-size keeps more."
    )
    with pytest.raises(DataError, match="none of the conversations has an answer within 3 tokens"):
        chats.conversation_tokens(talks(CHAT), chatty, 3)


def test_cut_texts_are_counted(bert):
    texts = ["the cat sat", "the cat sat on", " ".join(WORDS)]

    def cut(**rows):
        return [length > 5 for length in tokens.text_lengths(bert, 5, rows)]

    assert sum(cut(text=texts)) == 2
    assert sum(cut(text=["the", "the cat"], text_pair=["cat", "sat"])) == 1
    assert sum(cut(tokens=[text.split() for text in texts])) == 2


def test_only_answers_have_labels_in_plain_words_too(bpe):
    """A tokenizer without a template: every token that is no answer's has no label."""
    call = {"tool_calls": [{"type": "function", "function": {"name": "far", "arguments": {}}}]}
    spoken = [*CHAT[:2], {"role": "assistant", "content": "", "more": json.dumps(call)}]
    spoken += [{"role": "tool", "content": "a mat"}, CHAT[4]]
    tools = json.dumps({"tools": [{"name": "far"}]})
    spoken = [{"more": tools, **spoken[0]}, *({"more": None, **one} for one in spoken[1:])]
    try:
        (row,) = chats.conversation_tokens(talks(spoken), bpe, 999)
        parts = chats.sample(bpe, row)
    finally:
        bpe.chat_template = None
    asked = '### Tools:\n[{"name": "far"}]\n\n### System:\non a mat\n\n### User:\nthe cat\n\n'
    expected = [
        (f"{asked}### Assistant:\n", False),
        ('{"name": "far", "arguments": {}}\n<end>', True),
        ("\n\n### Tool:\na mat\n\n### Assistant:\n", False),
        ("ran<end>", True),
    ]
    assert parts == expected
    place = 0
    for text, trained in expected:
        for token in bpe.encode(text):
            assert row["input_ids"][place] == token
            assert row["labels"][place] == (token if trained else -100)
            place += 1
    assert place == len(row["labels"])


FORGETFUL = "{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
MUTE = "{% for m in messages %}<|{{ m.role }}|>{% if m.role != 'NONE' %}{{ m.content }}{% endif %}"
MUTE += "<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("chatty", "error", "message"),
    [
        (FORGETFUL, UsageError, "rewrites earlier messages"),
        (STRICT, DataError, r"take the conversation that asks 'the cat' \(no system\)"),
        (MUTE.replace("NONE", "assistant"), DataError, "out the assistant message 3 of the"),
        (MUTE.replace("NONE", "system"), DataError, "leaves out the system message 1 of the c"),
        (
            MARKED.replace("{{ m.content }}<end>{% endg", "x{% endg"),
            DataError,
            "the assistant mess",
        ),
    ],
    indirect=["chatty"],
)
def test_templates_that_cannot_be_used(chatty, error, message):
    with pytest.raises(error, match=message):
        chats.conversation_tokens(talks(CHAT), chatty, 99)


@pytest.mark.parametrize("chatty", [PLAIN, MARKED], indirect=True, ids=["plain", "marked"])
def test_answers_of_weight_0_are_read_and_not_learned(chatty):
    weighed = [{**one, "more": None} for one in CHAT]
    weighed[2]["more"] = json.dumps({"weight": 0})
    both = chats.conversation_tokens(talks(CHAT, weighed), chatty, 99)
    assert both[0]["input_ids"] == both[1]["input_ids"]
    learned = [token for token in both[1]["labels"] if token != -100]
    assert learned == chatty.encode("ran<end>")


CALL = {"function": {"name": "far"}}
LOST = {
    "the tool 'far' of the conversation": (0, {"tools": [{"name": "far"}]}),
    "the call of 'far' in the assistant message 3": (2, {"tool_calls": [CALL]}),
    "the reasoning_content of the assistant message 5": (4, {"reasoning_content": "and away"}),
}  # fmt: skip


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("chatty", [PLAIN, MARKED], indirect=True, ids=["plain", "marked"])
def test_what_a_template_leaves_out_is_named(chatty, what):
    place, more = LOST[what]
    spoken = [{**one, "more": None} for one in CHAT]
    spoken[2]["content"] = "sat"
    spoken[place]["more"] = json.dumps(more)
    with pytest.raises(DataError, match=f"leaves out {what}"):
        chats.conversation_tokens(talks(spoken), chatty, 99)


# Loops within the limits of jinja's sandbox, with text in the innermost one.
ENDLESS = "".join(f"{{% for {x} in range(99999) %}}" for x in "abcd") + 4 * "{% endfor %}"


@pytest.mark.parametrize("chatty", [ENDLESS, MARKED + ENDLESS], indirect=True)
@pytest.mark.parametrize("where", ["in the main thread", "in another", "in a process"])
def test_templates_that_do_not_end(where, chatty, monkeypatch):
    monkeypatch.setattr(chats, "LIMIT", 0.2)
    threads = threading.active_count()

    def refused():
        with pytest.raises(DataError, match=r"has not ended after 200 ms with the conversation th"):
            chats.conversation_tokens(talks(CHAT), chatty, 99)
        with pytest.raises(DataError, match=r"has not ended after 200 ms with a conversation"):
            chats.prompt(chatty, {"messages": CHAT})
        for _ in range(100):  # the threads that were left have ended
            if threading.active_count() <= threads + 1:
                return 0
            time.sleep(0.05)
        return 1

    if where == "in the main thread":
        assert refused() == 0
    elif where == "in another":
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(refused).result() == 0
    else:
        child = os.fork()
        if not child:
            os._exit(refused())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_labels_of_blocks_are_the_next_tokens(bpe):
    blocks = tokens.token_blocks(rows(TEXTS), bpe, 6)["input_ids"][:2]
    found = tokens.causal_inputs(bpe, {"input_ids": blocks})
    for block, inputs, labels in zip(blocks, found["inputs"], found["labels"], strict=True):
        assert inputs.keys() == {"input_ids"}
        assert inputs["input_ids"].tolist() == block
        assert labels.tolist() == [*block[1:], -100]
        assert labels.dtype == torch.int64


@pytest.mark.parametrize(("most", "length"), [(None, 16), (11, 11)])
def test_conversations_are_padded(bpe, most, length):
    ids = [list(range(10)), list(range(7))]
    labels = [[-100] * 4 + own[4:] for own in ids]
    found = tokens.causal_inputs(bpe, {"input_ids": ids, "labels": labels}, tokens=most)
    for own, said, inputs, shifted in zip(
        ids, labels, found["inputs"], found["labels"], strict=True
    ):
        more = length - len(own)
        assert inputs["input_ids"].tolist() == own + [bpe.pad_token_id] * more
        assert inputs["attention_mask"].tolist() == [1] * len(own) + [0] * more
        assert shifted.tolist() == said[1:] + [-100] * (more + 1)


def test_masks_of_evaluations_depend_on_the_row_alone(bert):
    blocks = tokens.token_blocks(rows(TEXTS * 40), bert, 32)["input_ids"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    whole = tokens.masked_inputs(bert, True, {"input_ids": blocks})
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for place in (3, 0):
        one = tokens.masked_inputs(bert, True, {"input_ids": [blocks[place]]})
        assert torch.equal(one["inputs"][0]["input_ids"], whole["inputs"][place]["input_ids"])
        assert torch.equal(one["labels"][0], whole["labels"][place])


def test_masks_of_training_are_drawn_and_repeat(bert):
    blocks = tokens.token_blocks(rows(TEXTS * 40), bert, 32)["input_ids"]
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(
            torch.stack(tokens.masked_inputs(bert, False, {"input_ids": blocks})["labels"])
        )
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_masks_are_those_of_bert(bert):
    blocks = torch.tensor(tokens.token_blocks(rows(TEXTS * 400), bert, 64)["input_ids"])
    found = tokens.masked_inputs(bert, False, {"input_ids": blocks.tolist()})
    inputs = torch.stack([own["input_ids"] for own in found["inputs"]])
    labels = torch.stack(found["labels"])
    special = (blocks == bert.cls_token_id) | (blocks == bert.sep_token_id)
    chosen = labels != -100
    assert not (chosen & special).any()
    assert torch.equal(labels[chosen], blocks[chosen])
    assert torch.equal(inputs[~chosen], blocks[~chosen])
    share = chosen.sum() / (~special).sum()
    assert share == pytest.approx(0.15, abs=0.01)
    assert (inputs[chosen] == bert.mask_token_id).float().mean() == pytest.approx(0.8, abs=0.03)
    # A random word is the same by chance in one of 16 cases.
    same = (inputs[chosen] == blocks[chosen]).float().mean()
    assert same == pytest.approx(0.1 + 0.1 / 16, abs=0.02)
