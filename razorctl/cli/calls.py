"""The commands as functions of Python: they take the words of the command line and give results.

The words are the options that the commands declare, with underscores; nothing is declared here. A
call says all: razorctl.toml and the variables of the environment that set options do not count.
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

from razorctl import processes
from razorctl.cli import compare as comparing
from razorctl.cli import finetune as finetuning
from razorctl.cli import plan as planning
from razorctl.cli import profile as profiling
from razorctl.cli.options import Command
from razorctl.cli.results import Result
from razorctl.cli.settings import GIVEN
from razorctl.cli.views.common import hide_messages
from razorctl.config.registry import unknown
from razorctl.errors import RazorError, UsageError
from razorctl.job import Job
from razorctl.recipe import Recipe

if TYPE_CHECKING:
    from razorctl.planning.plan import Plan
    from razorctl.training.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])
OF_PRINTING = ("ctx", "json", "csv", "explain")  # parameters of commands that change what is shown
OF_SETTINGS = {each.name for kind in (Job, Recipe) for each in fields(kind)}


@dataclass(frozen=True)
class Keyword:
    """A word of a call: the parameter of the command that it is, the types of it, and its help."""

    parameter: str
    kinds: tuple[Any, ...]
    help: str

    def fitted(self, name: str, value: Any) -> Any:
        """A value as the command line would give it; raises UsageError for another type."""
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
        allowed = self.kinds + (int,) * (float in self.kinds)
        if self.parameter in OF_SETTINGS or type(value) in allowed:
            return value  # a Job or a Recipe checks its own
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in self.kinds)
        raise UsageError(f"{name} {value!r} is not of type {names}; give one that is.")


@dataclass
class KeywordCall:
    """A call of a command in which all parameters are given; see `settings.Call`."""

    params: dict[str, Any] = field(default_factory=dict)
    obj: None = None

    def get_parameter_source(self, name: str) -> Any:
        return SimpleNamespace(name=GIVEN[0]) if name in self.params else None

    def find_root(self) -> "KeywordCall":
        return self


def keywords(command: Command) -> dict[str, Keyword]:
    """The words that a command takes: its options by their flags, and settings by their names."""
    found: dict[str, Keyword] = {}
    for name, parameter in signature(command).parameters.items():
        if name in OF_PRINTING or parameter.kind is Parameter.VAR_KEYWORD:
            continue
        plain, info = get_args(parameter.annotation)[:2]
        kinds = tuple(kind for kind in get_args(plain) or (plain,) if kind is not type(None))
        if plain == list[str]:
            kinds = (plain,)
        about = Text.from_markup(info.help or "").plain
        told = (info.default, *(info.param_decls or ()))  # in an annotation the first is a flag too
        flags = [flag.split("/")[0] for flag in told if str(flag).startswith("--")]
        bare = [flag.removeprefix("--").replace("-", "_") for flag in flags]
        word = Keyword(name, kinds, about)
        found |= dict.fromkeys(bare or [name], word)
        if name in OF_SETTINGS:
            found.setdefault(name, word)
    return found


def _call(command: Command, run: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Runs a command with the words of a call; raises UsageError for unknown ones."""
    try:
        call = _keyword_call(command, given)
        processes.settle_environment()
        with warnings.catch_warnings():
            # Of tqdm, whose bars are not shown.
            warnings.filterwarnings("ignore", "IProgress not found")
            return run(call, **call.params)
    except RazorError as error:
        raise error.with_traceback(None)  # noqa: B904 - it is the same; where it is from is no help


def _keyword_call(command: Command, given: Mapping[str, Any]) -> KeywordCall:
    """A call of a command with these words."""
    known, call = keywords(command), KeywordCall()
    recipe = given.get("recipe")
    if isinstance(recipe, Recipe):
        given = {**_settings(recipe), **{k: v for k, v in given.items() if k != "recipe"}}
    for name, value in given.items():
        if name not in known:
            raise unknown(f"keyword of {command.__name__}", name, known)
        parameter = known[name].parameter
        if parameter in call.params:
            raise UsageError(f"{name} is given twice, by two of its names; give it once.")
        if value is not None:
            call.params[parameter] = known[name].fitted(name, value)
    return call


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe as words: its method and what is not by default."""
    return {
        each.name: value
        for each in fields(recipe)
        if (value := getattr(recipe, each.name)) != each.default or each.name == "method"
    }


def _as(command: Command) -> Callable[[Function], Function]:
    """Shows the words of a command in the signature and in the help of a function."""

    def shown(function: Function) -> Function:
        known = keywords(command)
        own = [
            each
            for each in signature(function).parameters.values()
            if each.kind is not Parameter.VAR_KEYWORD
        ]
        names = [name for name in known if name not in {each.name for each in own}]
        more = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]
        function.__signature__ = Signature([*own, *more])  # type: ignore[attr-defined]
        lines = [f"    {name}: {word.help}".rstrip(": ") for name, word in known.items()]
        function.__doc__ = "\n".join([f"{function.__doc__}", *lines, ""])
        return function

    return shown


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
@_as(finetuning.finetune)
def finetune(model: Any = None, dataset: Any = None, *, progress: Any = True, **words: Any) -> Any:
    """Fine-tunes a model on a data set, as `razorctl finetune` does, and returns its result.

    The result has the keys of `finetune --json`, and a table with curves in a notebook. Progress is
    shown unless `progress` is False. The model is in `result["run_dir"]`, as timm or transformers
    load it. Raises RazorError; an interrupted run is saved, and goes on with `resume=True`.

    With a Job, and a Recipe or None, it prepares the run and returns it: iterate to train, then
    call its `result`. What else it takes then is in `razorctl.training.run.finetune`.

    The keywords are the options of the command:
    """
    if isinstance(model, Job):
        from razorctl.training import run

        more = words if progress is True else {**words, "progress": progress}
        return run.finetune(model, *(() if dataset is None else (dataset,)), **more)
    given = {"model": model, "dataset": dataset, **words}
    with hide_messages(unless=progress):
        found = _call(finetuning.finetune, finetuning.run_finetune, given)
    return Result.of_run(found)


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
@_as(planning.plan)
def plan(
    model: Any = None, dataset: Any = None, recipe: Any = None, progress: bool = True, **words: Any
) -> Any:
    """Plans how to train a model on a data set on a card, as `razorctl plan` does.

    The result has the keys of `plan --json`, and in a notebook it is the table of all ways. Raises
    NoFitError, whose `document` has the ways that were tried, if nothing fits.

    With a Job and a Gpu it returns a Plan; see `razorctl.planning.plan.plan`.

    The keywords are the options of the command:
    """
    if isinstance(model, Job):
        from razorctl.planning import plan as planner

        return planner.plan(model, dataset, recipe, **words)
    given = {"model": model, "dataset": dataset, "recipe": recipe, **words}
    with hide_messages(unless=progress):
        return Result.of_plan(_call(planning.plan, planning.run_plan, given))


@_as(comparing.compare)
def compare(*what: str | os.PathLike[str], progress: bool = True, **words: Any) -> Result:
    """Compares methods on a model and a data set, or finished runs, as `razorctl compare` does.

    what: the model and the data set, or directories of runs and comparisons. The result has the
    keys of `compare --json`, and in a notebook the table, and the plots of the report. A run that
    fails has its error in its row.

    The keywords are the options of the command:
    """
    with hide_messages(unless=progress):
        given = {"what": [os.fspath(each) for each in what], **words}
        found = _call(comparing.compare, comparing.run_compare, given)
        if words.get("html") is not None:
            comparing.write_report(Path(words["html"]), found, words.get("target"))
    return Result.of_comparison(found)


@_as(profiling.profile)
def profile(
    model: Any,
    dataset: Any = None,
    *,
    inputs: Any = None,
    forward: Callable[[Any, Any], Any] | None = None,
    progress: bool = True,
    **words: Any,
) -> Result:
    """Profiles a training step of a model by its name, or the bytes of any nn.Module.

    By its name, as `razorctl profile` does: the result has the keys of `profile --json`, and in a
    notebook it is the tables of bytes by module, and of times.

    Of an nn.Module, `profile(model, inputs)` gives what each module keeps for backward: by the
    recipe of a model that is sparsified, or as `sparsify` would make it, and in full. It is traced,
    and nothing is run or changed. Inputs are a tensor, a tuple of arguments or a mapping of
    keywords, real or on the meta device. Keywords are then a `recipe` or its settings, the
    `precision` of a step under autocast, and `forward`, a function of the model and the inputs that
    runs it, and may compute a loss.

    The keywords are the options of the command:
    """
    if isinstance(model, (str, os.PathLike)):
        if inputs is not None or forward is not None:
            raise UsageError(
                "inputs are for an nn.Module; leave them out, or give the model itself."
            )
        given = {"model": model, "dataset": dataset, **words}
        with hide_messages(unless=progress):
            return Result.of_profile(_call(profiling.profile, profiling.run_profile, given))
    from torch import nn

    inputs = dataset if inputs is None else inputs
    if not isinstance(model, nn.Module):
        raise UsageError(f"{type(model).__name__} is neither the name of a model nor an nn.Module.")
    own = partial(profiling.profile_module, net=model, inputs=inputs, forward=forward)
    with hide_messages(unless=progress):
        return Result.of_profile(_call(profiling.profile, own, words))
