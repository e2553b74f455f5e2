"""Trains tiny models by the trainers of other libraries, stock and with one line of razorctl.

    .venv/bin/pip install lightning sentence-transformers trl
    .venv/bin/python scripts/bench/peers.py

Libraries that CI does not install: Lightning's Trainer, TRL's SFTTrainer, and the trainer of
sentence-transformers. The script prints for each the losses of both runs, and ends with 1 if a step
raises, a loss is off by more than FAR of the stock loss, or the model is not stock at the end.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers import PreTrainedTokenizerFast as FastTokenizer

import razorctl
from razorctl.layers.base import RazorLayer

STEPS = 5
FAR = 0.005  # of a loss, after updates that are a little others
WORDS = [f"w{number}" for number in range(60)]
Losses = list[float]


def recipe(razor: bool) -> razorctl.Recipe:
    return razorctl.Recipe("razor", 0.9) if razor else razorctl.Recipe("full")


def tokenizer() -> FastTokenizer:
    """A token for each of WORDS."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    level = models.WordLevel({w: i for i, w in enumerate(special + WORDS)}, unk_token="[UNK]")
    words = Tokenizer(level)
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = "pad_token", "unk_token", "cls_token", "sep_token"
    fast = FastTokenizer(tokenizer_object=words, **dict(zip(names, special, strict=True)))
    fast.eos_token = "[SEP]"
    return fast


def texts(count: int) -> list[str]:
    return [" ".join(WORDS[(7 * i + 3 * j) % 60] for j in range(24)) for i in range(count)]


class Noted(TrainerCallback):  # type: ignore[misc]
    """Notes the losses that a trainer of transformers logs."""

    def __init__(self) -> None:
        self.losses: Losses = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


def trainer_options(folder: str) -> dict[str, Any]:
    """Arguments of every trainer that derives from the one of transformers."""
    return {
        "output_dir": folder,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def lightning(razor: bool, folder: str) -> tuple[Losses, nn.Module]:
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(64, 10)
            self.losses: Losses = []

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.head(self.encoder(x).mean(1)), y)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    model = Model()
    razorctl.sparsify(model, recipe(razor))
    rows = torch.utils.data.TensorDataset(torch.randn(20, 16, 64), torch.arange(20) % 10)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(max_steps=STEPS, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=4))
    razorctl.restore(model)
    return model.losses, model


def trl(razor: bool, folder: str) -> tuple[Losses, nn.Module]:
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model, noted = LlamaForCausalLM(config), Noted()
    SFTTrainer(
        model,
        SFTConfig(**trainer_options(folder), learning_rate=1e-3),
        train_dataset=Dataset.from_dict({"text": texts(20)}),
        processing_class=tokenizer(),
        callbacks=[razorctl.RazorCallback(recipe(razor)), noted],
    ).train()
    return noted.losses, model


def sentences(razor: bool, folder: str) -> tuple[Losses, nn.Module]:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.models import Pooling, Transformer

    config = BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    saved = str(Path(folder) / "bert")
    BertModel(config).save_pretrained(saved)
    tokenizer().save_pretrained(saved)
    words = Transformer(saved)
    model, noted = SentenceTransformer(modules=[words, Pooling(64)], device="cpu"), Noted()
    pairs = texts(40)
    SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(**trainer_options(folder), learning_rate=1e-3),
        train_dataset=Dataset.from_dict({"anchor": pairs[::2], "positive": pairs[1::2]}),
        loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[razorctl.RazorCallback(recipe(razor)), noted],
    ).train()
    return noted.losses, model


PEERS: list[Callable[[bool, str], tuple[Losses, nn.Module]]] = [lightning, trl, sentences]


def main() -> int:
    failed = False
    for peer in PEERS:
        runs = []
        for razor in (False, True):
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                losses, model = peer(razor, folder)
            failed |= any(isinstance(module, RazorLayer) for module in model.modules())
            runs.append(losses)
            print(peer.__name__, "razor" if razor else "stock", *(f"{x:.4f}" for x in losses))
        stock, near = runs
        failed |= len(stock) != STEPS or len(near) != STEPS
        failed |= any(abs(a - b) > FAR * a for a, b in zip(stock, near, strict=False))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
