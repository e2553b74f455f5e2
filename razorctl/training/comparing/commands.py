"""The command line of each run of a grid, with the settings of baselines."""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.job import BY_ROWS, Job
from razorctl.errors import UsageError
from razorctl.memory.trace_cache import Cache, Trace
from razorctl.planning.cached_traces import cached_trace, job_facts
from razorctl.planning.plan import FLAGS
from razorctl.training.comparing.comparison import ACCUMULATING, BASELINES, recipe_by_name
from razorctl.training.comparing.variants import GridRow

if TYPE_CHECKING:
    import torch


class Commands:
    """The command lines of the runs of one job by several rows.

    config: the file of the shared settings. recipes: row name -> recipe. resolved: the job of
    `full`. Raises UsageError for a value of a row that no run can have.
    """

    def __init__(
        self, job: Job, rows: Sequence[GridRow], ratio: float, device: str | None, config: Path
    ) -> None:
        self.job, self.ratio, self.device, self.config = job, ratio, device, config
        self._facts = job_facts(job)
        self.resolved = self._resolved(job)
        self.recipes = {
            row.name: recipe_by_name(row.method, dict(row.values).get("ratio", ratio))
            for row in rows
        }
        for row in rows:
            self._resolved(self._of_row(row))
        self._cache = Cache()

    def _of_row(self, row: GridRow) -> Job:
        names = {field.name for field in fields(Job)}
        values: dict[str, Any] = {n: value for n, value in row.values if n in names}
        return replace(self.job, **values)

    def _resolved(self, job: Job) -> Job:
        return job.resolved(self._facts["defaults"], self._facts["train_examples"])

    def of_run(self, row: GridRow, seed: int, out: Path) -> list[str]:
        """The command line of a run; raises UsageError if the model cannot run a baseline."""
        method, recipe, job = row.method, self.recipes[row.name], self._of_row(row)
        settings: dict[str, Any] = {"method": recipe.method, "attention": recipe.attention}
        settings |= {"seed": seed, "strict": True, **BASELINES.get(method, {})}
        if method in ACCUMULATING:
            usual = ACCUMULATING[self.resolved.task == "embedding"]
            if method != usual:
                raise UsageError(
                    f"{method} does not suit {self.resolved.task}, since negatives are of a whole "
                    f"batch there or of none; compare {usual}."
                )
            settings["accumulate"] = self._micro_batches(job)
        settings |= {**dict(row.values), "device": self.device}
        if BY_ROWS in self._facts["defaults"] and self.job.patience is None:
            settings["patience"] = 0  # runs of equally many steps are compared
        if method == "full-flash" and self._trace(job, job.accumulate, "full").fused:
            raise UsageError(
                f"{self.job.model} has fused attention already, so full-flash is the same as full; "
                "leave full-flash out."
            )
        words = [sys.executable, "-m", "razorctl", "--config", str(self.config), "finetune"]
        for name, value in settings.items():
            flag = f"--{FLAGS.get(name, name.replace('_', '-'))}"
            if value is True:
                words.append(flag)
            elif value is not None:
                words += [flag, str(value)]
        return [*words, "--json", "--out", str(out)]

    def _micro_batches(self, job: Job) -> int:
        """The fewest micro-batches with which the traced peak of `full` is at most razor's.

        Raises UsageError if no number is enough.
        """
        batch = self._resolved(job).batch_size
        assert batch is not None
        most = self._peak(job, job.accumulate, "razor")
        for count in range(job.accumulate, batch + 1):
            if batch % count == 0 and self._peak(job, count, "full") <= most:
                return count
        raise UsageError(
            f"accumulating over {units.count(batch, 'micro-batch')} still takes more than razor; "
            f"leave {ACCUMULATING[job.task == 'embedding']} out."
        )

    def _peak(self, job: Job, accumulate: int, method: str) -> int:
        return self._trace(job, accumulate, method).on(self._place.type)

    def _trace(self, job: Job, accumulate: int, method: str) -> Trace:
        from razorctl import step  # imports torch

        precision = step.precision(job, self._place)
        job = replace(self._resolved(job), precision=precision, accumulate=accumulate)
        recipe = recipe_by_name(method, self.ratio)
        return cached_trace(job, recipe, self._facts["classes"], self._cache, self._place.type)

    @property
    def _place(self) -> "torch.device":
        from razorctl.system import devices

        return devices.find(self.device)
