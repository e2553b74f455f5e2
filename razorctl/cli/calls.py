"""Calls of the functions of `razorctl.api`, by a Python program or by a command."""

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
from razorctl.errors import ArgumentTypeError, RazorError, UsageError
from razorctl.registry import unknown
from razorctl.system import processes

Function = TypeVar("Function", bound=Callable[..., Any])
# The call of the current command. A Python program has none, so that neither a settings file nor
# the environment sets anything.
COMMAND: ContextVar[Call | None] = ContextVar("COMMAND", default=None)


def public(function: Function) -> Function:
    """Decorates a function of the library: keywords are checked, `progress` shows messages.

    Its help lists the keywords of `**settings` with their types. An error has no frames of
    razorctl, except in a command, whose --debug shows them.
    """

    @wraps(function)
    def shown(*args: Any, **keywords: Any) -> Any:
        try:
            keywords = _checked(function, args, keywords)
            processes.resolve_environment()
            with hide_messages(unless=keywords.get("progress", True)), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, without a bar
                return function(*args, **keywords)
        except RazorError as error:
            raise error if COMMAND.get() else error.with_traceback(None)  # noqa: B904

    lines = [
        f"        {name}: {formatannotation(kind)}" for name, kind in types(function)[1].items()
    ]
    if lines:
        shown.__doc__ = "\n".join([f"{function.__doc__}", "    Settings:", *lines, "    "])
    return cast(Function, shown)


def types(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword -> type, for the named keywords of a function and for its `**settings`."""
    parameters = dict(signature(function).parameters)
    settings = parameters.pop("settings", None)
    named = {n: p.annotation for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL}
    return named, {} if settings is None else get_args(settings.annotation)[0].__annotations__


def _checked(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords that are not None; a sequence becomes a text with commas.

    Raises UsageError for an unknown keyword, and for a value of another type.
    """
    named, settings = types(function)
    for name, value in signature(function).bind_partial(*args).arguments.items():
        _check(function, name, value, named.get(name, object))
    checked = {name: value for name, value in keywords.items() if value is not None}
    for name in keywords:
        if name not in named | settings:
            raise unknown(f"keyword of {function.__name__}", name, named | settings)
    for name, value in checked.items():
        if name in named:
            _check(function, name, value, named[name])
        elif isinstance(value, Sequence) and not isinstance(value, str):
            checked[name] = ",".join(map(str, value))  # a Job or a Recipe checks it
        elif str in types_in(settings[name]) and type(value) in (int, float):
            checked[name] = str(value)
    if "lr" in checked:
        if "learning_rate" in checked:
            raise UsageError("learning_rate is given twice, under two names; give it once.")
        checked["learning_rate"] = checked.pop("lr")
    return checked


def _check(function: Callable[..., Any], name: str, value: Any, annotation: Any) -> None:
    """Raises ArgumentTypeError for a value of another type; for a model it says what to call."""
    if name == "model" and annotation != "Name | nn.Module":
        model_name(value, function.__name__)
    else:
        check_type(name, value, annotation)


def model_name(model: Any, function: str) -> str | None:
    """The name of a model; raises ArgumentTypeError for anything else, such as a module."""
    if model is None or isinstance(model, (str, os.PathLike)):
        return None if model is None else str(os.fspath(model))
    raise ArgumentTypeError(
        f"{function} takes the name or folder of a model, not a {type(model).__name__}; for a "
        "module of your own use razorctl.sparsify in your loop."
    )


def call(settings: Mapping[str, Any], recipe: Any = None, **more: Any) -> Call:
    """The call with the settings that are not None, which override a recipe.

    recipe: a Recipe, or the name or file of a preset.
    """
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in {**settings, **more}.items()
        if value is not None
    }
    command = COMMAND.get() or Call()
    if not isinstance(recipe, Recipe):
        return replace(command, given=given, preset=recipe and os.fspath(recipe))
    values = {
        each.name: value
        for each in fields(recipe)
        if (value := getattr(recipe, each.name)) != each.default or each.name == "method"
    }
    return replace(command, given={**values, **given})


def run(
    ctx: Any,
    function: Callable[..., Any],
    *arguments: Any,
    sources: Collection[str] = GIVEN,
    **keywords: Any,
) -> Any:
    """Calls a function with the parameters of a command that the sources set, and `keywords`."""
    named, settings = types(function)
    names = [each.name for each in ctx.command.params if each.name in named | settings]
    given = {name: ctx.params[name] for name in names if is_given(ctx, name, sources)}
    token = COMMAND.set(Call.typed(ctx))
    try:
        return function(*arguments, **{**given, **keywords})
    finally:
        COMMAND.reset(token)
