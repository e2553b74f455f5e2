"""Options, results and errors of all benches."""

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pages import RESULTS, Row

from razorctl.version import __version__


def options(description: str | None, result: str | None = None) -> argparse.ArgumentParser:
    """A parser with --out, which is the file of that name in results/ by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=result and RESULTS / f"{result}.json")
    return parser


def head(device: str | None, *libraries: str) -> Row:
    """The first entries of a result: command without its file, date, device if any, versions."""
    script, *words = sys.argv
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return {
        "command": shlex.join([f"scripts/bench/{Path(script).name}", *words]),
        "date": datetime.date.today().isoformat(),
        **({} if device is None else {"device": device}),
        "versions": versions(*libraries),
    }


def versions(*libraries: str) -> dict[str, str]:
    """The versions of razorctl, which need not be installed, and of libraries that are."""
    installed = {name: version(name) for name in libraries if find_spec(name)}
    return {"razorctl": __version__, **installed}


def write(file: Path, document: Row) -> None:
    """Writes a result at once: a limit on time may end this process anywhere."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(file)


def reason(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    line = next(iter(str(error).strip().splitlines()), "")[:300]
    return f"{type(error).__name__}: {line}"


@dataclass(kw_only=True)
class Attempts:
    """Base of a run: after an error nothing more is done with it."""

    error: str | None = None
    compiled: ClassVar[bool] = False  # whether torch.compile makes the model

    def attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Calls `action` with this run and `args`; an exception becomes the error."""
        if self.error is not None:
            return
        try:
            action(self, *args)
        except Exception as error:  # running out of memory too
            self.error = reason(error)
