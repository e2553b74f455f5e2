"""The model of a finished run, as its own library loads it."""

import errno
import logging
import os
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError
from torch import nn

from razorctl.surgery import adapters
from razorctl.surgery.sparsify import restore
from razorctl.training import state
from razorctl.training.checkpoints import Checkpoint
from razorctl.training.rundir import ADAPTER, BEST, WEIGHTS, sync, whole

log = logging.getLogger(__name__)

Save = Callable[[nn.Module, Path], object]  # writes a stock model to a folder


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
