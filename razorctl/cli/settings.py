"""The job and the recipe that flags, environment variables and files set.

A setting comes from the first of these that has it: the flag, RAZORCTL_<NAME> in the environment,
the [job] and [recipe] tables of razorctl.toml, the preset of --recipe, the measured default of the
model or method.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from razorctl.cli.views import common as views
from razorctl.config import presets
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import check_types, read_toml
from razorctl.errors import UsageError
from razorctl.registry import find, unknown

GIVEN = ("COMMANDLINE", "ENVIRONMENT")  # sources of a parameter that the call itself sets
AUTO = "auto"  # the batch size that stands for the largest that a plan allows
# What says how one's own data are read, with its defaults.
OF_DATA: dict[str, Any] = {
    **dict.fromkeys(("image_column", "text_column", "label_column", "mask_values", "mask_colors")),
    "skip_bad": False,
}
# Of a settings file; a run, a comparison and a preset add tables of their own.
TABLES = ("job", "recipe", "environment", "limits", "runs", "summary")
OF_OPTIMIZER = ("learning_rate", "momentum", "weight_decay")  # each value suits one optimizer only


class Call(Protocol):
    """A call of a command: typer's context, or a `KeywordCall` of the Python functions."""

    obj: Any  # the settings of a file
    params: dict[str, Any]

    def get_parameter_source(self, name: str) -> Any:
        """The source of a parameter's value; see GIVEN."""

    def find_root(self) -> Any:
        """The call of razorctl itself, whose `params` has the global options."""


def is_given(ctx: Call, name: str, sources: Collection[str] = GIVEN) -> bool:
    """Whether the value of a parameter comes from one of the sources."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in sources


def is_typed(ctx: Call) -> bool:
    """Whether a user typed the command; from Python, nothing sets how it prints."""
    return "json" in ctx.params


def print_result(
    ctx: Call, document: dict[str, Any], show: Callable[[dict[str, Any]], object]
) -> None:
    """Prints the result of a typed command: with --json its document, else what `show` prints."""
    if ctx.params.get("json"):
        views.print_json(document)
    elif is_typed(ctx):
        show(document)


@dataclass(frozen=True)
class Settings:
    """The given settings of a job, a recipe and a plan, by name."""

    given: Mapping[str, Any]

    def but(self, **settings: Any) -> "Settings":
        """A copy with these settings replaced."""
        return Settings({**self.given, **settings})

    def of(self, kind: type[Any]) -> dict[str, Any]:
        """The given settings that are fields of `kind`: Job or Recipe."""
        return {f.name: self.given[f.name] for f in fields(kind) if f.name in self.given}

    @property
    def auto(self) -> bool:
        """Whether a plan is to choose the batch size."""
        return self.given.get("batch_size") == AUTO

    @property
    def job(self) -> Job:
        """The job; a model and a data set must be given. Raises UsageError for invalid values."""
        return Job(**self.of(Job))

    @property
    def job_to_plan(self) -> Job:
        """`job`, but with the usual batch size if a plan is to choose one."""
        return (self.but(batch_size=None) if self.auto else self).job

    @property
    def recipe(self) -> Recipe:
        """The recipe; raises UsageError for invalid values."""
        return Recipe(**self.of(Recipe))

    @property
    def orders(self) -> bool:
        """Whether any setting of a recipe is given, other than the seed, which a job has too."""
        return bool(self.of(Recipe).keys() - {"seed"})


def given_settings(ctx: Call, flags: Mapping[str, Any], preset: str | None = None) -> Settings:
    """The settings given to a command: `flags` first, then the file's, then the preset's.

    `flags` include those from the environment. Raises UsageError for an unknown or bad preset.
    """
    given = {**(ctx.obj or {}), **{k: v for k, v in flags.items() if v is not None}}
    return Settings(given if preset is None else _over_preset(preset, given))


def call_settings(ctx: Call, flags: Mapping[str, Any], preset: str | None = None) -> Settings:
    """The settings that the call itself gives: `given_settings` without those of razorctl.toml.

    Settings of a file named with --config count as given by the call.
    """
    given: dict[str, Any] = {}
    if ctx.find_root().params.get("config") is not None:
        given |= ctx.obj or {}
    for name, value in flags.items():
        if value is not None and is_given(ctx, name):
            given[name] = value
    return Settings(given if preset is None else _over_preset(preset, given))


def of_other_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for reading data that a run was not trained on: those given, else defaults."""
    return {name: given.get(name, default) for name, default in OF_DATA.items()}


def settings_of_file(file: Path) -> dict[str, Any]:
    """The [job] and [recipe] tables of a razorctl.toml or a run's config.toml, as one mapping.

    Raises UsageError if the file cannot be read or has an unknown setting.
    """
    names = [field.name for field in (*fields(Job), *fields(Recipe))]
    tables = read_toml(file)
    for table in tables:
        if table not in TABLES:
            raise unknown(f"table in {file}", table, TABLES)
    settings: dict[str, Any] = {}
    for table in ("recipe", "job"):
        if not isinstance(tables.get(table, {}), dict):
            raise UsageError(
                f"{table} in {file} is not a table; write [{table}] above its settings."
            )
        settings |= tables.get(table, {})
    for name in settings:
        if name not in names:
            raise unknown(f"setting in {file}", name, names)
    try:
        for kind in (Job, Recipe):
            check_types(kind, {k: v for k, v in settings.items() if v != AUTO})
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    return settings


def _over_preset(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe preset, by name or file, overridden by those in `given`."""
    file = Path(name) if name.endswith(".toml") else find("recipe", name, presets.files("recipes"))
    settings = settings_of_file(file)
    if "steps" in given or "epochs" in given:  # a job takes only one of them
        settings = {k: v for k, v in settings.items() if k not in ("steps", "epochs")}
    if given.get("optimizer", Job.optimizer) != settings.get("optimizer", Job.optimizer):
        settings = {k: v for k, v in settings.items() if k not in OF_OPTIMIZER}
    return settings | given
