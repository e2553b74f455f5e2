"""`razorctl chat`."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from razorctl.cli.options import Device, DrawSeed, NewTokens, RunArgument, Temperature, Weights
from razorctl.cli.predicting import NEW_TOKENS
from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import data_stream, stdin_lines
from razorctl.errors import DataError, UsageError

# Functions below import what --help does not need.
if TYPE_CHECKING:
    from razorctl.training.predicting.continuations import Dialog

EXIT = "/exit"


def chat(
    run: RunArgument,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    seed: DrawSeed = None,
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Chat with the language model of a finished RUN.

        razorctl chat runs/chat

    Each answer appears token by token, and later answers know the conversation so
    far. Ctrl-C stops an answer; /exit or Ctrl-D ends the chat. If the tokenizer has
    no chat template, the text so far is continued.

    Without a terminal, each line of stdin is a message, and the answers alone are
    printed, without /exit.
    """
    from razorctl.training import run_files

    _, job = run_files.finished_run(run)
    if job.task != "causal-lm":
        raise UsageError(
            f"{run} is for {job.task or 'classification'}, and chat needs a run for causal-lm; "
            "give such a run texts or files with `razorctl predict`."
        )
    with views.status(f"loading {run}"):
        from razorctl.training.predicting import continuations, inference

        trained = inference.load(run, weights=weights, device=device)
        settings = max_new_tokens or NEW_TOKENS, temperature or 0.0, seed or 0
        dialog = continuations.Dialog(trained, *settings)
    if not dialog.templated:
        views.note(f"the tokenizer of {run} has no chat template; texts are continued as they are.")
    if not sys.stdin or not sys.stdin.isatty():
        for text in filter(str.strip, stdin_lines()):
            _answer(dialog, text)
        return
    views.say(f"{EXIT} or Ctrl-D ends the chat, Ctrl-C stops an answer")
    for text in _typed():
        try:
            _answer(dialog, text)
        except KeyboardInterrupt:
            views.say("")  # the terminal shows ^C
        except DataError as error:
            views.error(str(error))


def _answer(dialog: "Dialog", text: str) -> None:
    """Prints the answer to a text, piece by piece."""
    stream = data_stream()

    def write(piece: str) -> None:
        stream.write(piece)
        stream.flush()

    dialog.answer(text, write)
    write("\n")


def _typed() -> Iterator[str]:
    """The lines that a user types, up to EXIT or Ctrl-D."""
    with suppress(ImportError):  # as on Windows
        import readline  # noqa: F401  # input() then edits lines, and knows the earlier ones

    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:  # which may come just after an answer
            views.say("")
            continue
        except EOFError:
            views.say("")
            return
        if text == EXIT:
            return
        if text:
            yield text
