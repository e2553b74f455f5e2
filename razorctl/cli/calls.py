"""The commands as Python functions: they take the options as keywords and return results.

The keywords are the options that the commands declare, with underscores; nothing is declared here.
Nothing but the keywords sets an option: neither razorctl.toml nor the environment.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_args, overload

from rich.text import Text

from razorctl.cli import compare as comparing
from razorctl.cli import finetune as finetuning
from razorctl.cli import plan as planning
from razorctl.cli import profile as profiling
from razorctl.cli.options import Command
from razorctl.cli.results import Result
from razorctl.cli.settings import GIVEN
from razorctl.cli.views.common import hide_messages
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import RazorError, UsageError
from razorctl.registry import unknown
from razorctl.system import processes

if TYPE_CHECKING:
    from razorctl.planning.plan import Plan
    from razorctl.training.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])
PRINTING = ("ctx", "json", "csv", "explain")  # parameters of commands that are no keywords
SETTINGS = {each.name for kind in (Job, Recipe) for each in fields(kind)}


@dataclass(frozen=True)
class Keyword:
    """A keyword of a function: the command's parameter that it sets, its types, and its help."""

    parameter: str
    kinds: tuple[Any, ...]
    help: str

    def convert(self, name: str, value: Any) -> Any:
        """A value as the command line would give it; raises UsageError for a wrong type."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if Path in self.kinds and isinstance(value, str):
            return Path(value)
        if list[str] in self.kinds:
            return [value] if isinstance(value, str) else [*map(str, value)]
        if str in self.kinds:
            if isinstance(value, Sequence) and not isinstance(value, str):
                return ",".join(map(str, value))  # as --methods full,razor
            if not isinstance(value, bool):
                return str(value)
        fits = type(value) in self.kinds or (type(value) is int and float in self.kinds)
        if fits or self.parameter in SETTINGS:  # a Job or a Recipe checks its settings itself
            return value
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in self.kinds)
        raise UsageError(f"{name} {value!r} is not of type {names}; give one that is.")


@dataclass
class KeywordCall:
    """A call of a command that sets exactly its `params`; see `settings.Call`."""

    params: dict[str, Any] = field(default_factory=dict)
    obj: None = None

    def get_parameter_source(self, name: str) -> Any:
        return SimpleNamespace(name=GIVEN[0]) if name in self.params else None

    def find_root(self) -> "KeywordCall":
        return self


def keywords(command: Command) -> dict[str, Keyword]:
    """The keywords for a command: its options by their flags, and settings by their names."""
    table: dict[str, Keyword] = {}
    for name, parameter in signature(command).parameters.items():
        if name in PRINTING or parameter.kind is Parameter.VAR_KEYWORD:
            continue
        plain, info = get_args(parameter.annotation)[:2]
        kinds = tuple(kind for kind in get_args(plain) or (plain,) if kind is not type(None))
        if plain == list[str]:
            kinds = (plain,)
        about = Text.from_markup(info.help or "").plain
        # typer has the first flag of an annotation as `default`.
        flags = [flag for flag in (info.default, *(info.param_decls or ())) if _is_flag(flag)]
        names = [flag.split("/")[0].removeprefix("--").replace("-", "_") for flag in flags]
        keyword = Keyword(name, kinds, about)
        table |= dict.fromkeys(names or [name], keyword)
        if name in SETTINGS:
            table.setdefault(name, keyword)
    return table


def _is_flag(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("--")


def _call(
    command: Command,
    given: Mapping[str, Any],
    progress: bool,
    run: Callable[..., Any] | None = None,
) -> Any:
    """Runs a command, or `run` in its place, with keywords; raises UsageError for unknown ones."""
    try:
        call = _keyword_call(command, given)
        processes.settle_environment()
        with hide_messages(unless=progress), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, which shows no bar
            return (run or command)(call, **call.params)
    except RazorError as error:
        raise error.with_traceback(None)  # noqa: B904 - the same error, without our frames


def _keyword_call(command: Command, given: Mapping[str, Any]) -> KeywordCall:
    """The call of a command with the keywords `given`."""
    table, call = keywords(command), KeywordCall()
    recipe = given.get("recipe")
    if isinstance(recipe, Recipe):
        given = {**_settings(recipe), **{k: v for k, v in given.items() if k != "recipe"}}
    for name, value in given.items():
        if name not in table:
            raise unknown(f"keyword of {command.__name__}", name, table)
        parameter = table[name].parameter
        if parameter in call.params:
            raise UsageError(f"{name} is given twice, under two names; give it once.")
        if value is not None:
            call.params[parameter] = table[name].convert(name, value)
    return call


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe as keywords: its method, and all that is not its default."""
    return {
        each.name: value
        for each in fields(recipe)
        if (value := getattr(recipe, each.name)) != each.default or each.name == "method"
    }


def _with_keywords_of(command: Command) -> Callable[[Function], Function]:
    """Adds the keywords of a command to the signature and the docstring of a function."""

    def add_keywords(function: Function) -> Function:
        table = keywords(command)
        parameters = {
            name: each
            for name, each in signature(function).parameters.items()
            if each.kind is not Parameter.VAR_KEYWORD
        }
        for name in table:
            keyword = Parameter(name, Parameter.KEYWORD_ONLY, default=None)
            parameters.setdefault(name, keyword)
        function.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]
        lines = [f"    {name}: {each.help}".rstrip(": ") for name, each in table.items()]
        function.__doc__ = "\n".join([f"{function.__doc__}", *lines, ""])
        return function

    return add_keywords


@overload
def finetune(
    model: Job, dataset: Recipe | None = None, *, progress: Any = ..., **words: Any
) -> "Run": ...
@overload
def finetune(
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    **words: Any,
) -> Result: ...
@_with_keywords_of(finetuning.finetune)
def finetune(model: Any = None, dataset: Any = None, *, progress: Any = True, **words: Any) -> Any:
    """Fine-tunes a model on a data set, as `razorctl finetune` does, and returns its result.

    The result has the keys of `finetune --json`, and a table with curves in a notebook. Progress is
    shown unless `progress` is False. `result["run_dir"]` has the model, in the format of timm or
    transformers. Raises RazorError. `resume=True` continues an interrupted run.

    With a Job, and a Recipe or None, the function prepares a run and returns it: iterate over it to
    train, then call its `result`. `razorctl.training.run.finetune` lists the other arguments.

    The keywords are the options of the command:
    """
    if isinstance(model, Job):
        from razorctl.training import run

        if progress is not True:
            words["progress"] = progress
        if dataset is None:
            return run.finetune(model, **words)
        return run.finetune(model, dataset, **words)
    given = {"model": model, "dataset": dataset, **words}
    return Result.of_run(_call(finetuning.finetune, given, progress))


@overload
def plan(model: Job, dataset: Any, recipe: Recipe | None = None, **words: Any) -> "Plan": ...
@overload
def plan(
    model: str | os.PathLike[str] | None = None,
    dataset: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    **words: Any,
) -> Result: ...
@_with_keywords_of(planning.plan)
def plan(
    model: Any = None, dataset: Any = None, recipe: Any = None, progress: bool = True, **words: Any
) -> Any:
    """Plans how to train a model on a data set on a card, as `razorctl plan` does.

    The result has the keys of `plan --json`, and in a notebook it is the table of all ways. Raises
    NoFitError if nothing fits; its `document` has the ways that were tried.

    With a Job and a Gpu the function returns a Plan; see `razorctl.planning.plan.plan`.

    The keywords are the options of the command:
    """
    if isinstance(model, Job):
        from razorctl.planning import plan as planner

        return planner.plan(model, dataset, recipe, **words)
    given = {"model": model, "dataset": dataset, "recipe": recipe, **words}
    return Result.of_plan(_call(planning.plan, given, progress))


@_with_keywords_of(comparing.compare)
def compare(*what: str | os.PathLike[str], progress: bool = True, **words: Any) -> Result:
    """Compares methods on a model and a data set, or finished runs, as `razorctl compare` does.

    what: the model and the data set, or directories of runs and comparisons. The result has the
    keys of `compare --json`, and in a notebook it is the table with the plots of the report. The
    row of a run that fails has its error.

    The keywords are the options of the command:
    """
    given = {"what": [os.fspath(each) for each in what], **words}
    return Result.of_comparison(_call(comparing.compare, given, progress))


@_with_keywords_of(profiling.profile)
def profile(
    model: Any,
    dataset: Any = None,
    *,
    inputs: Any = None,
    forward: Callable[[Any, Any], Any] | None = None,
    progress: bool = True,
    **words: Any,
) -> Result:
    """Profiles a training step of a model by its name, or the bytes that any nn.Module keeps.

    With a name, as `razorctl profile` does: the result has the keys of `profile --json`, and in a
    notebook it is the tables of bytes by module and of times.

    With an nn.Module, `profile(model, inputs)` traces what each module keeps for backward: in full,
    and by the recipe of a sparsified model, or by the recipe that `sparsify` would apply. The model
    is neither run nor changed. Inputs are a tensor, a tuple of arguments or a mapping of keywords,
    real or on the meta device. The keywords are then a `recipe` or its settings, the `precision` of
    autocast, and `forward`, a function of the model and the inputs that runs the model and may
    compute a loss.

    The keywords are the options of the command:
    """
    if isinstance(model, (str, os.PathLike)):
        if inputs is not None or forward is not None:
            raise UsageError(
                "inputs are for an nn.Module; leave them out, or give the model itself."
            )
        given = {"model": model, "dataset": dataset, **words}
        return Result.of_profile(_call(profiling.profile, given, progress))
    from torch import nn

    inputs = dataset if inputs is None else inputs
    if not isinstance(model, nn.Module):
        raise UsageError(f"{type(model).__name__} is neither the name of a model nor an nn.Module.")
    run = partial(profiling.profile_module, net=model, inputs=inputs, forward=forward)
    return Result.of_profile(_call(profiling.profile, words, progress, run))
