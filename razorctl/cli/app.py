"""The application: its commands, its global options, and the exit code of each error."""

import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from razorctl import __version__, processes
from razorctl.cli import effects, settings
from razorctl.cli.compare import compare
from razorctl.cli.doctor import doctor
from razorctl.cli.evaluate import evaluate
from razorctl.cli.finetune import finetune
from razorctl.cli.list import list_names
from razorctl.cli.options import option
from razorctl.cli.plan import plan
from razorctl.cli.predict import predict
from razorctl.cli.profile import profile
from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import clean, shown
from razorctl.config.registry import NEAR
from razorctl.errors import ElsewhereError, RazorError, Terminated, UsageError
from razorctl.training.signals import termination_raises

INTERRUPTED, OUT_OF_MEMORY = 130, 4
# Rounds in which a thread of OpenMP waits for others before it sleeps; torch's would go on for much
# longer. No step on idle cores is slower, and beside a busy core one takes half of the time.
SPINS = "3000"
CONTEXT = {"auto_envvar_prefix": settings.PREFIX, "help_option_names": ["-h", "--help"]}


class Group(TyperGroup):
    """Prints an error as one sentence and exits with the code of its kind."""

    def main(self, *args: Any, **settings: Any) -> Any:
        with shown(views.say):
            return super().main(*args, **settings)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*args, **settings)
        except typer.TyperException as error:
            error.message = clean(error.message)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            with termination_raises():
                return super().invoke(ctx)
        except typer.TyperException as error:
            error.message = clean(error.message)
            raise
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            views.error(_ending("interrupted", stop))
            raise typer.Exit(INTERRUPTED) from None
        except Terminated as stop:
            views.error(_ending("terminated", stop))
            raise
        except Exception as error:
            if isinstance(error, ElsewhereError) and not processes.first():
                raise typer.Exit(error.exit_code) from None  # the first process says it
            if ctx.params.get("debug") or _stdout_closed(error):
                raise
            if not processes.first():
                views.unmute()
            views.error(_sentence(error))
            for line in getattr(error, "details", ()):
                views.say(f"  {line}")
            raise typer.Exit(_exit_code(error)) from None


def _stdout_closed(error: Exception) -> bool:
    """Whether the error is a broken pipe of stdout, on which typer exits without a message."""
    if isinstance(error, BrokenPipeError):
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return True
    return False


def _ending(word: str, stop: BaseException) -> str:
    """The sentence for a stopped command; the notes of `stop` say what the command has written."""
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


class Command(TyperCommand):
    """Suggests the option whose flag, or whose setting, is nearest to one that it does not know."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            asked = getattr(error, "option_name", None)
            if asked and hasattr(error, "possibilities"):
                options = [each for each in self.params if each.param_type_name == "option"]
                known = {str(each.name): each.opts[0] for each in options}
                known |= {_bare(flag): flag for each in options for flag in each.opts}
                near = get_close_matches(_bare(asked), known, n=1, cutoff=NEAR)
                error.possibilities = [known[name] for name in near]
            raise


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
for command in (plan, finetune, evaluate, predict, profile, compare, doctor):
    app.command(cls=Command, context_settings=CONTEXT)(command)
app.command("list", cls=Command, context_settings=CONTEXT)(list_names)


def _version(wanted: bool) -> None:
    if wanted:
        views.out.print(f"razorctl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        option(help="TOML file of settings, such as a run's config.toml. [default: razorctl.toml]"),
    ] = None,
    debug: Annotated[bool, option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune whole pretrained models on consumer GPUs.

    The forward pass stays exact; only what the gradient needs is saved for the backward pass.
    """
    processes.settle_environment()
    if not processes.first():
        views.mute()
    if processes.count() > 1 and ctx.invoked_subcommand != "finetune":
        raise UsageError("only finetune runs in several processes; start this without torchrun.")
    effects.note_variables(ctx)
    file = config or (settings.PROJECT_FILE if settings.PROJECT_FILE.exists() else None)
    if file is not None and isinstance(ctx.command, TyperGroup):
        ctx.obj = settings.of_file(file)
        ctx.default_map = dict.fromkeys(ctx.command.commands, ctx.obj)


def _uncaught(*error: Any) -> None:
    """Prints a traceback, as Python does, but for characters that control a terminal."""
    sys.stderr.write(clean("".join(traceback.format_exception(*error))))


def run() -> None:
    """The console script."""
    sys.excepthook = _uncaught
    if processes.count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each process would warn of the same
    if not any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    app()
