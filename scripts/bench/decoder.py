"""A small decoder for the benchmarks, which this script first trains on news.

No package has small weights of a decoder. So a Llama of four layers, with grouped queries and a
tokenizer of its own, is trained on the first half of the training split of Reuters R8, in some four
minutes, and kept in the cache. The second half is what it is fine-tuned on.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from pretrained import NEWS, Rows, Task, kept, loss, news
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

TRAINING = {
    "vocabulary": 2048,
    "width": 256,
    "hidden": 688,
    "layers": 4,
    "heads": 8,
    "kv_heads": 2,
    "tokens": 128,
    "batch_size": 16,
    "steps": 600,
    "lr": 2e-3,
    "weight_decay": 0.1,
    "seed": 0,
}
TOKENS = TRAINING["tokens"]
END = "<|endoftext|>"


def halves(cache: Path) -> tuple[list[str], list[str]]:
    """The texts of the training split that the decoder is trained on, and those it is tuned on."""
    texts = [text for _, text in news(cache, "train")]
    return texts[: len(texts) // 2], texts[len(texts) // 2 :]


def packed(tokenizer: transformers.PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """All texts, one after another, as rows of one token more than a sequence has."""
    ids = tokenizer("".join(text + END for text in texts))["input_ids"]
    whole = len(ids) // (TOKENS + 1) * (TOKENS + 1)
    return torch.tensor(ids[:whole]).view(-1, TOKENS + 1)


def learned_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        texts, TRAINING["vocabulary"], special_tokens=[END], show_progress=False
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=learner._tokenizer, eos_token=END, pad_token=END
    )


def fresh() -> nn.Module:
    """The decoder before its training."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=TRAINING["vocabulary"],
            hidden_size=TRAINING["width"],
            intermediate_size=TRAINING["hidden"],
            num_hidden_layers=TRAINING["layers"],
            num_attention_heads=TRAINING["heads"],
            num_key_value_heads=TRAINING["kv_heads"],
            max_position_embeddings=TOKENS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def train(cache: Path, folder: Path) -> None:
    """Trains the tokenizer and the model, and writes both as transformers loads them."""
    texts, _ = halves(cache)
    tokenizer = learned_tokenizer(texts)
    rows = packed(tokenizer, texts)
    torch.manual_seed(TRAINING["seed"])
    model, steps = fresh().train(), TRAINING["steps"]
    optimizer = torch.optim.AdamW(
        model.parameters(), TRAINING["lr"], betas=(0.9, 0.95), weight_decay=TRAINING["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TRAINING["lr"], total_steps=steps)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (TRAINING["batch_size"],))]
        value = loss(model, {"input_ids": batch[:, :-1]}, batch[:, 1:])
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"decoder step {step + 1}: loss {value.item():.3f}", file=sys.stderr)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def home(cache: Path) -> Path:
    """The folder with the trained decoder, trained now if the cache lacks it."""
    return kept(cache, "decoder", TRAINING, partial(train, cache))


def build(cache: Path) -> nn.Module:
    """The trained decoder."""
    model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(
        home(cache), local_files_only=True
    )
    return model


def load(cache: Path) -> tuple[Rows, Rows]:
    """Sequences and their next tokens, of the second half of the training split and of the test."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(home(cache), local_files_only=True)

    def rows(texts: list[str]) -> Rows:
        tokens = packed(tokenizer, texts)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return rows(halves(cache)[1]), rows([text for _, text in news(cache, "test")])


def inputs(rows: Rows) -> Rows:
    """The inputs of the model."""
    return {"input_ids": rows["input_ids"]}


TASKS = {
    "decoder": Task(
        "decoder",
        "a Llama of four layers, trained here, on Reuters R8",
        (NEWS,),
        build,
        load,
        inputs,
        torch.optim.AdamW,
        {"lr": 2e-4, "weight_decay": 0.01},
        {"tokens": TOKENS},
        "model.embed_tokens",
    )
}
