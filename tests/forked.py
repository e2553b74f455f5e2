"""Processes that tests start are forked from one that has imported what they need, once for all.

That process runs no threads, so its forks lose none.
"""

import gc
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import datasets  # noqa: F401
import peft  # noqa: F401
import timm  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
import torchmetrics  # noqa: F401

import razorctl.cli.app
import razorctl.layers.libraries.transformers
from tests.models import registered


def prepare() -> None:
    """Starts the process to fork from."""
    multiprocessing.set_forkserver_preload(["tests.uncollected", __name__])
    with chdir(Path(__file__).parents[1]):  # where it finds this module
        forkserver.ensure_running()


def _run(
    call: Callable[..., object],
    args: tuple[object, ...],
    folder: Path,
    name: str,
    environment: Mapping[str, str],
) -> None:
    gc.freeze()  # or each collection looks through, and so copies, all that was imported
    gc.enable()
    gc.get_freeze_count, os.fsync = (lambda: 1), (lambda _: None)  # as in tests.conftest
    os.environ.update(environment)
    os.chdir(folder)
    for number, kind in enumerate(("out", "err"), 1):
        file = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    call(*args)


class Forked:
    """A process that calls a function of a module in a folder."""

    def __init__(
        self,
        call: Callable[..., object],
        *args: object,
        folder: Path,
        name: str = "process",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        prepare()
        self._file = folder / name
        arguments = (call, args, folder, name, environment or {})
        self._process = ForkServerProcess(target=_run, args=arguments)
        self._process.start()

    def signaled(self, number: int, after: str) -> None:
        """Sends a signal once stderr has these words."""
        file = Path(f"{self._file}.err")
        while not (file.exists() and after in file.read_text()):
            assert self._process.is_alive()
            time.sleep(0.05)
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def ended(self, timeout: float = 240) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"it goes on after {timeout} s"
        out, err = (Path(f"{self._file}.{kind}").read_text() for kind in ("out", "err"))
        return code, out, err


def razorctl_command(*args: str) -> None:
    """The console script."""
    sys.argv[1:] = args
    razorctl.cli.app.run()


def small_command(*args: str) -> None:
    """The console script on a shallow vit-micro and the few tests of digits."""
    with registered(shallow=True):
        razorctl_command(*args)


# Has a process that waits at a port do what it is asked to, and ends as that does.
ASK = """
import json, os, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))).makefile("rw") as asked:
    print(json.dumps((sys.argv[2:], dict(os.environ))), file=asked, flush=True)
    code, said = json.loads(asked.readline())
sys.stderr.write(said)
sys.exit(code)
"""


def _answer(call: Callable[..., object], place: socket.socket, file: Path) -> None:
    with place.accept()[0].makefile("rw") as asked:
        args, environment = json.loads(asked.readline())
        os.environ.clear()
        os.environ.update(environment)
        code: object = 0
        try:
            call(*args)
        except SystemExit as end:
            code = end.code
        sys.stderr.flush()
        print(json.dumps((code, file.read_text())), file=asked, flush=True)


def answered(call: Callable[..., object], folder: Path) -> list[str]:
    """A command for one use: a process that waits for it calls `call` in a folder.

    It does so with the arguments and the variables of the command, which ends with its exit code
    and what it says on stderr.
    """
    with socket.create_server(("127.0.0.1", 0)) as place:
        Forked(_answer, call, place, folder / "answer.err", folder=folder, name="answer")
        return [sys.executable, "-S", "-c", ASK, str(place.getsockname()[1])]


def program(code: str, *args: str) -> None:
    """The code that `python -c` runs."""
    sys.argv[1:] = args
    exec(code, {"__name__": "__main__"})
