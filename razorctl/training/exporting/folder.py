"""The files of an exported run: of its model, or ONNX or GGUF instead, and a model card."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from razorctl.models.transformers import embedding, pretrained_files
from razorctl.training.exporting import card, gguf_model, onnx_model
from razorctl.training.predicting.inference import Trained

# Patterns of the files that the libraries read; no other file of a run directory is exported.
WEIGHTS = (pretrained_files.WEIGHTS, pretrained_files.INDEX)
SETTINGS = (*pretrained_files.SETTINGS, *embedding.FILES)


def write(
    trained: Trained, to: str, folder: Path, name: str, converter: Sequence[str], *, copy: bool
) -> tuple[dict[str, Path], dict[str, Any] | None]:
    """The files of an export by name, and for ONNX the result of `onnx_model.write`.

    New files are written into a folder; with `copy`, files of the run are copied into it.

    Args:
        trained: the model of the run, on the CPU.
        to: a format of `formats.PACKAGES`.
        name: the repository or the folder, for the model card.
        converter: for GGUF, as `formats.converter` returns it.
    """
    patterns = {"safetensors": (*SETTINGS, *WEIGHTS), "onnx": SETTINGS}.get(to, ())
    top = trained.weights.parent
    sorted(top.iterdir())  # raises for a folder that cannot be read
    every = sorted(file for pattern in patterns for file in top.glob(pattern))
    files = {file.relative_to(top).as_posix(): file for file in every}
    if copy:
        for each, file in files.items():
            (folder / each).parent.mkdir(exist_ok=True)
            files[each] = Path(shutil.copyfile(file, folder / each))
    graph = onnx_model.write(trained, folder) if to == "onnx" else None
    if to == "gguf":
        gguf_model.write(trained, folder, converter)
    (folder / card.FILE).write_text(card.text(trained, name, to, graph), "utf-8")
    files |= {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    return dict(sorted(files.items())), graph


def title(trained: Trained) -> str:
    """The title of a commit to the hub, without paths of the user."""
    return f"{card.shown(trained.job.model)} trained on {card.shown(trained.job.dataset)}"
