"""Text models of transformers, its own layers, and the attention of its ViT, BERT and kin.

Their attention modules ask an AttentionInterface for the function that their configuration names.
While a model is sparsified that is `razor_eager` or `razor_sdpa`, after what it was before; these
send a module of a razor class to its own `attend`, and any other to the stock function.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig
from transformers import activations as stock
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.bert import modeling_bert
from transformers.models.distilbert import modeling_distilbert
from transformers.models.roberta import modeling_roberta
from transformers.models.vit import modeling_vit
from transformers.utils import logging

from razorctl import hub
from razorctl.errors import UsageError
from razorctl.families import Model, Rows
from razorctl.layers import RazorLayer, activation
from razorctl.layers.attention import Attention, masked

PREFIX = "razor_"


class InterfaceAttention(Attention):
    """Base of attentions that call an AttentionInterface."""

    scales_query = False
    config: Any
    is_causal: bool

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        sizes = (getattr(module, name, None) for name in ("attention_head_size", "head_dim"))
        return next(size for size in sizes if isinstance(size, int))

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module)

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        config: Any = module.config
        if config._attn_implementation.startswith(PREFIX):
            return (
                "shares its config with a model that is sparsified already; build it with "
                "a copy of that config."
            )
        if config._attn_implementation not in ("eager", "sdpa"):
            return (
                f"runs {config._attn_implementation!r}; build the model with "
                "attn_implementation='sdpa'."
            )
        if config.output_attentions:
            return (
                "returns its probabilities, which razor attention cannot; set "
                "config.output_attentions to False."
            )
        return super().refusal(module, backend)

    def take_over(self) -> None:
        if not self.config._attn_implementation.startswith(PREFIX):  # layers share it
            self.config._attn_implementation = PREFIX + self.config._attn_implementation

    def give_back(self) -> None:
        self.config._attn_implementation = self.config._attn_implementation.removeprefix(PREFIX)


def _interface(name: str) -> Any:
    """The attention function that stands in for the stock one of that name."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        razor = module if isinstance(module, InterfaceAttention) and module.saving else None
        if razor and (razor.backend != "stored" or razor.rule is not None):
            causal = razor.is_causal and attention_mask is None and query.shape[2] > 1
            out = razor.attend(
                query,
                key,
                value,
                attention_mask,
                dropout_p=kwargs.get("dropout", 0.0),
                is_causal=causal,
                scale=kwargs.get("scaling"),
            )
            return out.transpose(1, 2).contiguous(), None
        homes = (vars(sys.modules[c.__module__]) for c in type(module).__mro__)
        eager = next(h["eager_attention_forward"] for h in homes if "eager_attention_forward" in h)
        if razor and attention_mask is not None and attention_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
            attention_mask = masked(zeros, attention_mask)
        function = ALL_ATTENTION_FUNCTIONS.get_interface("eager" if razor else name, eager)
        return function(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    return attention


for name, mask in (("eager", eager_mask), ("sdpa", sdpa_mask)):
    AttentionInterface.register(PREFIX + name, _interface(name))
    AttentionMaskInterface.register(PREFIX + name, mask)


def _calls_the_interface(candidate: object) -> bool:
    if not (isinstance(candidate, type) and "forward" in vars(candidate)):
        return False
    code: Any = inspect.unwrap(vars(candidate)["forward"])
    return "ALL_ATTENTION_FUNCTIONS" in code.__code__.co_names


def _razor(stock_type: type[nn.Module], base: type[RazorLayer], **members: Any) -> None:
    """Defines the razor class of a stock type in this module, so that pickles find it."""
    name = f"Razor{stock_type.__name__}"
    members |= {"__doc__": f"transformers' {stock_type.__name__}.", "__module__": __name__}
    globals()[name] = SWAPS[stock_type] = type(name, (base, stock_type), members)


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {}
for modeling, softmax_dtype in (
    (modeling_bert, None),
    (modeling_roberta, None),
    (modeling_distilbert, None),
    (modeling_vit, torch.float32),
):
    for stock_type in vars(modeling).values():
        if _calls_the_interface(stock_type):
            _razor(stock_type, InterfaceAttention, softmax_dtype=softmax_dtype)
for stock_type, base in (
    (stock.GELUActivation, activation.ExactGELU),
    (stock.GELUTanh, activation.TanhGELU),
    (stock.NewGELUActivation, activation.TanhGELU),
    (stock.FastGELUActivation, activation.TanhGELU),
    (stock.QuickGELUActivation, activation.QuickGELU),
    (stock.SiLUActivation, activation.SiLU),
):
    _razor(stock_type, base)

_BERT_BRANCHES = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("intermediate", "output.dense", "output.dropout"),
)
# The dropout of ViT ends both branches of a layer, so it is in none: on an input without grad it
# saves nothing.
BRANCHES: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_bert.BertLayer: _BERT_BRANCHES,
    modeling_roberta.RobertaLayer: _BERT_BRANCHES,
    modeling_distilbert.TransformerBlock: (("attention", "attention.out_lin"), ("ffn",)),
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "attention.o_proj"),
        ("layernorm_after", "mlp"),
    ),
}

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TOKENS = 128


def example(_: nn.Module, batch_size: int, input_size: int | None = None) -> dict[str, Tensor]:
    """Texts [batch, tokens] that padding ends, as it does most."""
    ids = torch.zeros(batch_size, input_size or TOKENS, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}


def logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    output: Tensor = model(**inputs).logits
    return output


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar, and its report that the classifier is fresh, as it always is."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _tokenized(tokenizer: Any, tokens: int, rows: Rows) -> Rows:
    # Of one length, so that what a step saves is known.
    batch = tokenizer(
        rows["text"],
        rows.get("text_pair"),
        padding="max_length",
        truncation=True,
        max_length=tokens,
        return_tensors="pt",
    )
    texts = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return {"inputs": texts, "labels": rows["label"]}


def from_hub(
    name: str, summary: str, repo: str, config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Model:
    """The entry of a BERT on the hub; `config` is its BertConfig, which no plan need download."""

    def check(input_size: int | None) -> None:
        longest = config["max_position_embeddings"]
        if input_size is not None and input_size > longest:
            raise UsageError(
                f"{name} takes texts of up to {longest} tokens, not {input_size}; use at most "
                f"{longest}."
            )

    def bare(classes: int, input_size: int | None = None) -> nn.Module:
        check(input_size)
        model: nn.Module = AutoModelForSequenceClassification.from_config(
            BertConfig(**config, num_labels=classes)
        )
        return model

    def build(classes: int, input_size: int | None = None) -> nn.Module:
        check(input_size)
        folder = hub.fetch(name, repo, FILES, "model")
        with hub.reading(name, folder):
            model: nn.Module
            with _quiet():
                model, found = AutoModelForSequenceClassification.from_pretrained(
                    folder, num_labels=classes, dtype=torch.float32, output_loading_info=True
                )
            absent = [w for w in found["missing_keys"] if not w.startswith("classifier.")]
            if absent:
                raise ValueError(f"{absent[0]} is not among its weights")
        return model

    def transform(_: nn.Module, input_size: int | None = None) -> Callable[[Rows], Rows]:
        """Rows of texts, or of pairs, and labels -> tensors of `input_size` tokens by name."""
        folder = hub.fetch(name, repo, FILES, "model")
        with hub.reading(name, folder):
            tokenizer = AutoTokenizer.from_pretrained(folder)

        return partial(_tokenized, tokenizer, input_size or TOKENS)

    return Model(name, summary, "text", build, bare, transform, example, logits, defaults)


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
        # Sheared Backpropagation, section 5.2, which does not state its learning rate.
        {"batch_size": 32, "epochs": 5, "learning_rate": 0.01},
    ),
)
