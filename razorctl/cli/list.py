"""`razorctl list`."""

from typing import Annotated

import typer

from razorctl.cli.names import known
from razorctl.cli.options import Json
from razorctl.cli.views import common as views
from razorctl.cli.views import list as view
from razorctl.config.registry import find


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="models, datasets, methods, gpus or recipes: show these in full."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the names of all models, data sets, methods, GPUs and recipes, or one KIND in full."""
    groups = known()
    if kind is not None:
        group = find("kind", kind, {name.replace(" ", ""): name for name in groups})
        groups = {group: groups[group]}
    if json:
        views.print_json(groups)
    else:
        view.show(groups, brief=kind is None)
