"""A run before its first step: its data are loaded, and its model is built and sparsified."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from razorctl import data, models, units
from razorctl.config.defaults import ByRows
from razorctl.config.job import BY_ROWS, Job
from razorctl.config.recipe import Recipe
from razorctl.data.own import text_lengths
from razorctl.errors import DataError, RazorError, UsageError
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.models import kept_head
from razorctl.models.joined_texts import keeps_apart
from razorctl.optimizer import cast_weights
from razorctl.planning.job_trace import blueprint
from razorctl.step import ByLogits, autocast, precision
from razorctl.surgery import freezing
from razorctl.surgery.byte_budget import full_step, within
from razorctl.surgery.excess import LEAST, uncompressed
from razorctl.surgery.sparsify import restore, sparsified
from razorctl.system import processes
from razorctl.training import cuda_graphs, run_files, rundir, space, state
from razorctl.training.checkpoints import Checkpoint, Checkpoints
from razorctl.training.class_counts import class_counts, class_weights, rare_classes
from razorctl.training.compiled import Trial
from razorctl.training.evaluation import TOP, Evaluation, evaluate
from razorctl.training.feed import Feed, cut_texts, sequenced
from razorctl.training.loading import PRIME, moved
from razorctl.training.metrics import Metrics, Step, waited
from razorctl.training.precompiled import precompile
from razorctl.training.recovery import Recovery
from razorctl.training.shown_rows import shown

TOKENS = 8  # tokens of a text that a model is tried on

if TYPE_CHECKING:
    from filelock import BaseFileLock


class PreparedRun:
    """A run with its data and its model, for its summary and its trackers.

    The job is resolved.
    command: the command that resumes the run. held: the identity of its directory under `lock`.
    metric: the figure that chooses the best weights.
    usual_epochs: the default for this number of rows.
    split_document, pretrained_document: the documents of the rows, and of the files of the
        pretrained model, in the run directory.
    saved_bytes, full_saved_bytes: bytes that this run and full fine-tuning store for backward.
    stock: a sentence on stock layers that store a large share; "" without such layers.
    packing: the gain of joined texts; None for texts that the model cannot keep apart.
    sample: a conversation as the model reads it; None for other rows.
    shown: returns the first training rows as text.
    history: the steps so far, also before the run was resumed.
    tested: figures of the last weights on the test split; None if `history` has them.
    best_figures: figures of the best weights. by_class: figures of each class, a JSON value.
    class_weights: the weight of a label of each class, on the device; None if all are the same.
    checksums: of the files of a finished run.
    """

    command: str
    lock: "BaseFileLock | None"
    held: Any
    predicted: dict[str, Any] | None
    model: nn.Module
    logits: Callable[[nn.Module, Any], Tensor]
    losses: ByLogits
    trial: Trial
    metrics: Metrics | None

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.history: list[Step] = []
        self.tested: Mapping[str, float] | None = None
        self.best_figures: Mapping[str, float] = {}
        self.by_class: dict[str, Any] | None = None
        self.checksums: dict[str, dict[str, int]] = {}
        self.peak_bytes: int | None = None
        progress(f"loading {job.dataset}")
        family, source = data.pair(job)
        self.pretrained_document = None
        if processes.first():
            files = family.files(not job.from_scratch)
            self.pretrained_document = run_files.pretrained(out, models.place(job.model), files)
        splits = sequenced(source.load(progress), family.fed(job), job, progress)
        self.sample = None
        if source.conversations:
            rows: Any = splits.train
            self.sample = family.sample(rows[0])
        self.split_document = run_files.split_document(splits)
        self.skipped, self.notes, self.classes = splits.skipped, splits.notes, splits.classes
        if job.from_scratch:
            self.notes = (*self.notes, models.FROM_SCRATCH.format(model=job.model))
        # Absolute paths, so that the run can be resumed from any directory.
        job = replace(job, model=models.place(job.model), dataset=data.place(job.dataset))
        job = replace(job, precision=precision(job, device))
        by_rows = family.defaults.get(BY_ROWS) or ByRows(source.task, source.modality)
        count = len(splits.train)
        self.usual_epochs = by_rows.epochs(count)
        job = job.resolved(family.defaults, count, recipe.part)
        self.packing, asked = None, bool(job.packing)
        job, note = cuda_graphs.resolve(job, recipe, device)
        self.notes = (*self.notes, *filter(None, [note]))
        if text_lengths.has_texts_apart(job, source):
            job, self.packing = text_lengths.of_rows(splits.train, family, job).resolve(job)
        self.job = job
        assert job.metric is not None
        self.metric = job.metric
        if self.metric == "top5_accuracy" and len(self.classes) <= TOP:
            raise UsageError(
                f"{job.dataset} has {units.count(len(self.classes), 'class')}, too few for "
                "top5_accuracy; choose another --metric."
            )
        self.notes = (*self.notes, *cut_texts(splits.train, family, job))
        counts = class_counts(splits.train, len(self.classes), job, progress)
        self.notes = (*self.notes, *rare_classes(counts, self.classes, job))
        weights = class_weights(counts, self.classes, job)
        self.class_weights = None if weights is None else weights.to(device)
        self.checkpoints = Checkpoints(out)
        relieved: list[dict[str, Any]] = []
        if self.checkpoints.newest is not None:
            self.checkpoints.newest.refuse_others(out, job, recipe)
            relieved = self.checkpoints.newest.marker["relieved"]
        self.recovery = Recovery(job, recipe, relieved)
        self._build(family.fed(self.job), splits, progress, asked)

    def _build(
        self,
        family: models.Model,
        splits: data.Splits,
        progress: Callable[[str], None],
        asked: bool,
    ) -> None:
        """Builds the model; asked: whether the user wants texts to be packed."""
        job = self.job
        progress(f"building {job.model}")
        if family.unproven:
            blueprint(job, len(splits.classes))
        state.seed(job.seed)
        begun = self.checkpoints.newest is not None
        space.check_host(family, job, self.recipe, len(splits.classes))
        build, head = family.bare, None
        if not job.from_scratch:
            named = job.task not in ("regression", "embedding") and splits.classes and not begun
            build, head = family.build, kept_head.read(family.files(True)) if named else None
        with models.told_before() if begun or head else nullcontext():
            self.model = build(len(splits.classes), job.input_size)
        if head is not None:
            head.put(self.model, splits.classes, job.model)
        cast_weights(self.model, job)
        freezing.freeze_weights(self.model, job, self.recipe.part)
        self.model.to(self.device)
        self.losses = family.losses(job, self.class_weights)
        self.logits = family.logits
        self._check_output(family)
        if job.packing and not keeps_apart(self.model, self.logits):
            self.job = job = text_lengths.without_joining(job, asked)
            family = family.fed(job)
        self.feed = Feed(self.model, job, family, splits, self.device)
        self.shown = partial(shown, splits.train, family, self.model, job, splits.classes)
        if self.feed.standard.head:
            self._standardize()
        progress("tracing what a step stores")
        # For the largest micro-batch, so that no step stores more.
        self._forward = JobForward(family, job, len(splits.classes))
        inputs = self._forward.inputs(self.model, self.device)
        self._full = full_step(self.model, inputs, **self._forward.options)
        self.full_saved_bytes = self._full.bytes
        self.sparsify(self.recovery.recipe)
        if processes.first():  # the other processes read Triton's cache
            precompile(job, self.recovery.recipe, len(self.classes), self.device, progress)
            space.check_space(self.out, self.model, job, self.checkpoints)
        else:
            state.seed(job.seed + processes.rank() * PRIME)  # dropout differs by process

    def _standardize(self) -> None:
        """Standardizes the targets, if the head can learn them; see `Standard.fitted`."""
        feed, batch = self.feed, self.feed.moved(next(iter(self.feed.evaluated)))
        feed.standard = feed.standard.fitted(self.model, self.logits, batch, self.job)
        feed.facts["standard"] = [feed.standard.mean, feed.standard.deviation]

    @torch.no_grad()
    def _check_output(self, family: models.Model) -> None:
        """Raises DataError if an output of the model is not finite, as with broken weights."""
        size = TOKENS if family.modality == "text" else self.job.input_size
        example = moved(family.example(self.model, 2, size), self.device)
        with autocast(self.device, self.job):
            output = self.logits(self.model.eval(), example)
        if not output.isfinite().all():
            raise DataError(
                f"{self.job.model} has an output that is not finite before it is trained, so its "
                "weights or a setting of its config are broken; choose another model."
            )

    def sparsify(self, recipe: Recipe) -> None:
        """Sparsifies the model, or restores it and does so again, and traces its stored bytes."""
        restore(self.model)
        inputs, options = self._forward.inputs(self.model, self.device), self._forward.options
        full = self.full_saved_bytes
        parts = within(self.model, recipe, inputs, self._full, **options).parts
        self.saved_bytes, self.stock = full, ""
        if sparsified(self.model):
            parts = parts or traced_bytes_by_module(self.model, inputs, **options)
            self.saved_bytes = sum(parts.values())
            if recipe.prunes:
                self.stock = uncompressed(self.model, parts, full, LEAST * full)

    @property
    def steps_per_epoch(self) -> int:
        """The number of whole batches in the training data."""
        return self.feed.loading.steps_per_epoch

    @property
    def stopped_early(self) -> bool:
        """Whether `patience` evaluations have passed since the best one."""
        patience = self.job.patience or math.inf
        return waited(self.history, self.metric) >= patience

    def best(self) -> Checkpoint | None:
        """The best checkpoint; None if the last step is at least as good."""
        best, last = self.checkpoints.best, self.history[-1].score(self.metric)
        if best is None or best.score is None or last is None:
            return None
        return best if best.score > last else None

    def check_directory(self) -> None:
        """Raises RazorError if the run directory was moved, removed or replaced."""
        if self.lock is None or not self.lock.is_locked:
            return
        if rundir.identity(self.out) != self.held:
            newest = self.checkpoints.newest
            saved = f"step {newest.step:,} is saved in it" if newest else "no step is saved in it"
            raise RazorError(
                f"{self.out} is not the directory of this run any more: that was moved, removed or "
                f"replaced, and {saved}; put it back, then continue with `{self.command}`."
            )

    def evaluate(self, rows: DataLoader[Any] | None = None) -> dict[str, float]:
        """The figures of `evaluation`."""
        return self.evaluation(rows).figures

    def evaluation(self, rows: DataLoader[Any] | None = None) -> Evaluation:
        """The evaluation of rows.

        None is the split that is evaluated during training: validation if there is one, else test.
        """
        batches = map(self.feed.moved, self.feed.evaluated if rows is None else rows)
        logits = self.feed.standard.logits(self.logits)
        losses = replace(self.losses, logits=logits, class_weights=None)
        return evaluate(self.evaluated_model, losses, batches, self.classes)

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated."""
        return self.model
