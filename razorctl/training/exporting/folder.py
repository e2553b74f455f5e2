"""The files of an exported run: its model's, ONNX in their weights' place, and a model card."""

import shutil
from pathlib import Path
from typing import Any

from razorctl.models.transformers import pretrained_files
from razorctl.training.exporting import card, onnx_model
from razorctl.training.predicting.inference import Trained

WEIGHTS = (pretrained_files.WEIGHTS, pretrained_files.INDEX)
# What the libraries read; nothing else that lies in a run directory leaves it.
OTHERS = pretrained_files.SETTINGS


def write(
    trained: Trained, to: str, folder: Path, name: str, *, copy: bool
) -> tuple[dict[str, Path], dict[str, Any] | None]:
    """The files of an export by their names, and what `onnx_model.write` returns, if it was called.

    New files are written into a folder; those of the run stay where they are, unless `copy`.

    Args:
        trained: the model of the run, on the CPU.
        to: a format of `formats.PACKAGES`.
        name: the repository or the folder that will have the files, as the model card says.
    """
    patterns = (*OTHERS, *(WEIGHTS if to == "safetensors" else ()))
    own = trained.weights.parent
    there = sorted(own.iterdir())  # which raises where `glob` would find nothing
    files = {file.name: file for pattern in patterns for file in there if file.match(pattern)}
    if copy:
        files = {each: Path(shutil.copyfile(file, folder / each)) for each, file in files.items()}
    graph = onnx_model.write(trained, folder) if to == "onnx" else None
    (folder / card.FILE).write_text(card.text(trained, name, to, graph), "utf-8")
    files |= {file.name: file for file in sorted(folder.iterdir())}
    return dict(sorted(files.items())), graph


def title(trained: Trained) -> str:
    """The title of a commit to the hub, without the user's paths."""
    return f"{card.shown(trained.job.model)} trained on {card.shown(trained.job.dataset)}"
