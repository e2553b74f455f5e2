"""The formats of exports, and formats that are refused."""

import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from razorctl.errors import MissingError, UsageError
from razorctl.registry import unknown

# Format -> packages.
PACKAGES = {"safetensors": (), "onnx": ("onnx", "onnxruntime", "onnxscript"), "gguf": ()}
# Format that is not written -> the reason and the mend.
REFUSED = {"torchscript": "torch has deprecated it; choose onnx"}
CONVERTER = "convert_hf_to_gguf.py"  # of llama.cpp


def check_format(to: str, run: Path, task: str | None) -> None:
    """Raises UsageError for a format that the run cannot have, and for a missing package."""
    if to in REFUSED:
        raise UsageError(f"--to {to} is not written: {REFUSED[to]}.")
    if to not in PACKAGES:
        raise unknown("format", to, PACKAGES)
    if to == "gguf" and task != "causal-lm":
        raise UsageError(
            f"--to gguf is for causal-lm, and {run} is for {task or 'classification'}; choose "
            "safetensors or onnx."
        )
    if missing := [package for package in PACKAGES[to] if find_spec(package) is None]:
        raise UsageError(
            f"--to {to} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            f" not installed; run `pip install {' '.join(missing)}`, or choose safetensors."
        )


def converter(run: Path, llama_cpp: Path | None) -> list[str]:
    """The words that start CONVERTER; raises MissingError without it.

    llama_cpp: the folder of llama.cpp; None searches PATH, and runs it as its first line says.
    """
    found = which(CONVERTER) if llama_cpp is None else str(llama_cpp / CONVERTER)
    if found is None or not Path(found).is_file():
        raise MissingError(
            f"{CONVERTER} of llama.cpp is not {'on PATH' if found is None else f'in {llama_cpp}'}; "
            "clone https://github.com/ggml-org/llama.cpp and name its folder with --llama-cpp, or "
            f"run `python {CONVERTER} {run} --outfile model.gguf` there."
        )
    return [found] if llama_cpp is None else [sys.executable, found]
