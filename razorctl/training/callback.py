"""razorctl inside transformers.Trainer."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainingArguments

from razorctl import units
from razorctl.recipe import Recipe
from razorctl.surgery.byte_budget import saved_bytes, sparsify_within, stock_parts
from razorctl.surgery.sparsify import restore, sparsify

log = logging.getLogger(__name__)


class RazorCallback(TrainerCallback):  # type: ignore[misc]
    """Makes transformers.Trainer train by a recipe: `Trainer(..., callbacks=[RazorCallback()])`.

    The model is sparsified when training begins and stock again when it has ended; its weights,
    checkpoints and optimizer are always those of the stock model. With a map-style data set the
    byte budget is met for the first batch, and `saved_bytes` and `full_saved_bytes` of that batch
    are set and join the logs of losses. A warning says if the model cannot run on that batch alone,
    since the trainer first computes with it. Raises what `sparsify_within` raises.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.recipe = recipe or Recipe()
        self.saved_bytes: int | None = None
        self.full_saved_bytes: int | None = None
        self._model: nn.Module | None = None  # the sparsified one

    def on_train_begin(
        self,
        args: TrainingArguments,
        *_: Any,
        model: nn.Module,
        train_dataloader: DataLoader[Any],
        **__: Any,
    ) -> None:
        if self._model is not None:  # training has failed before its end
            restore(self._model)
        self._model = model
        batch = _first_batch(train_dataloader, args.train_batch_size)
        if batch is None:
            sparsify(model, self.recipe)
            return
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        try:
            full = sum(stock_parts(model, batch, autocast=dtype, forward=None).values())
        except Exception as error:  # whatever code raises on what the trainer may give it otherwise
            why = f"{type(error).__name__}: {error}"
            log.warning("the byte budget is not met for the first batch, which raises %s", why)
            sparsify(model, self.recipe)
            return
        self.full_saved_bytes = full
        sparsify_within(model, self.recipe, batch, autocast=dtype, full=full)
        self.saved_bytes = saved_bytes(model, batch, autocast=dtype)
        share = self.saved_bytes / self.full_saved_bytes
        log.info(
            "keeps %s for backward, %s of full's",
            units.size(self.saved_bytes),
            units.percent(share),
        )

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs and self.saved_bytes is not None:
            logs["saved_bytes"] = self.saved_bytes
            logs["full_saved_bytes"] = self.full_saved_bytes

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        restore(model)
        self._model = None


def _first_batch(loader: DataLoader[Any], size: int) -> Mapping[str, Any] | None:
    """The first rows of a data set as a batch; None if the data set is iterable only.

    The loader draws nothing for it, so the order of its rows does not change.
    """
    rows: Any = loader.dataset
    if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__"):
        return None
    with torch.random.fork_rng():
        batch = loader.collate_fn([rows[number] for number in range(min(size, len(rows)))])
    return batch if isinstance(batch, Mapping) else None
