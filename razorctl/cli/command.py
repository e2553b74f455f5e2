"""Options, and the class of a command, which suggests the nearest option for an unknown one."""

import re
from difflib import get_close_matches
from functools import partial
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

PREFIX = "RAZORCTL"  # prefix of environment variables


def option(
    help: str, default: Any = None, metavar: Any = None, flag: str = "", **settings: Any
) -> Any:
    """A typer option, whose help ends with `default`, if there is one.

    flag: the flag, if it is not the name's.
    """
    about = help if default is None else f"{help} [default: {default}]"
    # rich would read "[default: 1]" as markup and drop it.
    settings |= {"help": escape(about), "metavar": metavar, "show_envvar": False}
    return typer.Option(*([flag] if flag else ()), **settings)


def switch(flag: str, help: str, **settings: Any) -> Any:
    """The typer option of a bool that has no negation."""
    return option(help, metavar="", flag=flag, **settings)


def skip_unset_checks(command: Any, ctx: Any) -> None:
    """Skips the checks of options without a value, for which typer loads pydantic."""
    for each in command.get_params(ctx):
        check = each.process_value
        if not (isinstance(check, partial) or each.multiple or each.nargs == -1):
            each.process_value = partial(_value, each, check)


def _value(option: Any, check: Any, ctx: Any, value: Any) -> Any:
    if value is not None or option.required:
        return check(ctx, value)
    return option.callback(ctx, option, None) if option.callback else None


def usage(command: Any, ctx: Any) -> list[str]:
    """The pieces of a usage line; optional arguments are in brackets."""
    pieces = ["[OPTIONS]"]
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            name = each.display_name_raw
            if each.nargs != 1 and not name.endswith("..."):
                name += "..."
            pieces.append(name if each.required else f"[{name}]")
    return pieces


def format_help(command: Any, ctx: Any, formatter: Any) -> None:
    """Prints the help of a command, or of the application."""
    from razorctl.cli.views import help as view

    view.show(command, ctx)


class Command(TyperCommand):
    """A command that suggests the nearest option, by flag or setting, for an unknown one."""

    collect_usage_pieces = usage
    format_help = format_help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        skip_unset_checks(self, ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            from razorctl.registry import NEAR

            unknown = getattr(error, "option_name", None)
            if unknown and hasattr(error, "possibilities"):
                options = [each for each in self.params if each.param_type_name == "option"]
                flags = {str(each.name): each.opts[0] for each in options}
                flags |= {_bare(flag): flag for each in options for flag in each.opts}
                names = get_close_matches(_bare(unknown), flags, n=1, cutoff=NEAR)
                error.possibilities = [flags[name] for name in names]
            error.message = _reworded(error.message)
            raise


# Message of typer or pydantic about a value or an argument -> its replacement.
REWORDED = {
    r"Input should be a valid number.*": "it takes a number.",
    r"Input should be a valid integer.*": "it takes a whole number.",
    r"Input should be greater than or equal to (\d+)": r"it takes \1 or more.",
    r"Input should be less than or equal to (\d+)": r"it takes \1 or less.",
    r"Input should be a valid boolean.*": "it takes yes or no.",
    r"Got unexpected extra argument\(s\) \((.*)\)": r"Too many arguments: \1",
}


def _reworded(message: str) -> str:
    """An error message in words that need no knowledge of Python."""
    for pattern, words in REWORDED.items():
        message = re.sub(pattern, words, message, flags=re.DOTALL)
    return message


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
