"""Draws the picture of a terminal in README.md: commands and what they print.

    .venv/bin/python scripts/bench/terminal.py [--check]

The script runs COMMANDS as on a terminal of WIDTH columns, and writes what they print to
results/terminal.json and scripts/assets/terminal-{light,dark}.svg. `--check` runs nothing, and
exits with 1 if a picture was drawn from other results.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from pages import RESULTS, ROOT, load
from rich.color import Color
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 54  # columns, so that the picture is legible on a phone
COMMANDS = (
    "razorctl plan vit-b16 cifar100 --gpu rtx-4060",
    "razorctl finetune vit-micro digits --ratio 0.9 --out runs/digits",
)
# Background and text of the page, then the eight colors of a terminal.
PALETTES = {
    "light": "#ffffff #1f2328 #24292f #cf222e #116329 #7d4e00 #0969da #8250df #1b7c83 #59636e",
    "dark": "#0d1117 #e6edf3 #484f58 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4",
}


def printed(command: str, folder: str) -> str:
    """What a command prints on stdout, with the codes of its colors."""
    terminal = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(
        words, cwd=folder, env=terminal, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def drawn(mode: str) -> str:
    """The picture of the commands and what they printed."""
    ground, text, *colors = (Color.parse(ink).get_truecolor() for ink in PALETTES[mode].split())
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    for command, output in load("terminal")["outputs"].items():
        console.print(Text(f"$ {command}", "bold"), Text.from_ansi(output), sep="\n", end="\n\n")
    picture = console.export_svg(
        title="", theme=TerminalTheme(ground, text, colors), unique_id="terminal"
    )
    # Fonts from elsewhere are not loaded in a README.
    return re.sub(r"@font-face \{.*?\}\n *", "", picture, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only see whether they are current")
    check = parser.parse_args().check
    if not check:
        from record import head, write  # imports torch

        with tempfile.TemporaryDirectory() as folder:
            outputs = {command: printed(command, folder) for command in COMMANDS}
        document = head("2 CPU cores; plan predicts", "torch", "timm")
        write(RESULTS / "terminal.json", {**document, "outputs": outputs})
    stale = False
    for mode in PALETTES:
        path = ROOT / f"scripts/assets/terminal-{mode}.svg"
        if not check:
            path.write_text(drawn(mode))
        elif path.read_text() != drawn(mode):
            print(f"{path.relative_to(ROOT)} differs from the results; run {Path(__file__).name}")
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
