"""The results of the Python functions: mappings that print, and that notebooks show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.views import common as views
from razorctl.errors import RazorError

if TYPE_CHECKING:
    from razorctl.cli.comparing import ComparedRuns


def print_result(ctx: Any, result: Any, show: Callable[[Any], object]) -> None:
    """Prints the result of a command: with --json its document, else what `show` prints."""
    if ctx.params.get("json"):
        views.print_json(dict(result))
    else:
        show(result)


class Result(Mapping[str, Any]):
    """The document of a command, with the keys of its --json.

    Printed, it is the output of the command; in a notebook, it is the same tables, with plots.
    """

    exit_code = 0  # of the command

    def __init__(
        self,
        document: Mapping[str, Any],
        show: Callable[[dict[str, Any]], object],
        plots: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """show: prints the document on `views.out`. plots: draws it; returns <img> elements."""
        self._document, self._show, self._plots = dict(document), show, plots

    def __getitem__(self, key: str) -> Any:
        return self._document[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)

    def show(self) -> None:
        """Prints the result on stdout, as the command does."""
        self._show(self._document)

    def __str__(self) -> str:
        from razorctl.cli.views import html

        return html.record(self.show, views.out.width).text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from razorctl.cli.views import html

        return html.page(self.show, self._plots())

    @classmethod
    def of_run(cls, document: Mapping[str, Any]) -> "Result":
        """The result of `finetune`, with the curves of its run while its directory exists."""
        from razorctl.cli.views import finetune as view

        def plots() -> Sequence[str]:
            from razorctl.cli.views import report
            from razorctl.training.comparing.finished_run import read_run

            with suppress(RazorError):  # the directory may have gone
                return report.run_plots(read_run(Path(document["run_dir"])))
            return ()

        if document.get("dry_run"):
            return cls(document, view.show_dry_run)
        return cls(document, view.show, plots)

    @classmethod
    def of_plan(cls, document: Mapping[str, Any]) -> "Result":
        """The result of `plan`."""
        from razorctl.cli.views import plan as view

        return cls(document, partial(view.show, explain=False))

    @classmethod
    def of_comparison(cls, runs: "ComparedRuns") -> "Result":
        """The result of `compare`, with the plots of its report."""
        from razorctl.cli.views import comparison as view

        def plots() -> Sequence[str]:
            from razorctl.cli.views import report

            return report.comparison_plots(runs.document, runs.comparison)

        result = cls(runs.document, view.show, plots)
        result.exit_code = runs.comparison.exit_code
        return result

    @classmethod
    def of_profile(cls, document: Mapping[str, Any]) -> "Result":
        """The result of `profile`."""
        from razorctl.cli.views import profile as view

        return cls(document, view.show)
