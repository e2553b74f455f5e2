"""`razorctl list`."""

from typing import Annotated

from razorctl.cli.names import all_names
from razorctl.cli.options import Json, argument
from razorctl.cli.views import common as views
from razorctl.cli.views import list as view
from razorctl.errors import UsageError
from razorctl.registry import find

DEFAULTS = "defaults"


def list_names(
    kind: Annotated[
        str | None,
        argument(
            "models, datasets, methods, gpus or recipes, to show in full; or defaults, with a "
            "model and a data set.",
            "KIND",
        ),
    ] = None,
    model: Annotated[
        str | None, argument("Model whose defaults are shown.", "MODEL", "models")
    ] = None,
    dataset: Annotated[
        str | None,
        argument(
            "Data set of the defaults; without it, the model's usual one.", "DATASET", "data sets"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the names of all models, data sets, methods, GPUs and recipes, or one KIND in full.

        razorctl list models

    defaults MODEL DATASET shows the default training settings of the model on the
    data set, and where each comes from.
    """
    if kind == DEFAULTS:
        if model is None:
            raise UsageError("list defaults needs a model, as in: list defaults vit-micro digits.")
        from razorctl.cli import defaults, planning  # imported here: models slow --help

        with planning.lookup_status(model):
            document = defaults.defaults_of(model, dataset)
        if json:
            views.print_json(document)
        else:
            view.show_defaults(document)
        return
    groups = all_names()
    if kind is not None:
        names = {name.replace(" ", ""): name for name in groups}
        group = find("kind", kind, {**names, DEFAULTS: DEFAULTS})
        groups = {group: groups[group]}
    if model is not None:
        raise UsageError(f"{model} does nothing without defaults; leave it out.")
    if json:
        views.print_json(groups)
    else:
        view.show(groups, brief=kind is None)
