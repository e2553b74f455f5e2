"""The results of the Python functions: mappings that print themselves, also in notebooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from razorctl.cli.views import common as views


def print_result(ctx: Any, result: Any, show: Callable[[Any], object]) -> None:
    """Prints the result of a command: its document with --json, else by `show`."""
    if ctx.params.get("json"):
        views.print_json(dict(result))
    else:
        show(result)


class Result(Mapping[str, Any]):
    """The document of a command, with the keys of its --json.

    It prints as the output of the command. A notebook shows the same tables, with plots.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        show: Callable[[dict[str, Any]], object],
        plots: Callable[[], Sequence[str]] = tuple,
        exit_code: int = 0,
    ) -> None:
        """show: prints the document on `views.out`. plots: returns <img> elements of its plots.

        exit_code: of the command.
        """
        self._document, self._show, self._plots = dict(document), show, plots
        self.exit_code = exit_code

    def __getitem__(self, key: str) -> Any:
        return self._document[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)

    def show(self) -> None:
        """Prints the output of the command on stdout."""
        self._show(self._document)

    def __str__(self) -> str:
        from razorctl.cli.views import html

        return html.record(self.show, views.out.width).text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from razorctl.cli.views import html

        return html.page(self.show, self._plots())
