"""The end of a run: its model is tested and written as its library loads it, and summed up."""

import errno
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from safetensors import SafetensorError
from torch import nn

from razorctl import models, units
from razorctl.errors import RazorError
from razorctl.surgery import adapters
from razorctl.surgery.sparsify import restore
from razorctl.system import devices, documents, processes
from razorctl.system.atomic import atomic_file, scratch, sync
from razorctl.training import checkpoints, parallel, state, tensors
from razorctl.training.checkpoints import Checkpoint
from razorctl.training.preparation import PreparedRun
from razorctl.training.rundir import ADAPTER, LAST, METRICS, RESULT, SPLIT, WEIGHTS, unlock

log = logging.getLogger(__name__)

Save = Callable[[nn.Module, Path], object]  # writes a stock model to a folder


def finish(run: PreparedRun, unsharded: nn.Module | None) -> None:
    """Tests and writes the weights, then the result. Collective.

    unsharded: the copy for `parallel.gathered`. Raises RazorError if files cannot be written.
    """
    best = _undamaged(run, run.best())
    if run.feed.test is not None:
        tested = run.evaluation(run.feed.test)
        run.tested, run.by_class = tested.figures, tested.by_class_document
    run.best_figures = _figures_of(run, best)
    if run.peak_bytes is not None:
        run.peak_bytes = processes.most(run.peak_bytes, run.device)
    run.model = parallel.gathered(run.model, unsharded)
    processes.of_first(partial(write_finished, run))


def _undamaged(run: PreparedRun, best: Checkpoint | None) -> Checkpoint | None:
    """The best checkpoint; None, after a warning, if it is damaged. Collective."""
    if best is None or processes.of_first(lambda: best.intact):
        return best
    log.warning("%s is damaged; the best weights of this run are the last ones.", best.path)
    run.checkpoints.valid.remove(best)
    run.by_class = None  # of the damaged checkpoint
    return None


def _figures_of(run: PreparedRun, best: Checkpoint | None) -> Mapping[str, float]:
    """The figures of the best weights on the split of the result; None: of the last weights.

    Sets `run.by_class` to the figures of the same weights.
    """
    if best is None:
        return run.tested or run.history[-1].metrics or {}
    if run.feed.test is None:
        return run.history[best.step - 1].metrics or {}
    last = parallel.full_tensors(run.model.state_dict())
    last = {name: value.to("cpu", copy=True) for name, value in last.items()}
    state.load_model(best.path, run.model)
    tested = run.evaluation(run.feed.test)
    run.by_class = tested.by_class_document
    parallel.put(last, run.model)
    return tested.figures


def write_finished(run: PreparedRun) -> None:
    """Writes the weights of a finished run, then its result, and unlocks its directory.

    Raises RazorError if files cannot be written.
    """
    out, job, best = run.out, run.job, run.best()
    family = models.of_job(job)

    def save(model: nn.Module, folder: Path) -> None:
        family.save(model, run.classes, job.input_size, folder)

    files = [out / name for name in (METRICS, SPLIT)]
    try:
        assert run.metrics is not None
        run.check_directory()
        run.metrics.close()
        standard = run.feed.standard
        if best is not None:
            last = deepcopy(run.model)
            standard.fold(last)
            files += export(last, save, (out / LAST).parent)
            run.model.load_state_dict(tensors.read(best.path / state.MODEL))
        standard.fold(run.model)
        files += export(run.model, save, out)
        run.checksums = {
            file.relative_to(out).as_posix(): documents.size_and_checksum(file) for file in files
        }
        run.check_directory()
        with atomic_file(out / RESULT, replace=True) as file:
            file.write_text(documents.text(summary_of(run), indent=2) + "\n")
    except OSError as error:
        newest, needed = run.checkpoints.newest, 2 * tensors.nbytes(run.model.state_dict())
        room = units.size(needed, math.ceil)
        saved = f"step {newest.step:,} of {job.steps:,}" if newest else "no step"
        raise RazorError(
            f"the weights cannot be written ({error.strerror}), and {saved} is saved; free "
            f"{room} on the disk of {out}, then continue with `{run.command}`."
        ) from None
    if not job.keep_checkpoints:
        checkpoints.clear(out)
    if run.lock is not None:
        unlock(out, run.lock)


def export(model: nn.Module, save: Save, folder: Path) -> list[Path]:
    """Saves the adapters of a sparsified model, if any, then the restored model, in a folder.

    Returns the files. Raises OSError if one cannot be written.
    """
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    if adapters.attached(model):
        written += _write(partial(adapters.save, model), (folder / ADAPTER).parent)
    restore(model)
    return written + _write(partial(save, model), folder)


def _write(save: Callable[[Path], object], folder: Path) -> list[Path]:
    """Moves the files of `save` into a folder, the weights last, and returns them."""
    folder.mkdir(exist_ok=True)
    with scratch(folder) as temporary:
        try:
            save(temporary)
        except SafetensorError as error:  # also for a full disk
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        every = (file.relative_to(temporary) for file in temporary.rglob("*") if file.is_file())
        files = sorted(every, key=lambda file: (file.name == WEIGHTS, file))
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            with atomic_file(folder / file, replace=True) as target:
                (temporary / file).replace(target)
    sync(folder)
    return [folder / file for file in files]


def summary_of(run: PreparedRun) -> dict[str, Any]:
    """The summary of a run under the stable keys of `finetune --json`.

    `epoch_seconds` and `step_seconds` are without the time of compiling, which `payoff` has, and of
    compiled steps if there are any. Bytes are of one process.
    """
    last, payoff, best = run.history[-1], run.trial.payoff, run.best()
    seconds = [step.seconds for step in run.history]
    per_epoch, compiling = run.steps_per_epoch, run.trial.compile_seconds / len(seconds)
    document = {
        "run_dir": str(run.out),
        "model": run.job.model,
        "dataset": run.job.dataset,
        "classes": list(run.classes),
        "recipe": asdict(run.recipe),
        "job": asdict(run.job),
        "steps": len(run.history),
        "stopped_early": run.stopped_early,
        "out_of_memory": run.recovery.relieved,
        "metric": run.metric,
        **_scores(run),
        "saved_bytes": run.saved_bytes,
        "full_saved_bytes": run.full_saved_bytes,
        "peak_bytes": run.peak_bytes,
        "step_seconds": median(run.trial.steady or seconds),
        "epoch_seconds": (fmean(seconds) - compiling) * per_epoch,
        "device": devices.name(run.device),
        "weights": str(run.out / (LAST if best else WEIGHTS)),
        "best_step": best.step if best else last.step,
        "best_accuracy": run.history[best.step - 1].accuracy if best else last.accuracy,
        "best_weights": str(run.out / WEIGHTS),
        "best_metrics": dict(run.best_figures),
        "by_class": run.by_class,
        "predicted": run.predicted,
        "compiled": run.trial.done,
        "payoff": payoff and asdict(payoff),
        "checksums": run.checksums,
    }
    return documents.sealed(document)


def _scores(run: PreparedRun) -> dict[str, Any]:
    """The figures of the last weights: of the test split if there is one, else of the validation.

    With both splits there are also the accuracy and the loss of the validation.
    """
    last = run.history[-1]
    figures, split = last.metrics or {}, run.feed.split
    validation = {}
    if run.tested is not None:
        validation = {"validation_accuracy": last.accuracy, "validation_loss": last.test_loss}
        figures, split = run.tested, "test"
    scores = {"accuracy": figures.get("accuracy"), "loss": figures["loss"], "split": split}
    return scores | {"metrics": dict(figures)} | validation
