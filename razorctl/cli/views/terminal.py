"""Texts for a terminal, without characters that control it and signs that it cannot show."""

import codecs
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from razorctl.errors import UsageError

STAND_IN = "\N{REPLACEMENT CHARACTER}"
# C0 without tabs and line feeds, C1, what separates lines, what changes the direction of a text,
# and surrogates, which no encoding has.
CONTROLS = str.maketrans(
    dict.fromkeys(
        (
            *(number for number in range(0x20) if chr(number) not in "\t\n"),
            *range(0x7F, 0xA0),
            *(0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),
            *range(0xD800, 0xE000),
        ),
        STAND_IN,
    )
)
# Signs of our own -> what stands for them where the encoding lacks them.
SIGNS = {"≈": "~", "×": "x", "±": "+-", "…": "...", "─": "-", "−": "-", "→": "->"}  # noqa: RUF001
LOSSY = "razorctl.signs"  # the error handler that `show` sets


def clean(text: str) -> str:
    """A text without characters that would control a terminal."""
    return text.translate(CONTROLS)


class CleanConsole(Console):
    """A console that shows texts of others as they are, and none of their control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(clean(text), style)


class _LogHandler(logging.Handler):
    """Says what is logged, where nobody else listens."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


@contextmanager
def safe_streams(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block stdout and stderr show what they can of each text.

    say: says what is logged, and what libraries warn of.
    Data go to `data_stream`, where nothing is lost.
    """
    codecs.register_error(LOSSY, _substitute)
    both: tuple[Any, ...] = (sys.stdout, sys.stderr)
    streams = {stream: stream.errors for stream in both if _has_encoding(stream)}
    last, logging.lastResort = logging.lastResort, _LogHandler(say)
    stock = warnings.showwarning

    def warn(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        say(warnings.formatwarning(message, category, filename, lineno, line).rstrip())

    warnings.showwarning = warn
    try:
        for stream in streams:
            stream.reconfigure(errors=LOSSY)
        yield
    finally:
        logging.lastResort, warnings.showwarning = last, stock
        for stream, errors in streams.items():
            with suppress(OSError, ValueError):
                stream.reconfigure(errors=errors)


class _DataStream:
    """Standard output for data: as they are, but for a terminal without what controls it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._shown = stream, stream.isatty()

    def write(self, text: str) -> int:
        if self._shown:
            text = clean(text)
        elif _has_encoding(self._stream):
            try:
                text.encode(self._stream.encoding)
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"stdout is {error.encoding}, which lacks {error.object[error.start]!a}; set "
                    "PYTHONIOENCODING=utf-8, or give --json."
                ) from None
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()


def data_stream() -> _DataStream:
    """Standard output for data; raises UsageError if it is closed."""
    if sys.stdout is None:
        raise UsageError("stdout is closed; give the command one.")
    return _DataStream(sys.stdout)


def forget_empty_width() -> None:
    """Lets terminals be as wide as they are where COLUMNS is 0, which would show nothing."""
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]


def _has_encoding(stream: Any) -> bool:
    return hasattr(stream, "reconfigure") and getattr(stream, "encoding", None) is not None


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """The signs that stand for those that an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    found = "".join(SIGNS.get(sign, "?") for sign in lacking)
    return found.encode(error.encoding, "replace").decode(error.encoding), error.end
