"""Output on a terminal: tables on stdout, messages on stderr."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.markup import escape

from razorctl import units
from razorctl.cli.views.terminal import CleanConsole, data_stream, forget_empty_width

if TYPE_CHECKING:
    from rich.table import Table


class _LossyStream:
    """A stream that drops failed writes, as when its reader has ended or the disk is full."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError if it is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class MessageConsole(CleanConsole):
    """A console on stderr that never fails; `spoke` tells whether it has printed anything."""

    spoke = False

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints as `Console` does."""
        self.spoke = True
        super().print(*objects, **settings)

    @property
    def file(self) -> Any:
        """The stream of the messages."""
        return _LossyStream(super().file)

    @file.setter
    def file(self, stream: Any) -> None:
        self._file = stream


forget_empty_width()
out = CleanConsole()
err = MessageConsole(stderr=True)
_muted: list[tuple[Any, Any]] = []  # the streams that `mute` has replaced
EVERY = 30.0  # longest silence in seconds where there is no live display


def figure(value: float | None) -> str:
    """A figure with four decimals; a dash for None, which a document has for infinity and NaN."""
    return "-" if value is None else f"{value:.4f}"


def predicted_duration(predicted: dict[str, Any], steps: float = 1) -> str:
    """The predicted time of some steps, such as "2 h", or "1 h to 2 h" if the prediction is one."""
    low, high = predicted["step_seconds_low"], predicted["step_seconds_high"]
    return units.between(steps * low, steps * high)


def epochs_of(steps: int, per_epoch: int) -> float:
    """The epochs of some steps, rounded: 0.25, 2.5 or 25."""
    epochs = steps / per_epoch
    return round(epochs, 2 if epochs < 1 else 1 if epochs < 10 else None)


def run_length(job: Mapping[str, Any], per_epoch: int | None) -> str:
    """The length of a run, such as "3 epochs, 120 steps".

    job: its settings, of which one or both may be None. per_epoch: the steps of an epoch, if known.
    """
    epochs, steps = job["epochs"], job["steps"]
    if steps and per_epoch:
        epochs = epochs_of(steps, per_epoch)
    words = [units.count(epochs, "epoch")] if epochs else []
    words += [units.count(steps, "step")] if steps else []
    return ", ".join(words) or "length from the number of tokens"


def packing_summary(gain: Mapping[str, int], packing: bool) -> str:
    """The tokens of an epoch with joined texts, and without.

    gain: a `models.joined_texts.Gain`. packing: whether texts are joined.
    """
    packed, padded, grouped = (
        units.count(gain[name], "token") for name in ("packed", "padded", "grouped")
    )
    if packing:
        share = units.percent(gain["packed"] / gain["padded"])
        return f"packed: an epoch has {packed}, {share} of the {padded} with padding"
    return f"grouped by length: an epoch has {grouped}; with --packing it would have {packed}"


def title(model: str, dataset: str) -> str:
    """A model and a data set; a path inside the working directory is written as ./PATH."""
    return f"{_relative(model)} on {_relative(dataset)}"


def _relative(name: str) -> str:
    with suppress(OSError):
        path, here = Path(name), Path.cwd()
        if path.is_absolute() and path != here and path.is_relative_to(here):
            return f"./{path.relative_to(here)}"
    return name


def recipe_summary(recipe: dict[str, Any]) -> str:
    """The method of a recipe and its other settings that have an effect."""
    from razorctl.methods import METHODS  # imported here: --help does not need it

    text = str(recipe["method"])
    if METHODS[text].has_ratio:
        text += f", ratio {recipe['ratio']:g}"
    if recipe["joint_budget"] < 1:
        what = "branches" if recipe["joint"] == "branches" else "joint budget"
        text += f", {what} {recipe['joint_budget']:g}"
    if recipe["lora"]:
        text += ", LoRA"
    return f"{text}, checkpointing" if recipe["activation_checkpointing"] else text


def mute() -> None:
    """Prints nothing until `unmute`."""
    _muted.append((sys.stdout, sys.stderr))
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


def unmute() -> None:
    """Undoes `mute`."""
    if _muted:
        sys.stdout, sys.stderr = _muted.pop()


def line(text: str) -> None:
    """Prints a line on stdout, however narrow the terminal."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def facts_table(*styles: str) -> "Table":
    """A table without heads: names in bold, then columns of these styles."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for style in ("bold", *styles):
        table.add_column(style=style)
    return table


def error(message: str) -> None:
    """Prints an error on stderr, as one line."""
    err.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    from razorctl.system import documents

    # rich would wrap and color it.
    data_stream().write(f"{documents.text(document, indent=2)}\n")


def say(text: str) -> None:
    """Prints a line on stderr, however narrow the terminal."""
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def table_width(table: "Table") -> int:
    """The width of a terminal, in characters, that shows a table without broken lines."""
    from rich.measure import Measurement

    return Measurement.get(out, out.options.update(width=1000), table).maximum


def note(sentence: str) -> None:
    """Prints a note on stderr, as one line."""
    err.print("[bold yellow]note:[/]", escape(sentence), highlight=False, soft_wrap=True)


class Pulse:
    """Repeats a text on stderr after EVERY seconds without a line."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self._start = self._spoke = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    @property
    def silence(self) -> float:
        """Seconds since a line was printed."""
        return time.monotonic() - self._spoke

    def update(self, text: str) -> None:
        """Changes the text without printing it."""
        self.text = text

    def say(self, text: str) -> None:
        """Changes the text and prints it."""
        self._spoke = time.monotonic()
        self.update(text)
        say(text)

    def _beat(self) -> None:
        while not self._over.wait(max(0.0, EVERY - self.silence)):
            if self.silence >= EVERY:
                self._spoke = time.monotonic()
                say(f"{self.text} ({units.duration(self._spoke - self._start)} so far)")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def hide_messages(*, unless: bool) -> Iterator[None]:
    """Hides messages on stderr inside the block, unless `unless` is true."""
    before, err.quiet = err.quiet, err.quiet or not unless
    try:
        yield
    finally:
        err.quiet = before


def live() -> bool:
    """Whether bars are shown: on a terminal, if messages are not hidden.

    A notebook gets lines, since the bars of rich need ipywidgets there.
    """
    return err.is_interactive and not (err.is_jupyter or err.quiet)


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text while the block runs; yields the function that changes the text.

    Without a terminal, the first message of a command is printed at once, and later ones after
    EVERY seconds.
    """
    if live():
        with err.status(f"{text} ...") as status:
            yield lambda text: status.update(f"{text} ...")
    else:
        if not err.spoke:
            say(f"{text} ...")
        with Pulse(text) as pulse:
            yield pulse.update
