"""The model of a finished run, as its own library loads it."""

import errno
import logging
import math
import os
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import nn

from razorctl import documents, models, units
from razorctl.errors import RazorError
from razorctl.surgery import adapters
from razorctl.surgery.sparsify import restore
from razorctl.training import checkpoints, state, tensors
from razorctl.training.checkpoints import Checkpoint
from razorctl.training.rundir import ADAPTER, BEST, RESULT, WEIGHTS, sync, unlock, whole

if TYPE_CHECKING:
    from razorctl.training.run import Run

log = logging.getLogger(__name__)

Save = Callable[[nn.Module, Path], object]  # writes a stock model to a folder


def finished(run: "Run") -> None:
    """Writes the weights of a finished run, then its result, and gives its directory free.

    Raises RazorError if the disk does not take them.
    """
    out, job, best_one = run.out, run.job, run.best()
    save = partial(_save, models.find(job.model, job.task), run.classes, job.input_size)
    try:
        assert run.metrics is not None
        run.check_own()
        run.metrics.close()
        if best_one is not None and not best(run.model, save, best_one, out):
            run.checkpoints.drop(best_one)
        last(run.model, save, out)
        there = (name for name in (WEIGHTS, BEST) if (out / name).exists())
        run.checksums = {name: documents.entry(out / name) for name in there}
        run.check_own()
        with whole(out / RESULT) as file:
            file.write_text(documents.text(run.result(), indent=2) + "\n")
    except OSError as error:
        newest, needed = run.checkpoints.newest, 2 * tensors.size(run.model.state_dict())
        room = units.size(needed, math.ceil)
        saved = f"step {newest.step:,} of {job.steps:,}" if newest else "no step"
        raise RazorError(
            f"the weights cannot be written ({error.strerror}), and {saved} is saved; free "
            f"{room} on the disk of {out}, then go on with `{run.command}`."
        ) from None
    if not job.keep_checkpoints:
        checkpoints.clear(out)
    if run.lock is not None:
        unlock(out, run.lock)


def _save(
    family: models.Model,
    classes: tuple[str, ...],
    input_size: int | None,
    model: nn.Module,
    folder: Path,
) -> None:
    family.save(model, classes, input_size, folder)


def last(model: nn.Module, save: Save, out: Path) -> None:
    """Restores a sparsified model and saves it in `out`, its adapters first, if it has some.

    Raises OSError if they cannot be written.
    """
    if adapters.attached(model):
        _write(lambda folder: adapters.save(model, folder), (out / ADAPTER).parent)
    restore(model)
    _write(lambda folder: save(model, folder), out)


def best(model: nn.Module, save: Save, found: Checkpoint, out: Path) -> bool:
    """Saves a sparsified model, which stays as it is, with the weights in a checkpoint.

    Returns False, after a warning, if the checkpoint is damaged. Raises OSError if they cannot be
    written.
    """
    if not found.intact:
        log.warning("%s is damaged; the best weights of this run are the last ones.", found.path)
        return False
    model = deepcopy(model)
    state.load_model(found.path, model)
    restore(model)
    _write(lambda folder: save(model, folder), (out / BEST).parent)
    return True


def _write(save: Callable[[Path], object], folder: Path) -> None:
    """Moves what `save` writes to a folder, file by file; the weights are the last."""
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix=".saving-", dir=folder) as made:
        try:
            save(Path(made))
        except SafetensorError as error:  # that of a full disk, too
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code)) from error
        files = sorted(Path(made).iterdir(), key=lambda file: (file.name == WEIGHTS, file.name))
        for file in files:
            with whole(folder / file.name) as partial:
                file.replace(partial)
    sync(folder)
