"""Text for a terminal: without control characters, and in the encoding of the terminal."""

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

from razorctl.errors import DataError, UsageError

STAND_IN = "\N{REPLACEMENT CHARACTER}"
# C0 without tabs and line feeds, C1, line separators, marks of text direction, and surrogates.
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
# Character that razorctl prints -> its substitute in an encoding without it.
SIGNS = {"≈": "~", "×": "x", "±": "+-", "…": "...", "─": "-", "−": "-", "→": "->"}  # noqa: RUF001
LOSSY = "razorctl.signs"  # the error handler that `safe_streams` sets


def clean(text: str) -> str:
    """The text with STAND_IN for each control character."""
    return text.translate(CONTROLS)


class CleanConsole(Console):
    """A console that replaces the control characters of any text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(clean(text), style)


class _LogHandler(logging.Handler):
    """Prints log records."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


@contextmanager
def safe_streams(say: Callable[[str], None], error: Callable[[str], None]) -> Iterator[None]:
    """Makes stdout and stderr safe inside the block.

    They substitute characters that their encoding lacks; `data_stream` does not. A failed write to
    stdout ends the block with exit code 1, and prints an error unless stdout is a closed pipe.

    say: prints log records and warnings of libraries. error: prints an error.
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
    stdout = sys.stdout
    try:
        for stream in streams:
            with suppress(OSError):
                stream.reconfigure(errors=LOSSY)
        if stdout is not None:
            sys.stdout = _Output(stdout, error)
        try:
            yield
        except SystemExit as end:
            if not end.code:
                _flush()
            raise
        _flush()
    finally:
        sys.stdout = stdout
        logging.lastResort, warnings.showwarning = last, stock
        for stream, errors in streams.items():
            with suppress(OSError, ValueError):
                stream.reconfigure(errors=errors)


class _Output:
    """Standard output; a failed write ends the process."""

    def __init__(self, stream: Any, error: Callable[[str], None]) -> None:
        self._stream, self._error = stream, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return int(self._tried(self._stream.write, text))

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, act: Callable[..., Any], *args: str) -> Any:
        try:
            return act(*args)
        except OSError as failure:
            with suppress(OSError, ValueError):  # drops the text in its buffer
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if not isinstance(failure, BrokenPipeError):
                self._error(f"cannot write stdout ({failure.strerror}); make room, or redirect it.")
            raise SystemExit(1) from None


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


class _DataStream:
    """Standard output for data: unchanged, except for control characters on a terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._terminal = stream, stream.isatty()

    def write(self, text: str) -> int:
        if self._terminal:
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


def stdin_lines() -> Iterator[str]:
    """The lines of stdin; raises UsageError if it is closed, and DataError if it is not UTF-8."""
    if sys.stdin is None:
        raise UsageError("stdin is closed; give the command its lines, or name files.")
    try:
        for number, line in enumerate(sys.stdin.buffer):
            yield line.decode("utf-8" if number else "utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8; convert it.") from None


class Lines:
    """The stream of a `csv.writer`, whose rows end with a line feed.

    The writer quotes a cell with a carriage return only if its own line end has one.
    """

    def __init__(self, stream: "TextIO | _DataStream") -> None:
        self._stream = stream

    def write(self, row: str) -> None:
        self._stream.write(row.removesuffix("\r\n") + "\n")


def forget_empty_width() -> None:
    """Unsets COLUMNS if it is 0, with which rich would print nothing."""
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]


def _has_encoding(stream: Any) -> bool:
    return hasattr(stream, "reconfigure") and getattr(stream, "encoding", None) is not None


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """The substitutes for the characters that an encoding lacks, as an error handler."""
    assert isinstance(error, UnicodeEncodeError)
    text = "".join(SIGNS.get(sign, "?") for sign in error.object[error.start : error.end])
    return text.encode(error.encoding, "replace").decode(error.encoding), error.end
