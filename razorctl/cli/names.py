"""The names that a user can type, for `list` and for shell completion."""

from collections.abc import Callable

from razorctl.config import presets
from razorctl.config.settings import read_toml
from razorctl.methods import METHODS
from razorctl.registry import find

DEFAULTS = "defaults"  # the kind of `list` that is not of names


def all_names() -> dict[str, dict[str, str]]:
    """All names: group -> name -> summary."""
    from razorctl import data, models
    from razorctl.planning import gpus

    return {
        "models": {name: model.summary for name, model in models.models().items()},
        "data sets": {name: source.summary for name, source in data.DATASETS.items()},
        "methods": {name: f"{m.summary} ({m.source})" for name, m in METHODS.items()},
        "gpus": {name: gpus.load(name).name for name in gpus.names()},
        "recipes": {
            name: str(read_toml(file).get("summary", ""))
            for name, file in presets.files("recipes").items()
        },
    }


def listed(kind: str | None) -> dict[str, dict[str, str]]:
    """The names of a kind, such as "datasets", or all; raises UsageError for an unknown kind."""
    groups = all_names()
    if kind is None:
        return groups
    names = {name.replace(" ", ""): name for name in groups}
    group = find("kind", kind, {**names, DEFAULTS: DEFAULTS})
    return {group: groups[group]}


def completion(group: str) -> Callable[[str], list[str]]:
    """The shell completion for the names of a group."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in all_names()[group] if name.startswith(incomplete)]

    return complete
