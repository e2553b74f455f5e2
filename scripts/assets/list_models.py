"""Write the list of registered models into README.md; with --check, see whether it is there.

.venv/bin/python scripts/assets/list_models.py [--check]
"""

import argparse
import sys
from pathlib import Path
from textwrap import fill

from razorctl import models

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- models: scripts/assets/list_models.py -->\n", "<!-- /models -->\n"
KINDS = {"image": "images", "text": "texts"}
# Tasks of every model that classifies; embeddings are one of texts alone.
IMPLIED = {"regression", "multi-label", "token-classification"}
WIDTH = 160


def listed() -> str:
    """The models by what they take and learn, in the order of the registry."""
    groups: dict[str, list[str]] = {}
    for name, model in models.models().items():
        implied = IMPLIED | {"embedding"} if model.modality == "text" else IMPLIED
        what = ", ".join([KINDS[model.modality], *sorted(set(model.tasks) - implied)])
        groups.setdefault(what, []).append(f"`{name}`")
    lines = (f"- {what}: {', '.join(names)}" for what, names in groups.items())
    return "".join(f"{fill(line, WIDTH, subsequent_indent='  ')}\n" for line in lines)


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
