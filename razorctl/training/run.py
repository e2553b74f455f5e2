"""finetune: one training loop for every registered model and data set."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

import razorctl
from razorctl import data, devices, models
from razorctl.errors import DivergedError, RazorError, UsageError
from razorctl.job import Job
from razorctl.memory.saved import saved_bytes
from razorctl.optimizer import check_library
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, precision
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training import checkpoints, export, rundir, space, tensors
from razorctl.training.checkpoints import Checkpoint, Checkpoints
from razorctl.training.compiled import refuse
from razorctl.training.evaluation import evaluate
from razorctl.training.learner import Learner
from razorctl.training.loading import Loading, in_order
from razorctl.training.metrics import Metrics
from razorctl.training.mixing import mixing

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One optimizer step; `accuracy`, `test_loss` and `metrics` are None unless it was evaluated.

    They are those of the validation split if there is one, else of the test split; `metrics` has
    all figures of `evaluation.evaluate`.
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
    metrics: Mapping[str, float] | None = None


class Run(Iterator[Step]):
    """A fine-tuning run: the constructor prepares it, iteration trains, `result` sums it up.

    A run whose directory has a checkpoint goes on from there; `history` has the steps before.
    saved_bytes, full_saved_bytes: bytes that this run and full fine-tuning save for backward.
    stop: called after each step; if it returns an exception, the run is saved and that is raised.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        plan: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] = lambda _: None,
        lock: "BaseFileLock | None" = None,
        command: str = "",
    ) -> None:
        """lock: held for the run directory, until the run is finished. command: what resumes it."""
        progress(f"loading {job.dataset}")
        family, source = data.pair(job)
        splits = source.load(progress)
        self.skipped, self.classes = splits.skipped, splits.classes
        job = replace(job, precision=precision(job, device))
        self.job = job = job.resolved(family.defaults, len(splits.train))
        self.recipe, self.out, self.device = recipe, out, device
        self.lock, self.command = lock, command
        self.predicted = None if plan is None else plan["chosen"]["predicted"]
        if plan is not None and device.type == "cuda":
            _hold_to(plan["budget_bytes"] - plan["context_bytes"], device)
        self.stop: Callable[[], BaseException | None] = lambda: None
        self.checkpoints = Checkpoints(out)
        found = self.checkpoints.newest
        if found is not None:
            _check_same(out, found, job, recipe)

        progress(f"building {job.model}")
        torch.manual_seed(job.seed)
        self.model = family.build(len(splits.classes), job.input_size).to(device)
        self.logits = family.logits
        self._feed(family, splits)
        progress("tracing what a step saves")
        example, _ = self._to_device(next(iter(self.loading.loader)))
        dtype = DTYPES[job.precision]
        self.full_saved_bytes = saved_bytes(self.model, example, autocast=dtype)
        self.pruned = sparsify_within(self.model, recipe, example, autocast=dtype)
        self.saved_bytes = saved_bytes(self.model, example, autocast=dtype)

        self.learner = Learner(self.model, job, self.logits, device)
        self.trial = self.learner.trial
        self.history: list[Step] = []
        self.peak_bytes: int | None = None
        space.check(out, self.model, job, self.checkpoints)
        if found is not None:
            known = self.learner.load(found.path)
            if known["data"] != self._data:
                raise UsageError(
                    f"{job.dataset} has changed since {out} was begun; undo that, or name another "
                    "directory with --out."
                )
            self.history = [Step(**step) for step in known["history"]]
            self.peak_bytes = known["peak_bytes"]
        self.metrics = Metrics(out, (json.dumps(asdict(step)) for step in self.history))
        self._steps = self._train()
        rundir.write_settings(out, job, recipe, devices.name(device), plan, splits.record)

    def _feed(self, family: models.Model, splits: data.Splits) -> None:
        """Loads rows of each split as the model takes them."""
        job, device = self.job, self.device
        transform = changed = family.transform(self.model, job.input_size)
        if job.augment != "none":
            assert family.augmented is not None
            assert job.augment is not None
            changed = family.augmented(self.model, job.input_size, job.augment)
        self.loading = Loading(splits.train.with_transform(changed), job, device)
        self.mix = mixing(job, len(splits.classes))
        self.split, rows = splits.evaluated
        # By which data that has changed is known.
        self._data = {"train": len(splits.train), self.split: len(rows), "classes": [*self.classes]}
        self.evaluated = in_order(rows.with_transform(transform), job, device)
        self.test_data: DataLoader[Any] | None = None
        self.tested: dict[str, float] | None = None
        if self.split != "test" and splits.test is not None:
            self.test_data = in_order(splits.test.with_transform(transform), job, device)

    def __next__(self) -> Step:
        return next(self._steps)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training data."""
        return self.loading.steps_per_epoch

    def _train(self) -> Iterator[Step]:
        assert self.job.steps is not None
        self.learner.begin()
        batches = self.loading.batches(len(self.history))
        for step in range(len(self.history) + 1, self.job.steps + 1):
            try:
                taken = self._step(step, next(batches))
            except DivergedError as error:
                saved = self.save(diverged=True)
                raise self._diverged(error, step, saved) from None
            best = max((s.accuracy for s in self.history if s.accuracy is not None), default=0.0)
            self.history.append(taken)
            self.metrics.add(json.dumps(asdict(taken)))
            if self._due(taken, best):
                self.save()
            yield taken
            stop = self.stop()
            if stop is not None:
                self.save()
                raise stop
        self._finish()

    def _step(self, step: int, micro_batches: Iterable[Any]) -> Step:
        """Takes a step, and evaluates if that is due."""
        assert self.job.batch_size is not None
        assert self.job.evaluate_every is not None
        start, rate = time.perf_counter(), self.learner.rate
        self._reset_peak()
        loss, norm = self.learner.step(map(self.mix, map(self._to_device, micro_batches)))
        values = {"loss": loss.item(), "grad_norm": norm.item()}  # waits for the device
        seconds = time.perf_counter() - start
        self._note_peak()
        self.trial.note(seconds)
        due = step % self.job.evaluate_every == 0 or step == self.job.steps
        figures = self.evaluate() if due else {}
        return Step(
            step=step,
            epoch=step / self.steps_per_epoch,
            learning_rate=rate,
            seconds=seconds,
            samples_per_second=self.job.batch_size / seconds,
            **values,
            accuracy=figures.get("accuracy"),
            test_loss=figures.get("loss"),
            metrics=figures or None,
        )

    def _export(self, model: nn.Module, folder: Path) -> None:
        models.find(self.job.model).save(model, self.classes, self.job.input_size, folder)

    def _due(self, taken: Step, best: float) -> bool:
        """Whether a step is saved, after evaluations of which `best` was the best."""
        every, accuracy = self.job.save_every, taken.accuracy
        if taken.step == self.job.steps or (accuracy is not None and accuracy >= best):
            return True
        return accuracy is not None if every is None else taken.step % every == 0

    def save(self, diverged: bool = False) -> bool:
        """Saves the run as it is between two steps; call it after any step, if a checkpoint is due.

        diverged: the next step cannot be taken, so the run may go on with a lower learning rate.
        If the disk takes no checkpoint, that is a warning: returns whether the run is saved.
        """
        done, newest = len(self.history), self.checkpoints.newest
        try:
            if newest is None or newest.step != done:
                accuracy = self.history[-1].accuracy if done else None
                marker = {
                    "razorctl": razorctl.__version__,
                    "step": done,
                    "accuracy": accuracy,
                    "diverged": diverged,
                    "settings": rundir.merged(self.job, self.recipe),
                }
                more = {
                    "history": [asdict(step) for step in self.history],
                    "data": self._data,
                    "peak_bytes": self.peak_bytes,
                }
                self.checkpoints.save(marker, partial(self.learner.write, more=more))
            elif diverged:
                self.checkpoints.mark(newest, diverged=True)
        except OSError as error:
            kept = f"step {newest.step:,} stays saved" if newest else "no step is saved yet"
            log.warning("step %s is not saved (%s); %s.", f"{done:,}", error.strerror, kept)
            return False
        return True

    def evaluate(self, rows: DataLoader[Any] | None = None) -> dict[str, float]:
        """The figures of `evaluation.evaluate` for rows.

        None is the split that is evaluated during training: validation, or else test.
        """
        batches = map(self._to_device, self.evaluated if rows is None else rows)
        return evaluate(self.model, self.logits, batches, len(self.classes), self.job)

    def result(self) -> dict[str, Any]:
        """The summary of a finished run, under the stable keys of `finetune --json`.

        The time of compiling is in `payoff`, not in `epoch_seconds`.
        """
        last, payoff, best = self.history[-1], self.trial.payoff, self._best()
        seconds = [step.seconds for step in self.history]
        compiling = self.trial.compile_seconds / len(seconds)
        return {
            "run_dir": str(self.out),
            "model": self.job.model,
            "dataset": self.job.dataset,
            "classes": list(self.classes),
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
            "weights": str(self.out / rundir.WEIGHTS),
            "best_step": best.step if best else last.step,
            "best_accuracy": best.accuracy if best else last.accuracy,
            "best_weights": str(self.out / (rundir.BEST if best else rundir.WEIGHTS)),
            "predicted": self.predicted,
            "compiled": self.trial.done,
            "payoff": payoff and asdict(payoff),
        }

    def _scores(self) -> dict[str, Any]:
        """The last evaluation, and the test at the end if it was on another split."""
        last = self.history[-1]
        figures, split = last.metrics or {}, self.split
        validation = {}
        if self.tested is not None:
            validation = {"validation_accuracy": last.accuracy, "validation_loss": last.test_loss}
            figures, split = self.tested, "test"
        scores = {"accuracy": figures["accuracy"], "loss": figures["loss"], "split": split}
        return scores | {"metrics": dict(figures)} | validation

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

    def _best(self) -> Checkpoint | None:
        """The best checkpoint; None if the last step is at least as good."""
        best, last = self.checkpoints.best, self.history[-1]
        if best is None or best.accuracy is None or last.accuracy is None:
            return None
        return best if best.accuracy > last.accuracy else None

    def _finish(self) -> None:
        """Writes the weights, then the result; raises RazorError if the disk does not take them."""
        if self.test_data is not None:
            self.tested = self.evaluate(self.test_data)
        try:
            self.metrics.close()
            best = self._best()
            if best is not None and not export.best(self.model, self._export, best, self.out):
                self.checkpoints.drop(best)
            export.last(self.model, self._export, self.out)
            with rundir.whole(self.out / rundir.RESULT) as file:
                file.write_text(json.dumps(self.result(), indent=2) + "\n")
        except OSError as error:
            newest, needed = self.checkpoints.newest, 2 * tensors.size(self.model.state_dict())
            saved = f"step {newest.step:,} of {self.job.steps:,}" if newest else "no step"
            raise RazorError(
                f"the weights cannot be written ({error.strerror}), and {saved} is saved; free "
                f"{needed:,} bytes on the disk of {self.out}, then go on with `{self.command}`."
            ) from None
        if not self.job.keep_checkpoints:
            checkpoints.clear(self.out)
        if self.lock is not None:
            rundir.unlock(self.out, self.lock)

    def _diverged(self, error: DivergedError, step: int, saved: bool) -> RazorError:
        assert self.job.learning_rate is not None
        kept = f"step {step - 1:,} is {'' if saved else 'not '}saved"
        return RazorError(
            f"{error} at step {step:,}, and {kept}; lower --lr, such as with "
            f"`{self.command} --lr {self.job.learning_rate / 2:g}`."
        )


def _check_same(out: Path, found: Checkpoint, job: Job, recipe: Recipe) -> None:
    """Raises UsageError for a checkpoint of other settings.

    One whose next step diverged also takes a lower learning rate.
    """
    known, wanted = dict(found.marker["settings"]), rundir.merged(job, recipe)
    if found.marker["diverged"] and (job.learning_rate or 0) < known["learning_rate"]:
        del known["learning_rate"]
    rundir.refuse_others(out, known, wanted)


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
    resume: bool = False,
) -> Run:
    """Prepares and returns a run of `job` with `recipe`: iterate to train, then call `result`.

    out: the run directory to make; it must not exist. None is a new one under runs/.
    device: None is CUDA if available, else the CPU.
    plan: the document of the plan that `job` and `recipe` come from. Its budget limits what CUDA
        may allocate, and the result has its prediction.
    progress: called with the name of each stage of the preparation.
    resume: go on from the newest valid checkpoint in `out`; without one, start at the beginning.
    Raises RazorError, and leaves no directory behind, if the run cannot be prepared. With `resume`
    that includes a finished run, and a checkpoint of other settings.
    """
    recipe, place = recipe or Recipe(), devices.find(device)
    check_library(job)
    refuse(job, recipe, place)
    if resume and out is None:
        raise UsageError("there is nothing to resume; name the directory of the run.")
    out = rundir.choose(out, job.model, job.dataset, recipe.method, resume=resume)
    command = rundir.resuming(out, None if device is None else str(device))
    with rundir.claimed(out, resume) as lock:
        if (out / rundir.RESULT).exists():
            raise UsageError(f"{out} holds a finished run; its result is in {rundir.RESULT}.")
        return Run(job, recipe, out, place, plan, progress, lock, command)
