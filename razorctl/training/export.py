"""The weights of a finished run, under the names of the stock model."""

import logging
from copy import deepcopy
from pathlib import Path

from torch import nn

from razorctl.surgery.sparsify import restore
from razorctl.training import state, tensors
from razorctl.training.checkpoints import Checkpoint
from razorctl.training.rundir import BEST, WEIGHTS, whole

log = logging.getLogger(__name__)


def last(model: nn.Module, out: Path) -> None:
    """Restores a sparsified model and writes its weights; raises OSError if that cannot be."""
    restore(model)
    _write(model, out / WEIGHTS)


def best(model: nn.Module, found: Checkpoint, out: Path) -> bool:
    """Writes the weights in a checkpoint of a sparsified model, which stays as it is.

    Returns False, after a warning, if the checkpoint is damaged. Raises OSError if they cannot be
    written.
    """
    if not found.intact:
        log.warning("%s is damaged; the best weights of this run are the last ones.", found.path)
        return False
    model = deepcopy(model)
    state.load_model(found.path, model)
    restore(model)
    _write(model, out / BEST)
    return True


def _write(model: nn.Module, file: Path) -> None:
    with whole(file) as path, path.open("wb") as stream:
        tensors.write(stream, model.state_dict())
