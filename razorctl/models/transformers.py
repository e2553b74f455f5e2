"""Text models built by transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import hub
from razorctl.errors import DataError, UsageError
from razorctl.models import Model, Named, Rows, prepared

if TYPE_CHECKING:
    from torch import Tensor, nn

# Training needs no cache, and transformers warns about one with activation checkpointing.
WITHOUT_CACHE = {"use_cache": False}
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TOKENS = 128
MULTIPLE = 8  # of tokens, which kernels of matrix products are made for


def example(_: "nn.Module", batch_size: int, input_size: int | None = None) -> "dict[str, Tensor]":
    """A batch of texts [batch, tokens] of the largest size, which end in padding, as most do."""
    import torch

    ids = torch.zeros(batch_size, input_size or TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}


def logits(model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
    output: Tensor = model(**inputs).logits
    return output


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' progress bar and its warning that the classifier is fresh."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _tokenized(tokenizer: Any, tokens: int, fixed: bool, rows: Rows) -> Rows:
    """Texts of one length: of the longest, rounded up to MULTIPLE, or of `tokens` if `fixed`."""
    batch = tokenizer(rows["text"], rows.get("text_pair"), truncation=True, max_length=tokens)
    longest = max(map(len, batch["input_ids"]))
    length = tokens if fixed else min(tokens, -(-longest // MULTIPLE) * MULTIPLE)
    batch = tokenizer.pad(batch, padding="max_length", max_length=length, return_tensors="pt")
    texts = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return prepared(texts, rows)


def load(folder: Path, input_size: int | None = None) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: nn.Module
    with _quiet():
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if found["missing_keys"]:
        raise ValueError(f"{min(found['missing_keys'])} is not among its weights")
    return model, partial(_tokenized, tokenizer, input_size or TOKENS, False)


def from_hub(
    name: str, summary: str, repo: str, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Named:
    """The name of a BERT on the hub; `config` is its BertConfig, so that plans download none."""

    def check(input_size: int | None) -> None:
        longest = config["max_position_embeddings"]
        if input_size is not None and input_size > longest:
            raise UsageError(
                f"{name} takes texts of up to {longest} tokens, not {input_size}; use at most "
                f"{longest}."
            )

    def bare(classes: int, input_size: int | None = None) -> "nn.Module":
        from transformers import AutoModelForSequenceClassification, BertConfig

        check(input_size)
        model: nn.Module = AutoModelForSequenceClassification.from_config(
            BertConfig(**config, num_labels=classes, **WITHOUT_CACHE)
        )
        return model

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        import torch
        from transformers import AutoModelForSequenceClassification

        check(input_size)
        folder = hub.fetch(name, repo, FILES, "model")
        with hub.reading(name, folder):
            model: nn.Module
            with _quiet():
                model, found = AutoModelForSequenceClassification.from_pretrained(
                    folder,
                    num_labels=classes,
                    dtype=torch.float32,
                    output_loading_info=True,
                    **WITHOUT_CACHE,
                )
            absent = [w for w in found["missing_keys"] if not w.startswith("classifier.")]
            if absent:
                raise ValueError(f"{absent[0]} is not among its weights")
        return model

    def read_tokenizer() -> Any:
        from transformers import AutoTokenizer

        folder = hub.fetch(name, repo, FILES, "model")
        with hub.reading(name, folder):
            tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.pad_token is None:
            raise DataError(
                f"the tokenizer of {name} has no padding token; choose another model, or give it "
                "one."
            )
        return tokenizer

    def transform(
        fixed: bool, _: "nn.Module", input_size: int | None = None
    ) -> Callable[[Rows], Rows]:
        """A function from rows of texts or text pairs to the model's inputs.

        They have up to `input_size` tokens, and exactly as many if `fixed`. Raises MissingError if
        the tokenizer cannot be found, and DataError if it cannot be used.
        """
        return partial(_tokenized, read_tokenizer(), input_size or TOKENS, fixed)

    def save(
        model: "nn.Module", classes: Sequence[str], input_size: int | None, folder: Path
    ) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its tokenizer load."""
        from transformers import PreTrainedModel

        assert isinstance(model, PreTrainedModel)
        tokenizer = read_tokenizer()
        tokenizer.model_max_length = input_size or TOKENS
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {label: number for number, label in enumerate(classes)}
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    model = Model(
        name,
        summary,
        "text",
        "classification",
        build,
        bare,
        partial(transform, False),
        example,
        logits,
        save,
        load,
        defaults,
        padded=partial(transform, True),
    )
    return Named(name, summary, "text", ("classification",), lambda _: model)


BERT_BASE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
MODELS = (
    from_hub(
        "bert-base",
        "BERT-base, uncased, 128 tokens; from the hub",
        "google-bert/bert-base-uncased",
        BERT_BASE,
        # Batch size and epochs as in Sheared Backpropagation, section 5.2, which states no
        # learning rate. AdamW's is one that BERT's authors tried (2018, appendix A.3), with
        # their weight decay.
        {
            "batch_size": 32,
            "epochs": 5,
            "sgd": {"learning_rate": 0.01},
            "adamw": {"learning_rate": 2e-5, "weight_decay": 0.01},
        },
    ),
)
