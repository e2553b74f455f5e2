"""Write the list of registered models into README.md; with --check, see whether it is there.

.venv/bin/python scripts/assets/list_models.py [--check]
"""

import argparse
import sys
from pathlib import Path

from razorctl import models

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- models: scripts/assets/list_models.py -->\n", "<!-- /models -->\n"
# Task and what a model takes -> how that is called.
ROWS = {
    ("classification", "image"): "`classification`, `regression` and `multi-label` of images",
    ("segmentation", "image"): "`segmentation`, a class for each pixel",
    ("detection", "image"): "`detection`, a class and a box for each object",
    ("embedding", "image"): "`embedding` of images and texts",
    (
        "classification",
        "text",
    ): "`classification`, `regression`, `multi-label`, `token-classification` and `embedding` of "
    "texts",
    ("masked-lm", "text"): "`masked-lm`, as BERT is trained",
    ("causal-lm", "text"): "`causal-lm`, the next token",
}


def listed() -> str:
    """The models of each task, in the order of the registry."""
    lines = []
    for (task, takes), what in ROWS.items():
        names = [
            f"`{name}`"
            for name, model in models.models().items()
            if task in model.tasks and model.modality == takes
        ]
        lines.append(f"- {what}: {', '.join(names)}\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only see whether it is there")
    args = parser.parse_args()
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + listed() + END + after
    if args.check and wanted != text:
        sys.exit(f"{README.name} lacks some models; run scripts/assets/list_models.py")
    if not args.check:
        README.write_text(wanted)


if __name__ == "__main__":
    main()
