"""The application: its commands, its global options, and exit codes."""

import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from razorctl.cli.command import PREFIX, Command, format_help, option, skip_unset_checks, switch
from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import clean, safe_streams
from razorctl.errors import (
    ElsewhereError,
    OutOfMemoryError,
    RazorError,
    Terminated,
    UsageError,
    first_line,
    lacks_memory,
)
from razorctl.system import processes
from razorctl.system.quiet import hush
from razorctl.training.signals import termination_raises
from razorctl.version import __version__

PROJECT_FILE = Path("razorctl.toml")
INTERRUPTED = 130
# Rounds that an idle thread of OpenMP spins before it sleeps; torch's default is far more. Beside a
# busy core a step takes half of the time with this value, and on idle cores as much as before.
SPINS = "3000"
CONTEXT = {"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
# Command -> the first line of its help; `--help` loads no command.
COMMANDS = {
    "plan": "Predict the memory and time of each way to train MODEL on DATASET, and choose one.",
    "finetune": "Fine-tune MODEL on DATASET and write the run to a directory.",
    "evaluate": "Evaluate a finished RUN on DATASET, or on the held-out rows of its own data.",
    "predict": "Predict labels, texts, boxes, vectors or masks for FILES with a finished RUN.",
    "chat": "Chat with the language model of a finished RUN.",
    "export": "Export the model of a finished RUN for other tools, or push it to the hub.",
    "profile": "Show the memory and time of a training step of MODEL, by layer and by phase.",
    "compare": "Compare methods on MODEL and DATASET, or compare finished runs.",
    "doctor": "Check this machine: versions, GPUs, kernels, folders and the hub.",
    "list": "List models, data sets, methods, GPUs and recipes, or describe one KIND.",
}
FUNCTIONS = {"list": "list_names"}  # command -> its function, if it has another name


class Group(TyperGroup):
    """A group that prints an error as one sentence, and exits with the code of its class."""

    format_help = format_help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        skip_unset_checks(self, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, *args: Any) -> Any:
        name, command, rest = super().resolve_command(*args)
        return name, loaded(name) if name in COMMANDS else command, rest

    def main(self, *args: Any, **settings: Any) -> Any:
        views.err.spoke = False
        hush()
        with safe_streams(views.say, views.error):
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
                raise typer.Exit(error.exit_code) from None  # the first process prints it
            if ctx.params.get("debug"):
                raise
            if not processes.first():
                views.unmute()
            sentence, code = _told(error)
            views.error(sentence)
            raise typer.Exit(code) from None


def _ending(word: str, stop: BaseException) -> str:
    """The sentence for a stopped command; the notes of `stop` name the files that it leaves."""
    return f"{': '.join([word, *getattr(stop, '__notes__', [])])}."


def _told(error: Exception) -> tuple[str, int]:
    """The sentence and the exit code of an error."""
    if isinstance(error, RazorError):
        return str(error), error.exit_code
    if lacks_memory(error):
        what = "device" if type(error).__name__ == "OutOfMemoryError" else "machine"
        sentence = f"the {what} is out of memory; raise --ratio or lower --batch-size."
        return sentence, OutOfMemoryError.exit_code
    return f"{first_line(error)} (razorctl --debug shows the traceback)", 1


@cache
def loaded(name: str) -> Any:
    """The command of that name; its module is imported on the first call."""
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command = getattr(import_module(f"razorctl.cli.{name}"), FUNCTIONS.get(name, name))
    one.command(name, cls=Command, context_settings=CONTEXT)(command)
    return typer.main.get_command(one)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)
for name, summary in COMMANDS.items():
    app.command(name, help=summary)(lambda: None)  # `loaded` replaces it


def _version(wanted: bool) -> None:
    if wanted:
        views.out.print(f"razorctl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        option("TOML file of settings, such as a run's config.toml.", "razorctl.toml", "FILE"),
    ] = None,
    debug: Annotated[bool, switch("--debug", "Show tracebacks.")] = False,
    version: Annotated[
        bool, switch("--version", "Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tune all weights of pretrained models on consumer GPUs.

    The forward pass is unchanged. For the backward pass, method razor stores a few activations in
    a few bits and recomputes the others, so its gradient is approximate.
    """
    processes.resolve_environment()
    if not processes.first():
        views.mute()
    if processes.count() > 1 and ctx.invoked_subcommand != "finetune":
        raise UsageError("only finetune runs in several processes; start this without torchrun.")
    if any(name.startswith(f"{PREFIX}_") for name in os.environ):
        from razorctl.cli import effects

        effects.note_variables((ctx.command, *map(loaded, COMMANDS)))
    file = config or (PROJECT_FILE if PROJECT_FILE.exists() else None)
    if file is not None:
        from razorctl.cli import settings

        ctx.obj = settings.settings_of_file(file)
        ctx.default_map = dict.fromkeys(COMMANDS, ctx.obj)


def _uncaught(*error: Any) -> None:
    """Prints a traceback as Python does, without characters that control a terminal."""
    import traceback

    sys.stderr.write(clean("".join(traceback.format_exception(*error))))


def run() -> None:
    """The console script."""
    sys.excepthook = _uncaught
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # plugins of other packages may fail
    if processes.count() > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each would print the same
    if not any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    app()
