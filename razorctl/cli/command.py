"""What every command is made of: options, and a class that names the nearest to an unknown one."""

import re
from difflib import get_close_matches
from functools import partial
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

PREFIX = "RAZORCTL"  # prefix of environment variables


def option(*flags: str, help: str, default: str | None = None, **settings: Any) -> Any:
    """A typer option whose help is shown exactly as written, with its default if that is said."""
    about = help if default is None else f"{help} [default: {default}]"
    # Escaped, since rich would read "[default: 1]" as markup and drop it.
    return typer.Option(*flags, help=escape(about), show_envvar=False, **settings)


def skip_unset_checks(command: Any, ctx: Any) -> None:
    """Lets no option of a command that is not given be checked, for which typer loads pydantic."""
    for each in command.get_params(ctx):
        checked = each.process_value
        if not (isinstance(checked, partial) or each.multiple or each.nargs == -1):
            each.process_value = partial(_value, each, checked)


def _value(option: Any, checked: Any, ctx: Any, value: Any) -> Any:
    if value is not None or option.required:
        return checked(ctx, value)
    return option.callback(ctx, option, None) if option.callback else None


def usage(command: Any, ctx: Any) -> list[str]:
    """The pieces of a usage line; in brackets stands what may be left out."""
    pieces = ["[OPTIONS]"]
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            name = each.display_name_raw
            name += "..." * (each.nargs != 1 and not name.endswith("..."))
            pieces.append(name if each.required else f"[{name}]")
    return pieces


class Command(TyperCommand):
    """Suggests the option whose flag, or whose setting, is nearest to one that it does not know."""

    collect_usage_pieces = usage

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from razorctl.cli.views import help as view

        view.show(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        skip_unset_checks(self, ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            from razorctl.config.registry import NEAR

            asked = getattr(error, "option_name", None)
            if asked and hasattr(error, "possibilities"):
                options = [each for each in self.params if each.param_type_name == "option"]
                known = {str(each.name): each.opts[0] for each in options}
                known |= {_bare(flag): flag for each in options for flag in each.opts}
                near = get_close_matches(_bare(asked), known, n=1, cutoff=NEAR)
                error.possibilities = [known[name] for name in near]
            error.message = _mended(error.message)
            raise


# What typer, and pydantic for it, say of a value or of arguments -> what is said here.
MENDED = {
    r"Input should be a valid number.*": "it takes a number.",
    r"Input should be a valid integer.*": "it takes a whole number.",
    r"Input should be greater than or equal to (\d+)": r"it takes \1 or more.",
    r"Input should be less than or equal to (\d+)": r"it takes \1 or less.",
    r"Input should be a valid boolean.*": "it takes yes or no.",
    r"Got unexpected extra argument\(s\) \((.*)\)": r"Got more than it takes: \1",
}


def _mended(message: str) -> str:
    """An error in words that need no knowledge of Python."""
    for found, said in MENDED.items():
        message = re.sub(found, said, message, flags=re.DOTALL)
    return message


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
