"""Progress of a command in a notebook, without widgets, which many notebooks lack."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.text import Text

OFTEN = 0.2  # seconds between two redraws of a bar
LINE = "<pre style='margin:0;background:none;white-space:pre;line-height:1.3'>{code}</pre>"


def html(*shown: RenderableType) -> str:
    """The output of a terminal as HTML."""
    console = Console(
        record=True, width=90, file=io.StringIO(), force_terminal=True, force_jupyter=False
    )
    console.print(*shown, highlight=False, end="")
    return console.export_html(inline_styles=True, code_format=LINE)


class CellOutput:
    """A part of the output of a notebook's cell, which shows one thing at a time."""

    def __init__(self, *shown: RenderableType) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(html(*shown)), display_id=True)

    def show(self, *shown: RenderableType) -> None:
        """Replaces what is shown."""
        self._handle.update(self._html(html(*shown)))

    def clear(self) -> None:
        """Shows nothing."""
        self._handle.update(self._html(""))


class Bars(Progress):
    """Progress bars of rich that redraw themselves in the output of a cell."""

    def __init__(self, *columns: str | ProgressColumn) -> None:
        super().__init__(*columns, auto_refresh=False)
        self._output: CellOutput | None = None
        self._drawn = 0.0

    def start(self) -> None:
        self._output = CellOutput(self.get_renderable())

    def stop(self) -> None:
        if self._output is not None:
            self._output.clear()  # the result of the command follows

    def update(self, *task: Any, **changes: Any) -> None:
        super().update(*task, **changes)
        if time.monotonic() - self._drawn >= OFTEN:
            self.refresh()

    def refresh(self) -> None:
        if self._output is not None:
            self._drawn = time.monotonic()
            self._output.show(self.get_renderable())


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done inside the block; yields the function that changes the text."""
    output = CellOutput(Text(f"{text} ..."))
    try:
        yield lambda text: output.show(Text(f"{text} ..."))
    finally:
        output.clear()
