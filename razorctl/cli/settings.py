"""Job and recipe from what is given: flags, environment, files.

The first of these that says something counts: flag, RAZORCTL_<NAME> in the environment, the [job]
and [recipe] tables of razorctl.toml, a preset of --recipe, the measured default of the model or
method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from razorctl.config import presets
from razorctl.config.registry import find, unknown
from razorctl.config.settings import read_toml
from razorctl.errors import UsageError
from razorctl.job import Job
from razorctl.recipe import Recipe

PREFIX = "RAZORCTL"  # of variables of the environment
PROJECT_FILE = Path("razorctl.toml")
OF_OPTIMIZER = ("learning_rate", "momentum", "weight_decay")  # which suit one alone


@dataclass(frozen=True)
class Settings:
    """What is given of a job, of a recipe and of what to plan for, by name."""

    given: Mapping[str, Any]

    def but(self, **settings: Any) -> "Settings":
        """The same with these on top."""
        return Settings({**self.given, **settings})

    def of(self, kind: type[Any]) -> dict[str, Any]:
        """What is given of the fields of Job or of Recipe."""
        return {f.name: self.given[f.name] for f in fields(kind) if f.name in self.given}

    @property
    def job(self) -> Job:
        """The job, which needs a model and a data set; raises UsageError if it is unsound."""
        return Job(**self.of(Job))

    @property
    def recipe(self) -> Recipe:
        """The recipe; raises UsageError if it is unsound."""
        return Recipe(**self.of(Recipe))

    @property
    def orders(self) -> bool:
        """Whether a recipe is given, or a part of one; a seed, which is the job's too, is none."""
        return bool(self.of(Recipe).keys() - {"seed"})


def read(ctx: typer.Context, flags: Mapping[str, Any], preset: str | None = None) -> Settings:
    """What is given to a command: `flags`, which have the environment's, over files and preset."""
    given = {**(ctx.obj or {}), **{k: v for k, v in flags.items() if v is not None}}
    return Settings(given if preset is None else _over_preset(preset, given))


def of_file(file: Path) -> dict[str, Any]:
    """The [job] and [recipe] tables of a razorctl.toml or a run's config.toml, as one mapping."""
    known = [field.name for field in (*fields(Job), *fields(Recipe))]
    tables = read_toml(file)
    settings: dict[str, Any] = {}
    for table in ("recipe", "job"):
        if not isinstance(tables.get(table, {}), dict):
            raise UsageError(
                f"{table} in {file} is not a table; write [{table}] above its settings."
            )
        settings |= tables.get(table, {})
    for name in settings:
        if name not in known:
            raise unknown(f"setting in {file}", name, known)
    return settings


def _over_preset(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe preset, by name or file, with what is given on top."""
    file = Path(name) if name.endswith(".toml") else find("recipe", name, presets.files("recipes"))
    settings = of_file(file)
    if "steps" in given or "epochs" in given:  # two ways to say the same
        settings = {k: v for k, v in settings.items() if k not in ("steps", "epochs")}
    if given.get("optimizer", Job.optimizer) != settings.get("optimizer", Job.optimizer):
        settings = {k: v for k, v in settings.items() if k not in OF_OPTIMIZER}
    return settings | given
