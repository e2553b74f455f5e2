"""A run before its first step: its data are loaded, and its model is built and sparsified."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from razorctl import data, models, processes, units
from razorctl.data.own.stream import row_count
from razorctl.defaults import ByRows
from razorctl.errors import UsageError
from razorctl.job import BY_ROWS, Job
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes, traced_bytes_by_module
from razorctl.optimizer import cast_weights
from razorctl.recipe import Recipe
from razorctl.step import precision
from razorctl.surgery.byte_budget import LEAST, sparsify_within, uncompressed
from razorctl.surgery.sparsify import restore
from razorctl.training import run_files, space, state
from razorctl.training.checkpoints import Checkpoints
from razorctl.training.evaluation import TOP
from razorctl.training.feed import Feed, sequenced
from razorctl.training.loading import PRIME
from razorctl.training.precompiled import precompile
from razorctl.training.record import Record
from razorctl.training.recovery import Recovery


class PreparedRun(Record):
    """A run with its data and its model; the job is resolved.

    split_document: what the run directory says of the rows; None of streams.
    """

    split_document: dict[str, Any] | None

    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        out: Path,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        progress(f"loading {job.dataset}")
        family, source = data.pair(job)
        splits = sequenced(source.load(progress), family, job, progress)
        self.split_document = run_files.split_document(splits)
        self.skipped, self.notes, self.classes = splits.skipped, splits.notes, splits.classes
        if job.from_scratch:
            self.notes = (*self.notes, models.FROM_SCRATCH.format(model=job.model))
        # By their absolute paths, so that the run can be resumed from any directory.
        job = replace(job, model=models.place(job.model), dataset=data.place(job.dataset))
        job = replace(job, precision=precision(job, device))
        by_rows = family.defaults.get(BY_ROWS) or ByRows(source.task, source.modality)
        rows = row_count(splits.train)
        self.usual_epochs = None if rows is None else by_rows.epochs(rows)
        self.job = job = job.resolved(family.defaults, rows)
        assert job.metric is not None
        self.metric = job.metric
        if self.metric == "top5_accuracy" and len(self.classes) <= TOP:
            raise UsageError(
                f"{job.dataset} has {units.count(len(self.classes), 'class')}, too few for "
                "top5_accuracy; choose another --metric."
            )
        self.checkpoints = Checkpoints(out)
        relieved: list[dict[str, Any]] = []
        if self.checkpoints.newest is not None:
            self.checkpoints.newest.refuse_others(out, job, recipe)
            relieved = self.checkpoints.newest.marker["relieved"]
        self.recovery = Recovery(job, recipe, relieved)
        self._build(family, splits, progress)

    def _build(
        self, family: models.Model, splits: data.Splits, progress: Callable[[str], None]
    ) -> None:
        job = self.job
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
        self._forward = JobForward(family, job)
        inputs = self._forward.inputs(self.model, self.device)
        self.full_saved_bytes = traced_bytes(self.model, inputs, **self._forward.options)
        self.sparsify(self.recovery.recipe)
        if processes.first():  # the others find in Triton's cache what it compiles
            precompile(job, self.recovery.recipe, len(self.classes), self.device, progress)
            space.check_space(self.out, self.model, job, self.checkpoints)
        else:
            state.seed(job.seed + processes.rank() * PRIME)  # other dropout than in the first

    def sparsify(self, recipe: Recipe) -> None:
        """Sparsifies the model, again if a step ran out of memory, and traces what it keeps."""
        restore(self.model)
        inputs, options = self._forward.inputs(self.model, self.device), self._forward.options
        full = self.full_saved_bytes
        self.pruned = sparsify_within(self.model, recipe, inputs, **options, full=full)
        parts = traced_bytes_by_module(self.model, inputs, **options)
        self.saved_bytes = sum(parts.values())
        self.stock = uncompressed(self.model, parts, full, LEAST * full) if recipe.prunes else ""
