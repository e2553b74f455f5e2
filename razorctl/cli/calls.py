"""Calls of the library's functions, by a Python program or by a command."""

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import wraps
from inspect import formatannotation, signature
from typing import Any, TypeVar, cast, get_args

from razorctl.cli.settings import GIVEN, Call, is_given
from razorctl.cli.views.common import hide_messages
from razorctl.config.recipe import Recipe
from razorctl.config.settings import check_type, types_in
from razorctl.errors import RazorError, UsageError
from razorctl.registry import unknown
from razorctl.system import processes

Function = TypeVar("Function", bound=Callable[..., Any])
# The call of the command that calls a function. A Python program has none: neither a settings file
# nor the environment sets anything there.
COMMAND: ContextVar[Call | None] = ContextVar("COMMAND", default=None)


def public(function: Function) -> Function:
    """A function of the library: it checks its keywords, and prints messages if `progress` is true.

    `help` lists all that its `**settings` takes, each with its type. An error has no frames of
    razorctl's, unless a command calls the function, whose --debug shows them.
    """

    @wraps(function)
    def shown(*args: Any, **keywords: Any) -> Any:
        try:
            keywords = _checked(function, args, keywords)
            processes.resolve_environment()
            with hide_messages(unless=keywords.get("progress", True)), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, without a bar
                return function(*args, **keywords)
        except RazorError as error:
            raise error if COMMAND.get() else error.with_traceback(None)  # noqa: B904

    lines = [
        f"        {name}: {formatannotation(kind)}" for name, kind in types(function)[1].items()
    ]
    shown.__doc__ = "\n".join([f"{function.__doc__}", "    Settings:", *lines, "    "])
    return cast(Function, shown)


def types(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword -> its type: the function's own keywords, and those of its `**settings`."""
    parameters = dict(signature(function).parameters)
    (settings,) = get_args(parameters.pop("settings").annotation)
    own = {n: p.annotation for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}
    return own, settings.__annotations__


def _checked(
    function: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords with texts in place of sequences; raises UsageError for unknown or wrong values."""
    own, settings = types(function)
    for name, value in signature(function).bind_partial(*args).arguments.items():
        check_type(name, value, own.get(name, object))
    checked = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in own | settings:
            raise unknown(f"keyword of {function.__name__}", name, own | settings)
    for name, value in checked.items():
        if name in own:
            check_type(name, value, own[name])
        elif isinstance(value, Sequence) and not isinstance(value, str):
            checked[name] = ",".join(map(str, value))  # a Job or a Recipe checks it
        elif str in types_in(settings[name]) and type(value) in (int, float):
            checked[name] = str(value)
    if "lr" in checked:
        if "learning_rate" in checked:
            raise UsageError("learning_rate is given twice, under two names; give it once.")
        checked["learning_rate"] = checked.pop("lr")
    return checked


def call(settings: Mapping[str, Any], recipe: Any = None, **more: Any) -> Call:
    """The call of a function with its settings, of which None is none, and a recipe or preset."""
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in {**settings, **more}.items()
        if value is not None
    }
    made = COMMAND.get() or Call()
    if not isinstance(recipe, Recipe):
        return replace(made, given=given, preset=recipe and os.fspath(recipe))
    values = {each.name: (getattr(recipe, each.name), each.default) for each in fields(recipe)}
    values = {k: v for k, (v, default) in values.items() if v != default or k == "method"}
    return replace(made, given={**values, **given})


def run(
    ctx: Any,
    function: Callable[..., Any],
    *arguments: Any,
    sources: Collection[str] = GIVEN,
    **keywords: Any,
) -> Any:
    """Calls a function with all that is set for a command by the sources, and with `keywords`."""
    own, settings = types(function)
    names = [each.name for each in ctx.command.params if each.name in own | settings]
    given = {name: ctx.params[name] for name in names if is_given(ctx, name, sources)}
    token = COMMAND.set(Call.typed(ctx))
    try:
        return function(*arguments, **{**given, **keywords})
    finally:
        COMMAND.reset(token)
