"""Commands print no character that controls a terminal, in any encoding."""

import csv
import io
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table
from typer.testing import CliRunner

from razorctl.cli import predict as predicting
from razorctl.cli.app import COMMANDS as EVERY
from razorctl.cli.app import _uncaught, app
from razorctl.cli.views import common as views
from razorctl.cli.views import predict as view
from razorctl.cli.views import terminal
from razorctl.errors import UsageError
from razorctl.system import c_compiler, processes
from tests.cli.commands import PLANNED, QUICK, razorctl
from tests.own import photos

EVIL = "a\x1b]0;t\x07\x1b[2J\x9b31m\u202eb\u2066c\x7f\r"
# All of C0 but tabs and line feeds, DEL, C1, what separates lines or turns a text round.
BAD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def evil(tmp_path_factory) -> Path:
    """Images whose classes and folder have evil names, and a run on them in such a directory."""
    from tests.models import registered

    top = tmp_path_factory.mktemp("evil")
    photos(top / f"d{EVIL}", 6, (f"x{EVIL}", f"y{EVIL}"))
    words = ["finetune", "vit-micro", str(top / f"d{EVIL}"), *QUICK, "--batch-size", "4"]
    with registered(shallow=True):
        done = CliRunner().invoke(app, [*words, "--out", str(top / f"run{EVIL}")])
    assert done.exit_code == 0, done.stderr
    assert not BAD.search(done.output)
    return top


COMMANDS = {
    "evaluate": ["evaluate", "RUN", "--device", "cpu"],
    "evaluate DATA": ["evaluate", "RUN", "DATA", "--device", "cpu"],
    "evaluate json": ["evaluate", "RUN", "--json", "--device", "cpu"],
    "predict": ["predict", "RUN", "DATA", "--device", "cpu", "--probabilities"],
    "predict json": ["predict", "RUN", "DATA", "--device", "cpu", "--json"],
    "predict nothing": ["predict", "RUN", f"no{EVIL}"],
    "compare": ["compare", "RUN"],
    "compare csv": ["compare", "RUN", "--csv"],
    "compare html": ["compare", "RUN", "--html", "r.html"],
    "resume": ["finetune", "--resume", "--out", "RUN"],
    "finetune again": ["finetune", "vit-micro", "DATA", "--out", "RUN"],
    "finetune nothing": ["finetune", "vit-micro", f"no{EVIL}"],
    "plan": ["plan", "vit-micro", "DATA", "--gpu", "t4", "--batch-size", "4", "--max-ratio", "0.5"],
    "plan nothing": ["plan", f"no{EVIL}", "digits"],
    "profile": ["profile", f"no{EVIL}"],
    "list": ["list", f"no{EVIL}"],
    "a usage error": ["predict", "RUN", "DATA", "--top", f"1{EVIL}"],
    "no such command": [f"no{EVIL}"],
    "no such option": ["plan", f"--no{EVIL}"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_controls_the_terminal(command, evil, monkeypatch):
    named = {"RUN": str(evil / f"run{EVIL}"), "DATA": str(evil / f"d{EVIL}")}
    monkeypatch.setattr(terminal._DataStream, "__init__", on_a_terminal)
    done = razorctl(*(named.get(word, word) for word in COMMANDS[command]))
    assert not BAD.search(done.output), ascii(done.output)
    assert done.exit_code in (0, 2), done.output
    if command not in ("compare csv", "a usage error"):  # they say nothing of others
        assert "]0;t" in re.sub(r"[\s│]", "", done.output)
    if command == "compare html":
        assert not BAD.search(Path("r.html").read_text())


def on_a_terminal(self, stream) -> None:
    self._stream, self._terminal = stream, True


def test_data_that_no_terminal_shows_are_as_they_are(evil):
    done = razorctl("predict", str(evil / f"run{EVIL}"), str(evil / f"d{EVIL}"), "--device", "cpu")
    assert f"x{EVIL}" in done.stdout.replace('"', "")


def test_every_way_to_say_something_is_clean(capsys, monkeypatch):
    every = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066, 0xD800]))
    text = f"a{every.replace(chr(10), '').replace(chr(9), '')}b"
    monkeypatch.setattr(views.err, "_file", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as where nobody listens
    table = Table(title=text)
    table.add_row(text, f"[bold]{text}[/]")
    with terminal.safe_streams(views.say, views.error):
        for console in (views.out, views.err):
            console.print(table, text)
        views.say(text)
        views.note(text)
        views.error(text)
        with views.status(text) as at:
            at(text)
        logging.getLogger("razorctl.x").warning("%s is bad", text)
        with warnings.catch_warnings():  # pytest's, which records, is undone inside
            warnings.simplefilter("always")
            warnings.showwarning(f"{text} is old", FutureWarning, "file.py", 3)  # type: ignore[arg-type]
    _uncaught(ValueError, ValueError(f"{text} is wrong"), None)
    shown = capsys.readouterr()
    assert all(f"is {what}" in shown.err for what in ("bad", "old", "wrong"))
    for found in shown:
        assert "a" in found
        assert not BAD.search(found), ascii(found)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_terminal_shows_signs_that_it_has_not(encoding):
    done = CliRunner(charset=encoding).invoke(app, ["plan", *PLANNED, "--gpu", "t4"])
    assert done.exit_code == 0, done.output
    assert "razor 0.5 ~" in done.stdout
    assert "full" in done.stdout


def test_data_lose_no_sign():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors="replace")
    with pytest.raises(UsageError, match=r"stdout is charmap, which lacks '\\u732b'; set PYTHON"):
        terminal._DataStream(stream).write("\N{CJK UNIFIED IDEOGRAPH-732B}")


ENVIRONMENT = {
    "a rank alone": ({"RANK": "1", "LOCAL_RANK": "1"}, 0, "models"),
    "no number": ({"WORLD_SIZE": "abc"}, 2, "error: WORLD_SIZE is 'abc', not a number; unset it"),
    "less than none": ({"WORLD_SIZE": "-1"}, 2, "error: WORLD_SIZE is '-1', not a number"),
    "no rank": ({"WORLD_SIZE": "2", "RANK": "x"}, 2, "error: RANK is 'x', not a number"),
    "a rank too high": ({"WORLD_SIZE": "2", "RANK": "2"}, 2, "error: RANK is 2, and there are 2"),
    "no processes": ({"WORLD_SIZE": "0", "RANK": "0"}, 0, "models"),
    "empty": ({"WORLD_SIZE": "", "RANK": ""}, 0, "models"),
}


@pytest.mark.parametrize("case", ENVIRONMENT)
def test_variables_of_torchrun(case, monkeypatch):
    variables, code, said = ENVIRONMENT[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = razorctl("list")
    assert (done.exit_code, said in done.output) == (code, True), done.output
    assert razorctl("--help").exit_code == 0
    if code == 0:
        assert os.environ.get("RANK", "0") == "0"
        assert (processes.count(), processes.rank(), processes.local_rank()) == (1, 0, 0)


def test_a_terminal_of_no_columns():
    done = subprocess.run(
        [sys.executable, "-m", "razorctl", "list"],
        env={**os.environ, "COLUMNS": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert "vit-micro" in done.stdout


def test_an_open_quotation_names_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "'")
    found = c_compiler.compiler()
    assert found is None or found[0] in c_compiler.COMPILERS


def test_closed_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="stdin is closed; give the command its lines"):
        predicting._stdin(["-"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(UsageError, match="stdout is closed"):
        views.print_json({})


def closed_pipe() -> int:
    reads, writes = os.pipe()
    os.close(reads)
    return writes


ENDS = {
    "full disk": (lambda: os.open("/dev/full", os.O_WRONLY), "No space left on device"),
    "closed pipe": (closed_pipe, None),
}
PRINTED = [
    ["--help"],
    ["--version"],
    ["list", "models", "--json"],
    ["plan", *PLANNED, "--gpu", "t4", "--json"],
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("words", [*PRINTED, *([name, "--help"] for name in EVERY)])
def test_a_stdout_that_takes_no_more_ends_every_command(words, end, capsys, monkeypatch):
    opened, reason = ENDS[end]
    with os.fdopen(opened(), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(views.err, "_file", None)
        # What could not be written would be printed by the next test.
        monkeypatch.setattr(views, "out", type(views.out)())
        with pytest.raises(SystemExit) as stop:
            app(words)
        assert sys.stdout is stream
    assert stop.value.code == 1
    said = f"error: cannot write stdout ({reason}); make room, or redirect it.\n" if reason else ""
    shown = capsys.readouterr().err
    assert shown.endswith(said)
    assert reason or "error" not in shown


CELLS = ("=1+1", "+1", "-1", "@x", "\tx", "\rx", "cat", "a=1")


def test_cells_that_a_spreadsheet_would_run():
    from razorctl.training.predicting.labels import Prediction

    rows = [Prediction("=f.csv", 3, (cell, "other"), (0.75, 0.25)) for cell in CELLS]
    row_format = view.labels_format(rows[0].classes, 1, False)
    plain, inert = io.StringIO(), io.StringIO()
    view.write_csv(plain, rows, row_format)
    view.write_csv(inert, rows, row_format, spreadsheet=True)
    read = csv.reader(io.StringIO(plain.getvalue(), newline=""))
    assert [row[2] for row in read][1:] == [*CELLS]  # Python 3.11 leaves a lone return unquoted
    found = [each.getvalue().replace('"', "").split("\n")[1:-1] for each in (plain, inert)]
    assert found[0] == [f"=f.csv,3,{cell},0.75" for cell in CELLS]
    quoted = [cell if cell in ("cat", "a=1") else f"'{cell}" for cell in CELLS]
    assert found[1] == [f"'=f.csv,3,{cell},0.75" for cell in quoted]


@pytest.mark.parametrize(
    ("interactive", "notebook", "quiet", "shown"),
    [
        (True, False, False, True),
        (False, False, False, False),
        (True, True, False, False),
        (True, False, True, False),
    ],
)
def test_bars_are_shown_on_terminals_with_messages(
    interactive, notebook, quiet, shown, monkeypatch
):
    console = SimpleNamespace(is_interactive=interactive, is_jupyter=notebook, quiet=quiet)
    monkeypatch.setattr(views, "err", console)
    assert views.live() is shown
