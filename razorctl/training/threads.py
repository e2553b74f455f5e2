"""The threads of a run on a CPU: fewer than its cores if other processes keep some of these busy.

Threads wait for each other at the end of every operation, so one that shares its core delays all.
The bits of the weights depend on the number of threads. So a trial, which changes nothing else,
settles it before the first step of a run for all its steps.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from razorctl.training import run_files
from razorctl.units import count, duration

if TYPE_CHECKING:
    from razorctl.training.run import Run

BUSY = 0.8  # cores that other processes keep busy before a trial may pay off
TIMED = 3  # passes by each number, after a warm-up
LEAST = 80  # micro-batches of a run before a trial is at most a tenth of it
STAT = Path("/proc/stat")  # on Linux; elsewhere there is no trial
WORKING = (0, 1, 2, 5, 6, 7)  # columns there: user, nice, system, irq, softirq, steal
CHOSEN = ("OMP_", "MKL_NUM_THREADS")  # variables by which a user, or torchrun, sets the number


class Threads:
    """Inside the block, `settle` sets the number of torch's threads for a run."""

    def __enter__(self) -> Self:
        self._began, self._before = _used(), 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            import torch

            torch.set_num_threads(self._before)

    @property
    def others(self) -> float:
        """The cores that other processes have kept busy since the block began."""
        seconds, own, total = (new - old for old, new in zip(self._began, _used(), strict=True))
        return max(0.0, total - own) / seconds

    def settle(self, run: "Run", progress: Callable[[str], None]) -> None:
        """Sets the number for a run before its first step here; a note says if it is lowered.

        A resumed run has the number that it was begun with. A new one has all threads, or fewer
        that leave busy cores to other processes if its passes are faster so.
        """
        import torch

        most, busy = torch.get_num_threads(), self.others
        settled = any(name.startswith(CHOSEN) for name in os.environ)
        if settled or run.device.type != "cpu" or run.job.processes > 1:
            return
        self._before = most
        begun = run_files.read_threads(run.out)
        if begun is not None:
            torch.set_num_threads(min(begun, most))
            why = "as it was begun"
        elif most > 1 and busy >= BUSY and _long(run):
            fewer = max(1, min(most - 1, most - round(busy)))
            progress(f"other processes keep {busy:.1f} cores busy; trying fewer threads")
            seconds = time_passes(run, (most, fewer))
            torch.set_num_threads(min(seconds, key=seconds.__getitem__))
            why = (
                f"as other processes keep {busy:.1f} cores busy: passes of a micro-batch take "
                f"{duration(seconds[fewer])} instead of {duration(seconds[most])}"
            )
        if torch.get_num_threads() < most:
            taken = f"{torch.get_num_threads()} of {count(most, 'thread')}"
            run.notes = (*run.notes, f"the run takes {taken}, {why}; OMP_NUM_THREADS sets it.")


def _used() -> tuple[float, float, float]:
    """Seconds of a clock, of this process with ended children, and of all on its cores."""
    own = sum(os.times()[:4])
    try:
        lines = STAT.read_text("ascii").splitlines()
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return time.monotonic(), own, own
    ticks = [line.split()[1:] for line in lines if line.split()[0] in cores]
    used = sum(int(core[column]) for core in ticks for column in WORKING)
    return time.monotonic(), own, used / os.sysconf("SC_CLK_TCK")


def _long(run: "Run") -> bool:
    """Whether a trial is a small part of a run."""
    assert run.job.steps is not None
    return run.job.steps * run.job.accumulate >= LEAST


def time_passes(run: "Run", numbers: Sequence[int]) -> dict[int, float]:
    """Seconds of the passes of a micro-batch by each number of threads, measured in turn.

    Of the run, only the number of threads changes; its model has no optimizer yet.
    """
    import torch

    from razorctl.step import by_logits, forward_backward
    from razorctl.training import state

    before = state.transient(run.model)
    losses = by_logits(run.logits, run.job, run.class_weights)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    rows = next(next(run.feed.loading.batches()))
    batch = *run.feed.trained(rows), run.feed.total([rows])
    seconds = dict.fromkeys(numbers, 0.0)
    run.model.train()
    for turn in range(1 + TIMED):
        for number in numbers:
            torch.set_num_threads(number)
            start = time.perf_counter()
            forward_backward(run.model, losses, batch, run.job, scaler)
            if turn > 0:  # the first one is a warm-up
                seconds[number] += (time.perf_counter() - start) / TIMED
            run.model.zero_grad()
    state.load_transient(run.model, before)
    return seconds
