"""finetune: one training loop for every registered model and data set."""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from razorctl import data, devices, models, processes, units
from razorctl.data.own.stream import count
from razorctl.defaults import ByRows
from razorctl.errors import DivergedError, RazorError, UsageError
from razorctl.job import BY_ROWS, Job
from razorctl.optimizer import cast_weights, check_library
from razorctl.recipe import Recipe
from razorctl.step import precision
from razorctl.surgery.byte_budget import LEAST, uncompressed
from razorctl.surgery.of_job import OfJob
from razorctl.surgery.sparsify import restore
from razorctl.training import atomic, export, parallel, run_files, rundir, space, state, summary
from razorctl.training.checkpoints import Checkpoint, Checkpoints
from razorctl.training.compiled import refuse_uncompilable
from razorctl.training.evaluation import TOP
from razorctl.training.feed import Feed, sequenced
from razorctl.training.learner import Learner
from razorctl.training.loading import PRIME
from razorctl.training.metrics import Metrics, Step
from razorctl.training.precompiled import precompile
from razorctl.training.record import Record
from razorctl.training.recovery import Recovery
from razorctl.version import __version__

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)

Settle = Callable[["Run", models.Progress], object]


class Run(Record, Iterator[Step]):
    """A fine-tuning run: the constructor prepares it, iteration trains, `result` sums it up.

    A run whose directory has a checkpoint goes on from there.
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
        settle: Settle = lambda *_: None,
    ) -> None:
        """lock: held for the run directory, until the run is finished. command: what resumes it.

        settle: as of `finetune`.
        """
        self.recipe, self.out, self.device = recipe, out, device
        self.lock, self.command = lock, command
        self.held = None if lock is None else rundir.identity(out)
        self.predicted = None if plan is None else plan["chosen"]["predicted"]
        if plan is not None and device.type == "cuda":
            devices.hold_to(plan["budget_bytes"] - plan["context_bytes"], device)
        self.stop: Callable[[], BaseException | None] = lambda: None
        with processes.together():
            splits = self._prepare(job, progress)
            settle(self, progress)
        self._unsharded = parallel.unsharded(self.model, self.job)
        found = self.checkpoints.newest
        if len({known and known.step for known in processes.every(found)}) > 1:
            raise UsageError(f"not all machines see {out}; name a directory that they share.")

        self.learner = Learner(self.model, self.job, self.logits, device)
        self.learner.parts = self.recovery.relief.parts
        self.trial = self.learner.trial
        self.history: list[Step] = []
        self.tested: Mapping[str, float] | None = None
        self.best_figures: Mapping[str, float] = {}
        self.checksums: dict[str, dict[str, int]] = {}
        self.peak_bytes: int | None = None
        if found is not None:
            self._go_on(self.learner.load(found.path))
        self._steps, self._between = self._train(), False
        with processes.together():
            self.metrics = None
            if processes.first():
                place = devices.name(device), torch.get_num_threads()
                with atomic.writing(out):
                    self.metrics = Metrics(out, self.history)
                    run_files.write_settings(
                        out, self.job, recipe, *place, plan, run_files.split_document(splits)
                    )

    def _prepare(self, job: Job, progress: Callable[[str], None]) -> data.Splits:
        """Loads the data and builds the model as the recipe says."""
        progress(f"loading {job.dataset}")
        family, source = data.pair(job)
        splits = sequenced(source.load(progress), family, job, progress)
        self.skipped, self.notes, self.classes = splits.skipped, splits.notes, splits.classes
        if job.from_scratch:
            self.notes = (*self.notes, models.FROM_SCRATCH.format(model=job.model))
        # By their absolute paths, so that the run can be resumed from any directory.
        job = replace(job, model=models.place(job.model), dataset=data.place(job.dataset))
        job = replace(job, precision=precision(job, self.device))
        by_rows = family.defaults.get(BY_ROWS) or ByRows(source.task, source.modality)
        rows = count(splits.train)
        self.usual_epochs = None if rows is None else by_rows.epochs(rows)
        self.job = job = job.resolved(family.defaults, rows)
        assert job.metric is not None
        self.metric = job.metric
        if self.metric == "top5_accuracy" and len(self.classes) <= TOP:
            raise UsageError(
                f"{job.dataset} has {units.count(len(self.classes), 'class')}, too few for "
                "top5_accuracy; choose another --metric."
            )
        self.checkpoints = Checkpoints(self.out)
        relieved: list[dict[str, Any]] = []
        if self.checkpoints.newest is not None:
            self.checkpoints.newest.refuse_others(self.out, job, self.recipe)
            relieved = self.checkpoints.newest.marker["relieved"]
        self.recovery = Recovery(job, self.recipe, relieved)

        progress(f"building {job.model}")
        state.seed(job.seed)
        build = family.bare if job.from_scratch else family.build
        with nullcontext() if self.checkpoints.newest is None else models.told_before():
            self.model = build(len(splits.classes), job.input_size)
        cast_weights(self.model, job)
        self.model.to(self.device)
        self.logits = family.logits
        self.feed = Feed(self.model, job, family, splits, self.device)
        progress("tracing what a step keeps")
        # The largest micro-batch, so that no step keeps more than is traced by it.
        self._of_job = OfJob(family, job)
        inputs = self._of_job.inputs(self.model, self.device)
        self.full_saved_bytes = self._of_job.saved_bytes(self.model, inputs)
        self._sparsify(self.recovery.recipe)
        if processes.first():  # the others find in Triton's cache what it compiles
            precompile(job, self.recovery.recipe, len(self.classes), self.device, progress)
            space.check_space(self.out, self.model, job, self.checkpoints)
        else:
            state.seed(job.seed + processes.rank() * PRIME)  # other dropout than in the first
        return splits

    def _sparsify(self, recipe: Recipe) -> None:
        restore(self.model)  # after a step out of memory it is sparsified already
        inputs = self._of_job.inputs(self.model, self.device)
        self.pruned = self._of_job.sparsify(self.model, recipe, inputs, self.full_saved_bytes)
        parts, full = self._of_job.saved_by_module(self.model, inputs), self.full_saved_bytes
        self.saved_bytes = sum(parts.values())
        self.stock = uncompressed(self.model, parts, full, LEAST * full) if recipe.prunes else ""

    def _go_on(self, known: Mapping[str, Any]) -> None:
        """Takes what the state of a checkpoint says of the run before it."""
        facts = self.feed.facts
        if known["data"].get("digests") is None:  # in a checkpoint of an older razorctl
            facts = {name: value for name, value in facts.items() if name != "digests"}
        if {name: known["data"].get(name) for name in facts} != facts:
            raise UsageError(
                f"{self.job.dataset} has changed since {self.out} was begun; undo that, or name "
                "another directory with --out."
            )
        self.history = [Step(**step) for step in known["history"]]
        self.peak_bytes, self.feed.loading.begun = known["peak_bytes"], tuple(known["begun"])

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Lets others train in the directory; the garbage collector may take its time."""
        if self.lock is not None:
            self.lock.release()

    def _train(self) -> Iterator[Step]:
        assert self.job.steps is not None
        self.learner.begin()
        batches = self.feed.loading.batches(len(self.history))
        for step in range(len(self.history) + 1, self.job.steps + 1):
            if self.stopped_early:
                break
            try:
                taken = self._step(step, batches)
            except DivergedError as error:
                saved = self.save(diverged=True)
                raise self._diverged(error, step, saved) from None
            except Exception:  # memory that does not suffice, or an image that cannot be read
                if not self.learner.torn and self.job.processes == 1:
                    self.save()
                raise
            self.history.append(taken)
            if self.job.processes == 1:
                self.check_own()
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
        export.finish(self, self._unsharded)

    def rescue(self) -> None:
        """Saves the run if what goes over its steps has failed between two of them."""
        if self._between and self.job.processes == 1:
            self.save()
        self._release()

    def _stopped(self) -> BaseException | None:
        """What `stop` returns in any process. Collective."""
        stop = self.stop()
        if not processes.most(stop is not None, self.device):
            return None
        return next(found for found in processes.every(stop) if found is not None)

    def _step(self, step: int, batches: Iterator[Iterable[Any]]) -> Step:
        """Takes a step, and evaluates if that is due."""
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
            epoch=self.steps_per_epoch and step / self.steps_per_epoch,
            learning_rate=rate,
            seconds=seconds,
            samples_per_second=self.job.batch_size / seconds,
            loss=loss.item(),
            grad_norm=norm.item(),
        )
        try:
            figures = self.evaluate() if due else {}
        except Exception:
            self.history.append(taken)  # the weights are those after it
            raise
        accuracy, test_loss = figures.get("accuracy"), figures.get("loss")
        return replace(taken, accuracy=accuracy, test_loss=test_loss, metrics=figures or None)

    def _take(self, step: int, micro_batches: Iterator[Any]) -> tuple[Tensor, Tensor]:
        """`Learner.step`, again and with less memory if it runs out of it."""
        read = [] if self.job.classifies else list(micro_batches)
        total = self.feed.total(read)

        def rows() -> Iterator[Any]:
            yield from list(read)
            for batch in micro_batches:
                read.append(batch)
                yield batch

        while True:
            try:
                return self.learner.step(map(self.feed.trained, rows()), total)
            except torch.OutOfMemoryError:
                if self.learner.torn or not self.recovery.relieve(step, self._sparsify):
                    raise
            self.learner.parts = self.recovery.relief.parts
            # Only now, since the error held what its frames held.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _due(self, taken: Step) -> bool:
        """Whether the step that was just taken is saved."""
        every, score = self.job.save_every, taken.score(self.metric)
        scores = [found for s in self.history if (found := s.score(self.metric)) is not None]
        best = score is not None and score == max(scores)
        if taken.step == self.job.steps or best or self.stopped_early:
            return True
        return score is not None if every is None else taken.step % every == 0

    def save(self, diverged: bool = False) -> bool:
        """Saves the run as it is between two steps; call it after any step, if a checkpoint is due.

        diverged: the next step cannot be taken, so the run may go on with a lower learning rate.
        If the disk takes no checkpoint, that is a warning: returns whether the run is saved.
        Collective.
        """
        done, newest = len(self.history), self.checkpoints.newest
        if newest is None or newest.step != done:
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
                "begun": self.feed.loading.begun,
                "peak_bytes": self.peak_bytes,
            }
            write = partial(state.write, model=model, state=rest)
            save = partial(self.checkpoints.save, marker, write)
        elif diverged:
            save = partial(self.checkpoints.mark, newest, diverged=True)
        else:
            return True
        saved, self.checkpoints.valid = processes.of_first(partial(self._try, save))
        return saved

    def _try(self, save: Callable[[], None]) -> tuple[bool, list[Checkpoint]]:
        """Whether `save` could write, and the checkpoints that are valid then."""
        self.check_own()
        newest = self.checkpoints.newest
        try:
            save()
        except OSError as error:
            kept = f"step {newest.step:,} stays saved" if newest else "no step is saved yet"
            step = f"{len(self.history):,}"
            log.warning("step %s is not saved (%s); %s.", step, error.strerror, kept)
            return False, self.checkpoints.valid
        return True, self.checkpoints.valid

    def result(self) -> dict[str, Any]:
        """The summary of a finished run, as in `summary.of`."""
        return summary.of(self)

    def _note_peak(self) -> None:
        if (peak := devices.peak(self.device)) is not None:
            self.peak_bytes = max(peak, self.peak_bytes or 0)

    def _diverged(self, error: DivergedError, step: int, saved: bool) -> RazorError:
        assert self.job.learning_rate is not None
        kept = f"step {step - 1:,} is {'' if saved else 'not '}saved"
        return RazorError(
            f"{error} at step {step:,}, and {kept}; lower --lr, such as with "
            f"`{self.command} --lr {self.job.learning_rate / 2:g}`."
        )


def finetune(
    job: Job,
    recipe: Recipe | None = None,
    *,
    out: Path | str | None = None,
    device: torch.device | str | None = None,
    plan: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    resume: bool = False,
    settle: Settle = lambda *_: None,
) -> Run:
    """Prepares and returns a run of `job` with `recipe`: iterate to train, then call `result`.

    out: the run directory to make; it must not exist. None is a new one under runs/.
    device: None is CUDA if available, else the CPU.
    plan: the document of the plan that `job` and `recipe` come from. Its budget limits what CUDA
        may allocate, and the result has its prediction.
    progress: called with the name of each stage of the preparation.
    resume: go on from the newest valid checkpoint in `out`; without one, start at the beginning.
    settle: called with the run and `progress` when data and model are there, before the optimizer.
    Raises RazorError, and leaves no directory behind, if the run cannot be prepared. With `resume`
    that includes a finished run, and a checkpoint of other settings.
    """
    recipe, place = recipe or Recipe(), devices.find(device)
    processes.check(job.processes)
    check_library(job)
    refuse_uncompilable(job, recipe, place)
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
        return Run(job, recipe, out, place, plan, progress, lock, command, settle)
