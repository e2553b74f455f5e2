"""finetune: one training loop for every registered model and data set."""

import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomli_w
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

import razorctl
from razorctl import data, devices
from razorctl.errors import RazorError
from razorctl.job import Job
from razorctl.memory.saved import saved_bytes
from razorctl.optimizer import build_optimizer, check_library
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, autocast, precision, train_step
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.surgery.sparsify import restore
from razorctl.training.compiled import Trial, refuse
from razorctl.training.rundir import (
    CONFIG,
    METRICS,
    RESULT,
    SPLIT,
    WEIGHTS,
    choose,
    claimed,
    whole,
)


@dataclass(frozen=True)
class Step:
    """One optimizer step; `accuracy` and `test_loss` are None unless the step was evaluated.

    They are those of the validation split if there is one, else of the test split.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    samples_per_second: float
    accuracy: float | None = None
    test_loss: float | None = None


class Run(Iterator[Step]):
    """A fine-tuning run: the constructor prepares it, iteration trains, `result` sums it up.

    saved_bytes, full_saved_bytes: bytes that this run and full fine-tuning save for backward.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        plan: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        progress(f"loading {job.dataset}")
        family, source = data.pair(job)
        splits = source.load(progress)
        self.skipped = splits.skipped
        job = replace(job, precision=precision(job, device))
        self.job = job = job.resolved(family.defaults, len(splits.train))
        self.recipe, self.out, self.device = recipe, out, device
        self.predicted = None if plan is None else plan["chosen"]["predicted"]
        if plan is not None and device.type == "cuda":
            _hold_to(plan["budget_bytes"] - plan["context_bytes"], device)
        assert job.batch_size is not None
        self.steps_per_epoch = len(splits.train) // job.batch_size

        progress(f"building {job.model}")
        torch.manual_seed(job.seed)
        self.model = family.build(len(splits.classes), job.input_size).to(device)
        self.logits = family.logits
        transform = family.transform(self.model, job.input_size)
        loading: dict[str, Any] = {"batch_size": job.batch_size // job.accumulate}
        if device.type == "cuda":
            loading |= {"num_workers": min(8, os.cpu_count() or 1), "pin_memory": True}
        self.order = torch.Generator()
        self.train_data = DataLoader(
            splits.train.with_transform(transform),
            shuffle=True,
            drop_last=True,
            generator=self.order,
            **loading,
        )
        self.split, rows = splits.evaluated
        self.evaluated = DataLoader(rows.with_transform(transform), **loading)
        self.test_data: DataLoader[Any] | None = None
        self.tested: dict[str, float] | None = None
        if self.split != "test" and splits.test is not None:
            self.test_data = DataLoader(splits.test.with_transform(transform), **loading)
        progress("tracing what a step saves")
        example, _ = self._to_device(next(iter(self.train_data)))
        dtype = DTYPES[job.precision]
        self.full_saved_bytes = saved_bytes(self.model, example, autocast=dtype)
        self.pruned = sparsify_within(self.model, recipe, example, autocast=dtype)
        self.saved_bytes = saved_bytes(self.model, example, autocast=dtype)

        assert job.steps is not None
        self.trial = Trial(self.model, job)
        self.history: list[Step] = []
        self.peak_bytes: int | None = None
        self._steps = self._train()
        if splits.record is not None:
            (out / SPLIT).write_text(json.dumps(splits.record) + "\n")
        (out / CONFIG).write_text(self._config())

    def __next__(self) -> Step:
        return next(self._steps)

    def _train(self) -> Iterator[Step]:
        job, model = self.job, self.model
        assert job.batch_size is not None
        assert job.steps is not None
        assert job.evaluate_every is not None
        optimizer = build_optimizer(model, job)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.decay)
        scaler = torch.amp.GradScaler(self.device.type, enabled=job.precision == "fp16")
        batches = self._batches()
        with (self.out / METRICS).open("w") as metrics:
            for step in range(1, job.steps + 1):
                start = time.perf_counter()
                self._reset_peak()
                rate = max(float(group["lr"]) for group in optimizer.param_groups)
                batch: Iterable[tuple[Any, Tensor]] = next(batches)
                if self.trial.works:
                    batch = list(batch)  # a step that cannot be compiled is taken again
                model.train()
                loss, norm = self.trial.step(train_step, self.logits, batch, optimizer, job, scaler)
                scheduler.step()
                if not math.isfinite(loss.item()):  # waits for the device before the time is taken
                    raise RazorError(f"the loss is {loss.item()} at step {step}; lower --lr.")
                seconds = time.perf_counter() - start
                self._note_peak()
                self.trial.note(seconds)
                due = step % job.evaluate_every == 0 or step == job.steps
                self.history.append(
                    Step(
                        step=step,
                        epoch=step / self.steps_per_epoch,
                        loss=loss.item(),
                        learning_rate=rate,
                        grad_norm=norm.item(),
                        seconds=seconds,
                        samples_per_second=job.batch_size / seconds,
                        **(self.evaluate() if due else {}),
                    )
                )
                metrics.write(json.dumps(asdict(self.history[-1])) + "\n")
                metrics.flush()
                yield self.history[-1]
        restore(model)
        if self.test_data is not None:
            self.tested = self.evaluate(self.test_data)
        self._save()

    @torch.no_grad()
    def evaluate(self, rows: DataLoader[Any] | None = None) -> dict[str, float]:
        """The `accuracy` and the mean cross-entropy `test_loss` of rows.

        None is the split that is evaluated during training: validation, or else test.
        """
        rows = self.evaluated if rows is None else rows
        self.model.eval()
        hits = loss = 0.0
        for inputs, labels in map(self._to_device, rows):
            with autocast(self.device, self.job):
                logits = self.logits(self.model, inputs).float()
            hits += (logits.argmax(1) == labels).sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count = len(rows.dataset)  # type: ignore[arg-type]
        return {"accuracy": hits / count, "test_loss": loss / count}

    def result(self) -> dict[str, Any]:
        """The summary of a finished run, under the stable keys of `finetune --json`.

        The time of compiling is in `payoff`, not in `epoch_seconds`.
        """
        payoff = self.trial.payoff
        seconds = [step.seconds for step in self.history]
        compiling = 0.0 if payoff is None else payoff.compile_seconds / len(seconds)
        return {
            "run_dir": str(self.out),
            "model": self.job.model,
            "dataset": self.job.dataset,
            "recipe": asdict(self.recipe),
            "job": asdict(self.job),
            "steps": len(self.history),
            **self._scores(),
            "saved_bytes": self.saved_bytes,
            "full_saved_bytes": self.full_saved_bytes,
            "peak_bytes": self.peak_bytes,
            "step_seconds": median(seconds),
            "epoch_seconds": (fmean(seconds) - compiling) * self.steps_per_epoch,
            "device": devices.name(self.device),
            "weights": str(self.out / WEIGHTS),
            "predicted": self.predicted,
            "compiled": self.trial.done,
            "payoff": payoff and asdict(payoff),
        }

    def _scores(self) -> dict[str, Any]:
        """The last evaluation, and the test at the end if it was on another split."""
        last = self.history[-1]
        if self.tested is None:
            return {"accuracy": last.accuracy, "loss": last.test_loss, "split": self.split}
        return {
            "accuracy": self.tested["accuracy"],
            "loss": self.tested["test_loss"],
            "split": "test",
            "validation_accuracy": last.accuracy,
            "validation_loss": last.test_loss,
        }

    def _batches(self) -> Iterator[Iterator[tuple[Any, Tensor]]]:
        """The micro-batches of each step; take them all before those of the next step."""
        for epoch in itertools.count():
            # Seeded by seed and epoch alone, so that the order of any epoch can be repeated.
            self.order.manual_seed(self.job.seed * 1_000_003 + epoch)
            micro_batches = map(self._to_device, self.train_data)
            for _ in range(self.steps_per_epoch):
                yield itertools.islice(micro_batches, self.job.accumulate)

    def _to_device(self, batch: dict[str, Any]) -> tuple[Any, Tensor]:
        moved = tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)
        return moved["inputs"], moved["labels"]

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _note_peak(self) -> None:
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            self.peak_bytes = max(peak, self.peak_bytes or 0)

    def _config(self) -> str:
        """The settings as the text of a razorctl.toml, with which the run can be repeated."""
        tables = {
            "recipe": asdict(self.recipe),
            "job": asdict(self.job),
            "environment": {
                "device": devices.name(self.device),
                "python": platform.python_version(),
                "razorctl": razorctl.__version__,
                **{name: version(name) for name in ("torch", "timm", "datasets")},
            },
        }
        return tomli_w.dumps(
            {t: {k: v for k, v in d.items() if v is not None} for t, d in tables.items()}
        )

    def _save(self) -> None:
        """Writes the weights under the stock model's names, then the result; never a part of one.

        The model must be restored first.
        """
        with whole(self.out / WEIGHTS) as file:
            save_model(self.model, str(file))
        with whole(self.out / RESULT) as file:
            file.write_text(json.dumps(self.result(), indent=2) + "\n")


def _hold_to(budget: int, device: torch.device) -> None:
    """Limits this process to `budget` bytes of tensors, even if the card has more."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)


def finetune(
    job: Job,
    recipe: Recipe | None = None,
    *,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
    plan: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Run:
    """Prepares and returns a run of `job` with `recipe`: iterate to train, then call `result`.

    out: the run directory to make; it must not exist. None is a new one under runs/.
    device: None is CUDA if available, else the CPU.
    plan: the document of the plan that `job` and `recipe` come from. Its budget limits what CUDA
        may allocate, and the result has its prediction.
    progress: called with the name of each stage of the preparation.
    Raises RazorError, and leaves no directory behind, if the run cannot be prepared.
    """
    recipe, place = recipe or Recipe(), devices.find(device)
    check_library(job)
    refuse(job, recipe, place)
    out = choose(out, job.model, job.dataset, recipe.method)
    with claimed(out):
        return Run(job, recipe, out, place, plan, progress)
