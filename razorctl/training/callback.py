"""razorctl inside transformers.Trainer."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainingArguments

from razorctl import units
from razorctl.config.recipe import Recipe
from razorctl.layers.base import in_backward
from razorctl.surgery import drawing
from razorctl.surgery.byte_budget import Full, saved_bytes, within
from razorctl.surgery.sparsify import restore, sparsify, stock_parts, tell_excess

log = logging.getLogger(__name__)


class RazorCallback(TrainerCallback):  # type: ignore[misc]
    """Makes transformers.Trainer train by a recipe: `Trainer(..., callbacks=[RazorCallback()])`.

    The model is sparsified when training begins, and restored when it ends or raises. Its weights,
    checkpoints and optimizer stay stock. With a map-style data set the byte
    budget is met for the first batch; `saved_bytes` and `full_saved_bytes` of this batch are set,
    and logged with the losses. If the model cannot run on the first batch alone, a warning says so,
    and the budget is met for the inputs of the first call of the model, unless it is compiled or a
    joint budget has drawn. Raises what `sparsify_within` raises.
    """

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.recipe = recipe or Recipe()
        self.saved_bytes: int | None = None
        self.full_saved_bytes: int | None = None
        self._model: nn.Module | None = None  # the sparsified one
        self._hook = RemovableHandle(OrderedDict())  # of `_at_first_call`

    def on_train_begin(
        self,
        args: TrainingArguments,
        *_: Any,
        model: nn.Module,
        train_dataloader: DataLoader[Any],
        **__: Any,
    ) -> None:
        self.on_train_end()  # after an error the trainer may begin again with smaller batches
        self._model = model
        batch = _first_batch(train_dataloader, args.train_batch_size)
        if batch is None:
            sparsify(model, self.recipe)
            return
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        if not self._meet(model, batch, {"autocast": dtype}) and self.recipe.joint_budget == 1:
            log.warning("the inputs of the first call determine the byte budget instead")
            drawing.unhook(model, tell_excess)
            first = partial(self._at_first_call, dtype)
            self._hook = model.register_forward_pre_hook(first, with_kwargs=True)

    def _meet(self, model: nn.Module, batch: Any, run: dict[str, Any]) -> bool:
        """Sparsifies a model within its byte budget for a batch; False if it cannot run on it."""
        try:
            full = sum(stock_parts(model, batch, **run).values())
        except Exception as error:  # the trainer may change the batch before it calls the model
            why = f"{type(error).__name__}: {error}"
            log.warning("the first batch cannot determine the byte budget, as it raises %s", why)
            sparsify(model, self.recipe)
            return False
        self.full_saved_bytes = full
        parts = within(model, self.recipe, batch, Full(full), **run).parts
        self.saved_bytes = sum(parts.values()) if parts else saved_bytes(model, batch, **run)
        share = units.percent(self.saved_bytes / full)
        size = units.size(self.saved_bytes)
        log.info("stores %s for backward, %s of full fine-tuning", size, share)
        return True

    def _at_first_call(
        self, dtype: torch.dtype | None, model: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Meets the byte budget for the arguments of the first call that needs a backward pass."""
        inside = torch.compiler.is_compiling() or in_backward()
        if model.training and torch.is_grad_enabled() and not inside:
            self._hook.remove()
            restore(model)
            run = {"autocast": dtype, "forward": lambda twin, call: twin(*call[0], **call[1])}
            self._meet(model, (args, kwargs), run)

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs and self.saved_bytes is not None:
            logs["saved_bytes"] = self.saved_bytes
            logs["full_saved_bytes"] = self.full_saved_bytes

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restores the model, if it is sparsified."""
        self._hook.remove()
        if self._model is not None:
            restore(self._model)
        self._model = None


def _stopping(train: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train`, which also ends these callbacks when it raises."""

    @wraps(train)
    def stopping(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(trainer, *args, **kwargs)
        except BaseException:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, RazorCallback):
                    callback.on_train_end()
            raise

    return stopping


# The trainer calls no callback when training raises, and callbacks do not get the trainer.
Trainer.train = _stopping(Trainer.train)


def _first_batch(loader: DataLoader[Any], size: int) -> Mapping[str, Any] | None:
    """The first rows of a data set as a batch; None for an iterable data set.

    Random states do not change, so that the order of the rows stays.
    """
    rows: Any = loader.dataset
    if isinstance(rows, IterableDataset) or not hasattr(rows, "__getitem__"):
        return None
    with torch.random.fork_rng():
        batch = loader.collate_fn([rows[number] for number in range(min(size, len(rows)))])
    return batch if isinstance(batch, Mapping) else None
