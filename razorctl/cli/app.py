"""The application: its commands, the options before them, and errors as exit codes."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from razorctl import __version__
from razorctl.cli import effects, settings
from razorctl.cli.compare import compare
from razorctl.cli.finetune import finetune
from razorctl.cli.list import list_names
from razorctl.cli.options import option
from razorctl.cli.plan import plan
from razorctl.cli.profile import profile
from razorctl.cli.views import common as views
from razorctl.errors import RazorError, Terminated
from razorctl.training.signals import sigterm_raises

INTERRUPTED, OUT_OF_MEMORY = 130, 4
CONTEXT = {"auto_envvar_prefix": settings.PREFIX, "help_option_names": ["-h", "--help"]}


class Group(TyperGroup):
    """Turns errors into one sentence and the exit code that stands for their kind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with sigterm_raises():
                return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            views.error(_ending("interrupted", stop))
            raise typer.Exit(INTERRUPTED) from None
        except Terminated as stop:
            views.error(_ending("terminated", stop))
            raise
        except Exception as error:
            if ctx.params.get("debug") or _nobody_reads(error):
                raise
            views.error(_sentence(error))
            raise typer.Exit(_exit_code(error)) from None


def _nobody_reads(error: Exception) -> bool:
    """Whether that is because who read our output has read enough, which typer ends in silence."""
    if isinstance(error, BrokenPipeError):
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return True
    return False


def _ending(word: str, stop: BaseException) -> str:
    """That a command was stopped, and what that leaves, which stands in the notes."""
    return f"{': '.join([word, *getattr(stop, '__notes__', [])])}."


def _exit_code(error: Exception) -> int:
    if isinstance(error, RazorError):
        return error.exit_code
    return OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else 1


def _sentence(error: Exception) -> str:
    if isinstance(error, RazorError):
        return str(error)
    if _exit_code(error) == OUT_OF_MEMORY:
        return "the device is out of memory; raise --ratio or lower --batch-size."
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{reason} (razorctl --debug shows where)"


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
for command in (plan, finetune, profile, compare):
    app.command(context_settings=CONTEXT)(command)
app.command("list", context_settings=CONTEXT)(list_names)


def _version(wanted: bool) -> None:
    if wanted:
        views.out.print(f"razorctl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        option(help="Settings in TOML, such as a run's config.toml. [default: razorctl.toml]"),
    ] = None,
    debug: Annotated[bool, option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune whole pretrained models on consumer GPUs.

    The forward pass stays exact; only what the gradient needs is saved for the backward pass.
    """
    effects.note_variables(ctx)
    file = config or (settings.PROJECT_FILE if settings.PROJECT_FILE.exists() else None)
    if file is not None and isinstance(ctx.command, TyperGroup):
        ctx.obj = settings.of_file(file)
        ctx.default_map = dict.fromkeys(ctx.command.commands, ctx.obj)


def run() -> None:
    """The console script."""
    app()
