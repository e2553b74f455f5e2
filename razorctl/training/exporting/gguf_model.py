"""A run's model in the format of llama.cpp, whose own script converts it."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from razorctl.errors import RazorError
from razorctl.training.exporting.formats import CONVERTER
from razorctl.training.predicting.inference import Trained

FILE = "model.gguf"


def write(trained: Trained, folder: Path, converter: Sequence[str]) -> None:
    """Writes FILE into a folder; raises RazorError with the last line of a script that fails.

    converter: as `formats.converter` returns it.
    """
    words = [*converter, str(trained.weights.parent), "--outfile", str(folder / FILE)]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode or not (folder / FILE).is_file():
        said = done.stderr.split("\n") or [""]
        reason = next((line.strip() for line in reversed(said) if line.strip()), "it says nothing")
        raise RazorError(
            f"{CONVERTER} cannot convert {trained.run} ({reason}); correct that, or take a "
            "newer llama.cpp."
        )
