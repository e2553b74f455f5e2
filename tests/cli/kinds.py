"""Small models and data of every kind, in a folder."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image
from timm import create_model
from timm.models import save_for_hf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

WORDS = [f"w{number}" for number in range(40)]
HIDDEN = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} {{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ["[PAD]", "[UNK]", *special.values(), "user", "assistant"]
    words.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=names))
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", **special
    )
    made.chat_template = TEMPLATE
    return made


def texts(file: Path, words: int) -> None:
    draw = random.Random(0)
    file.write_text("\n\n\n".join(" ".join(draw.choices(WORDS, k=words)) for _ in range(9)))


def chats(file: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in pairwise(WORDS)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))


def masks(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for split, count in (("train", 8), ("validation", 4)):
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            mask = (draw.random((32, 32)) > 0.5).astype(np.uint8)
            mask[:4] = 255  # does not count
            image = np.repeat(mask[..., None] % 255 * 200, 3, 2).astype(np.uint8)
            Image.fromarray(image).save(folder / split / "images" / f"{number}.png")
            Image.fromarray(mask).save(folder / split / "masks" / f"{number}.png")


def decoders(top: Path) -> None:
    """Writes the decoders into a folder."""
    decoder = tokenizer(eos_token="</s>")
    sizes = {"vocab_size": len(decoder), "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}
    gpt2 = GPT2Config(n_embd=24, n_layer=2, n_head=2, n_positions=64, **sizes)
    llama = LlamaConfig(
        **HIDDEN, **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64
    )
    for name, model in (("gpt2", GPT2LMHeadModel(gpt2)), ("llama", LlamaForCausalLM(llama))):
        model.save_pretrained(top / name)
        decoder.save_pretrained(top / name)


def build(top: Path) -> None:
    """Writes the models and the data into a folder."""
    decoders(top)
    encoder = tokenizer(cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    bert = BertConfig(
        **HIDDEN, vocab_size=len(encoder), num_attention_heads=2, max_position_embeddings=64
    )
    BertForMaskedLM(bert).save_pretrained(top / "bert")
    encoder.save_pretrained(top / "bert")
    segformer = SegformerConfig(
        depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=16
    )
    SegformerForSemanticSegmentation(segformer).save_pretrained(top / "segformer")
    (top / "segformer/preprocessor_config.json").write_text("{}")
    save_for_hf(create_model("test_resnet"), top / "resnet", safe_serialization=True)
    texts(top / "texts.txt", 120)
    chats(top / "chats.jsonl")
    masks(top / "shapes")
