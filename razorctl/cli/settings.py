"""The job and the recipe that flags, environment variables and files set.

A setting comes from the first of these that has it: the flag, RAZORCTL_<NAME> in the environment,
the [job] and [recipe] tables of razorctl.toml, the preset of --recipe, the measured default of the
model or method.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from razorctl.config import presets
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import check_types, read_toml
from razorctl.errors import UsageError
from razorctl.registry import find, unknown

GIVEN = ("COMMANDLINE", "ENVIRONMENT")  # typer's sources of a value that the user sets for a call
PLANNING = ("vram", "gpu", "prefer", "host_memory")  # settings of a plan
AUTO = "auto"  # the batch size that a plan is to choose
COLUMNS: tuple[str, ...] = ("column", "image_column", "text_column", "label_column")
COLUMNS += ("mask_values", "mask_colors", "box_format")
DATA_SETTINGS = (*COLUMNS, "split", "validation", "max_rows", "skip_bad")
# Settings for reading a user's data, with their defaults.
OF_DATA: dict[str, Any] = {**dict.fromkeys(COLUMNS), "skip_bad": False}
# Tables in a settings file: of any file, of a run, of a comparison, and of a preset.
TABLES = ("job", "recipe", "environment", "runs", "summary")
OF_OPTIMIZER = ("learning_rate", "momentum", "weight_decay")  # a value suits one optimizer only


def is_given(ctx: Any, name: str, sources: Collection[str] = GIVEN) -> bool:
    """Whether a parameter in typer's context has its value from one of the sources."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in sources


@dataclass(frozen=True)
class Settings:
    """The given settings of a job, a recipe and a plan, by name."""

    given: Mapping[str, Any]

    def but(self, **settings: Any) -> "Settings":
        """A copy with these settings."""
        return Settings({**self.given, **settings})

    def of(self, kind: type[Any]) -> dict[str, Any]:
        """The given settings that are fields of `kind`: Job or Recipe."""
        return {f.name: self.given[f.name] for f in fields(kind) if f.name in self.given}

    @property
    def auto(self) -> bool:
        """Whether a plan chooses the batch size."""
        return self.given.get("batch_size") == AUTO

    @property
    def job(self) -> Job:
        """The job; needs a model and a data set. Raises UsageError for invalid values."""
        return Job(**self.of(Job))

    @property
    def job_to_plan(self) -> Job:
        """The job, with the usual batch size if a plan chooses one."""
        return (self.but(batch_size=None) if self.auto else self).job

    @property
    def recipe(self) -> Recipe:
        """The recipe; raises UsageError for invalid values."""
        return Recipe(**self.of(Recipe))

    @property
    def orders(self) -> bool:
        """Whether a setting of a recipe is given; the seed is the job's too and does not count."""
        return bool(self.of(Recipe).keys() - {"seed"})


@dataclass(frozen=True)
class Call:
    """The settings of a call of a command or a function of the library.

    Args:
        given: the settings of flags, the environment or keywords.
        preset: name or file of the recipe preset.
        file: the settings of the TOML file of a command.
        named: whether --config names the file, so that its settings count as given.
        quiet: whether a command prints JSON.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    file: Mapping[str, Any] = field(default_factory=dict)
    named: bool = False
    quiet: bool = False

    @classmethod
    def typed(cls, ctx: Any, **settings: Any) -> "Call":
        """The call of the command in typer's context; `given` has `settings`."""
        given = {k: v for k, v in settings.items() if v is not None and is_given(ctx, k)}
        named = ctx.find_root().params.get("config") is not None
        return cls(given, file=ctx.obj or {}, named=named, quiet=bool(ctx.params.get("json")))

    @property
    def settings(self) -> Settings:
        """All settings; raises UsageError for an unknown or bad preset."""
        return self._over(self.file)

    @property
    def explicit(self) -> Settings:
        """The settings without the project's razorctl.toml, which no --config names."""
        return self._over(self.file if self.named else {})

    def _over(self, file: Mapping[str, Any]) -> Settings:
        given = {**file, **self.given}
        return Settings(given if self.preset is None else _over_preset(self.preset, given))


def of_other_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for reading other data than a run's: given ones, and defaults."""
    return {name: given.get(name, default) for name, default in OF_DATA.items()}


def settings_of_file(file: Path) -> dict[str, Any]:
    """The settings in the [job] and [recipe] tables of a razorctl.toml or a run's config.toml.

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
    """The settings of a recipe preset, by name or file, overridden by `given`."""
    file = Path(name) if name.endswith(".toml") else find("recipe", name, presets.files("recipes"))
    settings = settings_of_file(file)
    if "steps" in given or "epochs" in given:  # a job takes only one of them
        settings = {k: v for k, v in settings.items() if k not in ("steps", "epochs")}
    if given.get("optimizer", Job.optimizer) != settings.get("optimizer", Job.optimizer):
        settings = {k: v for k, v in settings.items() if k not in OF_OPTIMIZER}
    return settings | given
