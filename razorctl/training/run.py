"""A fine-tuning run: one training loop for all models and data sets."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import DivergedError, FigureError, RazorError, UsageError
from razorctl.optimizer import check_optimizer
from razorctl.system import atomic, devices, processes
from razorctl.training import export, parallel, run_files, rundir, state
from razorctl.training.checkpoints import Checkpoint
from razorctl.training.compiled import refuse_uncompilable
from razorctl.training.learner import Learner
from razorctl.training.metrics import Metrics, Step
from razorctl.training.preparation import PreparedRun
from razorctl.version import __version__

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)


class Run(PreparedRun, Iterator[Step]):
    """A fine-tuning run: the constructor prepares it, iteration trains, `result` sums it up.

    A run whose directory has a checkpoint resumes from it.
    stop: called after each step; an exception that it returns is raised after a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        command: str,
        *,
        plan: Mapping[str, Any] | None,
        progress: Callable[[str], None],
        lock: "BaseFileLock | None",
        prepared: Callable[["Run"], object],
    ) -> None:
        """Prepares the run; other arguments are as for `finetune`.

        command: the command that resumes the run. lock: of the run directory, in the first process.
        """
        self.lock, self.command = lock, command
        self.held = None if lock is None else rundir.identity(out)
        self.predicted = None if plan is None else plan["chosen"]["predicted"]
        if plan is not None and device.type == "cuda":
            devices.hold_to(plan["budget_bytes"] - plan["context_bytes"], device)
        self.stop: Callable[[], BaseException | None] = lambda: None
        with processes.together():
            super().__init__(job, recipe, out, device, progress)
            prepared(self)
        self._unsharded = parallel.unsharded(self.model, self.job)
        newest = self.checkpoints.newest
        if len({each and each.step for each in processes.every(newest)}) > 1:
            raise UsageError(f"not all machines see {out}; name a directory that they share.")
        self.learner = Learner(self.model, self.losses, device)
        self.learner.relieve(self.recovery.relief)
        self.trial = self.learner.trial
        self.threads = torch.get_num_threads()  # at the begin of the run
        if newest is not None:
            self._go_on(self.learner.load(newest.path))
            if newest.step == self.job.steps and not self.history[-1].metrics:
                self.history[-1] = self._evaluated(self.history[-1])  # this failed before
        self._steps, self._between = self._train(), False
        self._frozen: bool | None = None  # whether this run froze objects; None before a step
        with processes.together():
            self.metrics = None
            if processes.first():
                with atomic.writing(out):
                    self.metrics = Metrics(out, self.history)
                    run_files.write_settings(
                        out,
                        self.job,
                        recipe,
                        device=devices.name(device),
                        threads=self.threads,
                        plan=plan,
                        split=self.split_document,
                        pretrained=self.pretrained_document,
                    )

    def _go_on(self, snapshot: Mapping[str, Any]) -> None:
        """Restores the history of the run from the state of a checkpoint."""
        if snapshot["data"] != self.feed.facts:
            raise UsageError(
                f"{self.job.dataset} has changed since {self.out} began; {run_files.ELSEWHERE}."
            )
        self.history = [Step(**step) for step in snapshot["history"]]
        self.peak_bytes = snapshot["peak_bytes"]
        self.by_class = snapshot["by_class"]
        self.threads, note = run_files.begun_threads(self.out, self.threads)
        if self.device.type == "cpu":
            self.notes = (*self.notes, *note)

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except BaseException:
            self._release()
            raise

    def _freeze(self) -> None:
        """Exempts all present objects from garbage collection: they live as long as the run."""
        if self._frozen is None:  # once, since a count walks over all hidden objects
            self._frozen = not gc.get_freeze_count()
            if self._frozen:
                gc.collect()
                gc.freeze()

    def _thaw(self) -> None:
        if self._frozen:
            gc.unfreeze()
        self._frozen = None

    def _release(self) -> None:
        """Unlocks the directory now, not when the garbage collector runs."""
        if self.lock is not None:
            self.lock.release()

    def _train(self) -> Iterator[Step]:
        try:
            yield from self._all_steps()
        finally:
            self._thaw()

    def _all_steps(self) -> Iterator[Step]:
        assert self.job.steps is not None
        self.learner.begin()
        batches = self.feed.loading.batches(len(self.history))
        for step in range(len(self.history) + 1, self.job.steps + 1):
            if self.stopped_early:
                break
            try:
                taken = self._step(step, batches)
            except DivergedError as error:
                self.save(diverged=True)
                raise self._diverged(str(error), step) from None
            except FigureError as error:  # the weights are not saved
                self._mark_diverged()
                raise self._diverged(error.what, step) from None
            except Exception:  # such as a lack of memory, or an image that cannot be read
                if not self.learner.torn and self.job.processes == 1:
                    self.save()
                raise
            self.history.append(taken)
            self._freeze()
            if self.job.processes == 1:
                self.check_directory()
            if self.metrics is not None:
                self.metrics.add(taken)
            if self._due(taken):
                self.save()
            self._between = True
            yield taken
            self._between = False
            stop = self._stopped()
            if stop is not None:
                self.save()
                raise stop
        self.learner.end()
        export.finish(self, self._unsharded)

    @property
    def evaluated_model(self) -> nn.Module:
        return self.learner.evaluated

    def rescue(self) -> None:
        """Saves the run, if the code that iterates over it failed between two steps."""
        if self._between and self.job.processes == 1:
            self.save()
        self._release()

    def _stopped(self) -> BaseException | None:
        """The exception that `stop` returns in a process; None without one. Collective."""
        stop = self.stop()
        if not processes.most(stop is not None, self.device):
            return None
        return next(each for each in processes.every(stop) if each is not None)

    def _step(self, step: int, batches: Iterator[Iterable[Any]]) -> Step:
        """Takes a step, and evaluates the model if an evaluation is due."""
        assert self.job.batch_size is not None
        assert self.job.evaluate_every is not None
        start, rate = time.perf_counter(), self.learner.rate
        devices.reset_peak(self.device)
        loss, norm = self._take(step, iter(next(batches)))
        loss, norm = loss.cpu(), norm.cpu()  # waits for the device
        seconds = time.perf_counter() - start
        self._note_peak()
        self.trial.note(seconds)
        due = step % self.job.evaluate_every == 0 or step == self.job.steps
        taken = Step(
            step=step,
            epoch=step / self.steps_per_epoch,
            learning_rate=rate,
            seconds=seconds,
            samples_per_second=self.job.batch_size / seconds,
            loss=loss.item(),
            grad_norm=norm.item(),
        )
        try:
            return self._evaluated(taken) if due else taken
        except Exception:
            self.history.append(taken)  # the weights have changed
            raise

    def _evaluated(self, taken: Step) -> Step:
        """The step with the figures of an evaluation after it."""
        evaluation = self.learner.beside_graphs(self.evaluation)
        figures = evaluation.figures
        accuracy, test_loss = figures.get("accuracy"), figures.get("loss")
        taken = replace(taken, accuracy=accuracy, test_loss=test_loss, metrics=figures)
        if self._is_best(taken):
            self.by_class = evaluation.by_class_document
        return taken

    def _take(self, step: int, micro_batches: Iterator[Any]) -> tuple[Tensor, Tensor]:
        """Calls `Learner.step`; after a lack of memory it is called again with less memory."""
        batches = [] if self.job.of_rows else list(micro_batches)  # kept for the next attempt
        total = self.feed.total(batches)

        def rows() -> Iterator[Any]:
            yield from list(batches)
            for batch in micro_batches:
                batches.append(batch)
                yield batch

        while True:
            try:
                return self.learner.step(map(self.feed.trained, rows()), total)
            except torch.OutOfMemoryError:
                if self.learner.torn or not self.recovery.relieve(step, self.sparsify):
                    raise
            self.learner.relieve(self.recovery.relief)
            # After the `except` block, since the error holds the tensors of its frames.
            self._thaw()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _due(self, taken: Step) -> bool:
        """Whether a checkpoint is due after the step that was just taken."""
        every = self.job.save_every
        if taken.step == self.job.steps or self._is_best(taken) or self.stopped_early:
            return True
        return taken.metrics is not None if every is None else taken.step % every == 0

    def _is_best(self, taken: Step) -> bool:
        """Whether no earlier step has a higher score."""
        score = taken.score(self.metric)
        if score is None:
            return False
        scores = [step.score(self.metric) for step in self.history]
        return all(before <= score for before in scores if before is not None)

    def save(self, diverged: bool = False) -> bool:
        """Writes a checkpoint between two steps, and returns whether the run is saved. Collective.

        A checkpoint that cannot be written gives a warning, as do weights that are not finite.
        diverged: whether the next step diverged, so that a lower learning rate may follow.
        """
        done, newest = len(self.history), self.checkpoints.newest
        if newest is not None and newest.step == done:
            return not diverged or self._mark_diverged()
        if processes.most(not self.learner.finite, self.device):
            log.warning("step %s is not saved, since a weight is not finite.", f"{done:,}")
            return diverged and self._mark_diverged()
        marker = {
            "razorctl": __version__,
            "step": done,
            "score": self.history[-1].score(self.metric) if done else None,
            "diverged": diverged,
            "relieved": self.recovery.relieved,
            "settings": run_files.merged_settings(self.job, self.recipe),
        }
        model, rest = self.learner.snapshot()
        rest |= {
            "history": [asdict(step) for step in self.history],
            "data": self.feed.facts,
            "peak_bytes": self.peak_bytes,
            "by_class": self.by_class,
        }
        write = partial(state.write, model=model, state=rest)
        return self._saved(partial(self.checkpoints.save, marker, write))

    def _mark_diverged(self) -> bool:
        """Allows a lower rate after the newest checkpoint; returns whether there is one."""
        newest = self.checkpoints.newest
        if newest is None:
            return False
        return self._saved(partial(self.checkpoints.mark, newest, diverged=True))

    def _saved(self, save: Callable[[], None]) -> bool:
        """Calls `save` in the first process; returns whether it could write. Collective."""
        saved, self.checkpoints.valid = processes.of_first(partial(self._try, save))
        return saved

    def _try(self, save: Callable[[], None]) -> tuple[bool, list[Checkpoint]]:
        """Calls `save`; returns whether it could write, and the valid checkpoints."""
        self.check_directory()
        newest = self.checkpoints.newest
        try:
            save()
        except OSError as error:
            saved = f"step {newest.step:,} stays saved" if newest else "no step is saved yet"
            step = f"{len(self.history):,}"
            log.warning("step %s is not saved (%s); %s.", step, error.strerror, saved)
            return False, self.checkpoints.valid
        return True, self.checkpoints.valid

    def result(self) -> dict[str, Any]:
        """The summary of a finished run: `export.summary_of`."""
        return export.summary_of(self)

    def _note_peak(self) -> None:
        if (peak := devices.peak(self.device)) is not None:
            self.peak_bytes = max(peak, self.peak_bytes or 0)

    def _diverged(self, what: str, step: int) -> RazorError:
        """The error for a value that is not finite at a step, with the checkpoint to resume."""
        assert self.job.learning_rate is not None
        newest, rate = self.checkpoints.newest, f"--lr {self.job.learning_rate / 2:g}"
        mend = f"no step is saved; train again with a lower rate, such as {rate}"
        if newest is not None:
            mend = (
                f"step {newest.step:,} is saved; lower --lr, such as with `{self.command} {rate}`"
            )
        wider = "" if self.job.precision == "fp32" else ", or train again with --precision fp32"
        return RazorError(f"{what} at step {step:,}, and {mend}{wider}.")


def finetune(
    job: Job,
    recipe: Recipe | None = None,
    *,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
    plan: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    resume: bool = False,
    prepared: Callable[[Run], object] = lambda _: None,
) -> Run:
    """Prepares and returns a run of `job` with `recipe`: iterate to train, then call `result`.

    Raises RazorError, and removes a new directory, if the run cannot be prepared. With `resume` it
    raises UsageError for a finished run, and for a checkpoint of other settings.

    Args:
        job: all that training needs.
        recipe: None is the default one.
        out: the new run directory; None is one under runs/.
        device: None is CUDA if available, else the CPU.
        plan: the document of the plan of `job` and `recipe`. Its budget limits the memory of CUDA,
            and the result has its prediction.
        progress: called with the name of each stage of the preparation.
        resume: resume from the newest valid checkpoint in `out`, if there is one.
        prepared: called with the run after data and model are loaded, before the optimizer is made.
    """
    recipe, place = recipe or Recipe(), devices.find(device)
    processes.check_count(job.processes)
    check_optimizer(job)
    refuse_uncompilable(job, recipe)
    if resume and out is None:
        raise UsageError("there is nothing to resume; name the directory of the run.")
    processes.join(place.type == "cpu")
    words = job.model, job.dataset, recipe.method
    out = processes.of_first(lambda: rundir.choose(out, *words, resume=resume))
    command = rundir.resuming(out, None if device is None else str(device), job.processes)
    with ExitStack() as claim:
        with processes.together():
            lock = claim.enter_context(rundir.claimed(out, resume)) if processes.first() else None
            if (out / rundir.RESULT).exists():
                raise UsageError(f"{out} holds a finished run; its result is in {rundir.RESULT}.")
        return Run(
            job,
            recipe,
            out,
            place,
            command,
            plan=plan,
            progress=progress,
            lock=lock,
            prepared=prepared,
        )
