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
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SiglipConfig,
    SiglipModel,
)

WORDS = [f"w{number}" for number in range(40)]
COUNT = 40  # of images with captions
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


def towers(top: Path) -> None:
    """Writes models of images and texts into a folder."""
    reader = tokenizer(bos_token="<s>", eos_token="</s>")
    ends = [(token, reader.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    frame = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    reader.backend_tokenizer.post_processor = frame
    ids = {"vocab_size": len(reader), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    text = {**HIDDEN, **ids, "num_attention_heads": 2, "max_position_embeddings": 24}
    vision = {**HIDDEN, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    both = {"text_config": text, "vision_config": vision}
    crop = {"do_center_crop": True, "size": {"shortest_edge": 32}}
    crop |= {"crop_size": {"height": 32, "width": 32}}
    for name, model, size in (
        ("clip", CLIPModel(CLIPConfig(**both, projection_dim=16)), crop),
        ("siglip", SiglipModel(SiglipConfig(**both)), {"size": {"height": 32, "width": 32}}),
    ):
        model.save_pretrained(top / name)
        reader.save_pretrained(top / name)
        if name == "siglip":  # as its repositories say
            file = top / name / "tokenizer_config.json"
            settings = json.loads(file.read_text())
            file.write_text(json.dumps({**settings, "model_input_names": ["input_ids"]}))
        scaled = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
        (top / name / "preprocessor_config.json").write_text(json.dumps({**size, **scaled}))


def captioned(folder: Path, count: int = COUNT) -> list[dict[str, str]]:
    """Writes images that are all unlike into a folder; returns a row with a caption for each."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = draw.integers(0, 255, (40, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return [
        {"file_name": f"{n}.png", "caption": f"w{n % 40} w{n * 7 % 40} {n}"} for n in range(count)
    ]


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
