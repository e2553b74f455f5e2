"""Embeddings of texts: the pooled states of an encoder or a decoder of transformers.

A trained model is also a folder of sentence-transformers: its modules are the model, a pooling and
a division by the norm.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from razorctl.config.job import Job, Pooling
from razorctl.errors import UsageError
from razorctl.models.joined_texts import rounded
from razorctl.models.model import ANY, Model, Shapes, Size, Transform, prepared
from razorctl.models.rows import Rows, text_columns
from razorctl.models.tokens import text_id, text_lengths
from razorctl.models.transformers.classification import padded
from razorctl.models.transformers.pretrained_files import CONFIG, PretrainedFiles
from razorctl.models.transformers.pretrained_model import TextModel
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

# Files of sentence-transformers.
MODULES, POOLING, LENGTH = "modules.json", f"1_Pooling/{CONFIG}", "sentence_bert_config.json"
FILES = (MODULES, POOLING, LENGTH)
# The pooling of a job -> its name in POOLING as a value, since release 6, and as a key before.
MODES: Mapping[Pooling, tuple[str, str]] = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "first": ("cls", "pooling_mode_cls_token"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
MODE = "pooling_mode"  # begins the names of all modes there
KINDS = ("Transformer", "Pooling", "Normalize")  # the modules in a folder


def pooling_of(pretrained: PretrainedFiles, causal: bool) -> Pooling | None:
    """The pooling of a pretrained model, by its folder of sentence-transformers if it is one.

    It is None for one that `Job.pooling` does not have. Without such a folder it is the last token
    of a causal model, and else the mean. Raises UsageError for a folder with other modules.
    """
    usual: Pooling = "last" if causal else "mean"
    if pretrained.known is not None:
        return usual
    folder = pretrained.folder(CONFIG, more=(MODULES, POOLING))
    if not (folder / MODULES).exists():
        return usual
    with pretrained.reading(folder, MODULES):
        modules: Any = documents.parse(documents.read_bytes(folder / MODULES))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        modes = documents.read_foreign(folder / POOLING) if "Pooling" in kinds else {}
    if other := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(
            f"embeddings of {pretrained.name} pass a {other[0]} layer after the model, which "
            "razorctl does not train; choose another model."
        )
    chosen = {name for name, on in modes.items() if name.startswith(MODE) and on is True}
    chosen |= {modes[MODE]} if MODE in modes else set()
    return next(
        (pooling for pooling, names in MODES.items() if chosen and chosen <= {*names}), None
    )


def embedded_texts(tokenizer: Any, tokens: int, shapes: Shapes, rows: Rows) -> Rows:
    """The inputs of each column of texts, padded as by `classification.tokenized`.

    Rows with one column have its inputs, others a mapping from columns to inputs. Labels are the
    scores of rows, or else the `text_id` of each text.
    """
    import torch

    columns = text_columns(rows)
    batches = {
        name: tokenizer(rows[name], truncation=True, max_length=tokens, verbose=False)
        for name in columns
    }
    if shapes:  # all columns get one width, since each combination would be a shape
        longest = max(len(ids) for batch in batches.values() for ids in batch["input_ids"])
        shapes = [(0, rounded(longest, tokens, [width for _, width in shapes]))]
    inputs = {name: padded(tokenizer, batch, tokens, shapes) for name, batch in batches.items()}
    if len(columns) == 1:
        return {"inputs": inputs[columns[0]]}
    each = [dict(zip(columns, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
    if "label" in rows:
        return prepared(each, rows)
    ids = zip(*([*map(text_id, rows[name])] for name in columns), strict=True)
    return {"inputs": each, "labels": [torch.tensor(row) for row in ids]}


def _without_pooler(model: "nn.Module") -> "nn.Module":
    """The model without a pooler, if that is optional: its weights would get no gradient."""
    if "add_pooling_layer" in inspect.signature(type(model)).parameters:
        model.pooler = None  # type: ignore[assignment]
    return model


@dataclass(frozen=True, kw_only=True)
class TextEmbedder(TextModel):
    """The body of a pretrained model, whose pooled states are the embeddings of texts."""

    most_tokens: ClassVar[int] = 128
    fresh: ClassVar[tuple[str, ...]] = ("pooler.",)
    pooling: Pooling | None

    @property
    def auto(self) -> Any:
        from transformers import AutoModel

        return AutoModel

    @property
    def pads(self) -> bool:
        return True

    def fed(self, job: Job) -> Model:
        return replace(self, pooling=job.pooling or self.pooling)

    def settings(self, classes: int) -> dict[str, Any]:
        return {}

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        """Raises UsageError also for a pooling that razorctl does not train."""
        if self.pooling is None:
            raise UsageError(
                f"{self.name} pools the states of tokens in a way that razorctl does not train; "
                f"give --pooling {'|'.join(get_args(Pooling))}, or choose another model."
            )
        return _without_pooler(super().build(classes, input_size, pretrained))

    def restored(self) -> "nn.Module":
        return _without_pooler(self.pretrained.built(self.auto, self.fresh))

    def transform(
        self, model: "nn.Module", input_size: Size = None, shapes: Shapes = ANY
    ) -> Transform:
        return partial(embedded_texts, self.tokenizer(model), self.size(input_size), shapes)

    def tokenizer(self, model: Any) -> Any:
        tokenizer = super().tokenizer(model)
        tokenizer.padding_side = "right"
        return tokenizer

    def lengths(self, rows: Any, input_size: Size) -> Sequence[int]:
        """The tokens of the longest text of each row."""
        tokenizer, size, rows = self.pretrained.tokenizer, self.size(input_size), rows[:]
        each = [text_lengths(tokenizer, size, {"text": rows[name]}) for name in text_columns(rows)]
        return [*map(max, *each)] if len(each) > 1 else each[0]

    def batch(
        self, model: "nn.Module", batch_size: int, input_size: Size, classes: int
    ) -> tuple[Any, "Tensor"]:
        """`classes` texts in each row, at least a pair; scores of 0 if it is 1, else unlike texts.

        The classes have the names of the columns of texts, or the name of the score alone.
        """
        import torch

        texts = max(classes, 2)
        inputs = {str(n): self.example(model, batch_size, input_size) for n in range(texts)}
        if classes == 1:
            return inputs, torch.zeros(batch_size)
        return inputs, torch.arange(1, 1 + batch_size * texts).view(batch_size, texts)

    def logits(self, model: "nn.Module", inputs: Mapping[str, Any]) -> "Tensor":
        """Unit vectors, fp32: [batch, d] of the inputs of texts, or [batch, texts, d] of rows."""
        import torch

        if "input_ids" in inputs:
            return self._vectors(model, inputs)
        return torch.stack([self._vectors(model, each) for each in inputs.values()], 1)

    def _vectors(self, model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
        import torch
        import torch.nn.functional as F

        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"]
        if self.pooling == "first":
            pooled = states[:, 0]
        elif self.pooling == "last":
            last = mask.sum(1) - 1
            pooled = states[torch.arange(len(last), device=last.device), last]
        else:
            weights = mask.unsqueeze(-1).to(states.dtype)
            counts = mask.sum(1, keepdim=True)
            pooled = (states * weights).sum(1, dtype=torch.float32) / counts
        return F.normalize(pooled.float(), dim=-1)

    def save(self, model: Any, classes: Sequence[str], input_size: Size, folder: Path) -> None:
        """Also writes the files of sentence-transformers."""
        super().save(model, (), input_size, folder)
        width = model.config.get_text_config().hidden_size
        modes = {key: pooling == self.pooling for pooling, (_, key) in MODES.items()}
        contents: dict[str, Any] = {
            MODULES: [
                {
                    "idx": number,
                    "name": str(number),
                    "path": f"{number}_{kind}" if number else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for number, kind in enumerate(KINDS)
            ],
            POOLING: {"word_embedding_dimension": width, **modes},
            LENGTH: {"max_seq_length": self.size(input_size), "do_lower_case": False},
        }
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{documents.text(content, indent=2)}\n", "utf-8")
