"""The formats of exports, and formats that are refused."""

from importlib.util import find_spec
from pathlib import Path

from razorctl.errors import UsageError
from razorctl.registry import unknown

PACKAGES = {"safetensors": (), "onnx": ("onnx", "onnxruntime", "onnxscript")}  # format -> packages
# Format that is not written -> the reason and the mend.
REFUSED = {
    "torchscript": "torch has deprecated it; choose onnx",
    "gguf": "llama.cpp makes it of a run's directory; run its `convert_hf_to_gguf.py {run}`",
}


def check_format(to: str, run: Path) -> None:
    """Raises UsageError for a format that is not written, and for a missing package."""
    if to in REFUSED:
        raise UsageError(f"--to {to} is not written: {REFUSED[to].format(run=run)}.")
    if to not in PACKAGES:
        raise unknown("format", to, PACKAGES)
    if missing := [package for package in PACKAGES[to] if find_spec(package) is None]:
        raise UsageError(
            f"--to {to} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            f" not installed; run `pip install {' '.join(missing)}`, or choose safetensors."
        )
