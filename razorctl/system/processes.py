"""The processes that torchrun has started for one training; without it there is only one.

Each has its rank; the first one prints, writes and decides for all. Collective functions are called
by all processes, in the same order.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count as count_from
from typing import TYPE_CHECKING, Any, TypeVar

from razorctl import units
from razorctl.errors import ElsewhereError, RazorError, UsageError, reason_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")
NUMBER = re.compile(r"[0-9]{1,9}")
# Seconds until a process says whom it waits for, until it gives up, between looks, and per look.
WAITS, GIVES_UP, BETWEEN, TRIES = 30.0, 600.0, 0.1, 2.0
MEETINGS = count_from()  # numbers meetings, since a store may outlive them
NAMED = 4  # processes that a message names


def count() -> int:
    """The number of processes; does not import torch."""
    return max(1, _number("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process, from 0; without torchrun always 0, whatever RANK says."""
    return _number("RANK", 0) if count() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine, which is the index of its GPU."""
    return _number("LOCAL_RANK", 0) if count() > 1 else 0


def _number(name: str, default: int) -> int:
    """An environment variable as a number; the default if it is none."""
    text = os.environ.get(name, "")
    return int(text) if NUMBER.fullmatch(text) else default


def resolve_environment() -> None:
    """Raises UsageError if torchrun's variables contradict each other or are no numbers.

    Removes ranks without WORLD_SIZE: they mean nothing, but libraries would wait for others.
    """
    if not os.environ.get("WORLD_SIZE"):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        text = os.environ.get(name) or "0"
        if not NUMBER.fullmatch(text):
            raise UsageError(f"{name} is {text!r}, not a number; unset it, or start with torchrun.")
    if count() > 1 and rank() >= count():
        raise UsageError(
            f"RANK is {rank()}, and there are {units.count(count(), 'process')}; start them with "
            "torchrun."
        )


def first() -> bool:
    """Whether this is the first process."""
    return rank() == 0


def program(count: int) -> list[str]:
    """The words of a command line that starts razorctl in this number of processes."""
    if count == 1:
        return ["razorctl"]
    return ["torchrun", "--nproc-per-node", str(count), "-m", "razorctl"]


def check_count(wanted: int) -> None:
    """Raises UsageError if a job needs another number of processes."""
    if wanted != count():
        planned, running = (units.count(n, "process") for n in (wanted, count()))
        run = "runs" if count() == 1 else "run"
        raise UsageError(
            f"the job is for {planned}, and {running} {run}; start it with "
            f"`{' '.join(program(wanted))} finetune ...`."
        )


def join(cpu: bool) -> None:
    """Connects the processes, by Gloo on CPUs and NCCL on GPUs.

    Raises UsageError if this process has no GPU, and RazorError if the others do not come.
    """
    if count() == 1:
        return
    import torch
    from accelerate import PartialState

    if not cpu and local_rank() >= (cards := torch.cuda.device_count()):
        plural = "" if cards == 1 else "s"
        raise UsageError(
            f"process {rank()} has no GPU, since its machine has {cards} GPU{plural}; start as "
            "many with --nproc-per-node."
        )
    PartialState(cpu=cpu, store=_met(), rank=rank(), world_size=count())


def _met() -> Any:
    """A store that all processes have reached.

    Waits in Python, which handles signals meanwhile; torch's own rendezvous does not.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = os.environ.get("MASTER_ADDR", "").strip("[]"), _number("MASTER_PORT", 0)
    if not (host and port):
        raise UsageError(
            f"WORLD_SIZE is {count()} without MASTER_ADDR and MASTER_PORT; start all processes "
            "with torchrun, or unset WORLD_SIZE."
        )
    serves = first() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        who = f"a process that answers at port {port} of {host}"
        _wait(lambda: [] if _answers(host, port) else [who])
    try:
        at = "localhost" if serves else host  # a server would ask itself by its host, for minutes
        whole = TCPStore(at, port, count(), serves, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        raise UsageError(
            f"processes cannot meet at {host}:{port} ({reason_of(error)}); set MASTER_ADDR and "
            "MASTER_PORT to a free port of the first process."
        ) from None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    store = PrefixStore(f"razorctl/{restarts}/{next(MEETINGS)}", whole)
    store.set(f"here/{rank()}", "")
    _wait(lambda: [f"process {n}" for n in range(count()) if not store.check([f"here/{n}"])])
    return store


def _answers(host: str, port: int) -> bool:
    """Whether something listens there."""
    import socket
    from threading import Thread

    answers: list[bool] = []

    def ask() -> None:
        with suppress(OSError, ValueError):  # ValueError: it is no name of a machine
            socket.create_connection((host, port), TRIES).close()
            answers.append(True)

    thread = Thread(target=ask, daemon=True)  # signals do not interrupt a name lookup
    thread.start()
    thread.join()
    return bool(answers)


def _wait(missing: Callable[[], list[str]]) -> None:
    """Returns once nothing is missing; prints what is missing after WAITS seconds.

    Raises RazorError after GIVES_UP seconds.
    """
    begun, told = time.monotonic(), False
    while names := missing():
        waited = time.monotonic() - begun
        who = ", ".join(names[:NAMED]) + f" and {len(names) - NAMED} more" * (len(names) > NAMED)
        if waited > GIVES_UP:
            raise RazorError(
                f"{who} did not come within {GIVES_UP / 60:g} minutes; start all "
                f"{units.count(count(), 'process')} with torchrun, or unset WORLD_SIZE."
            )
        if waited > WAITS and not told:
            told = True
            if sys.__stderr__ is not None:  # not sys.stderr, as only the first process has one
                print(f"process {rank()} of {count()} waits for {who}.", file=sys.__stderr__)
        time.sleep(BETWEEN)


@contextmanager
def connected(name: str | None) -> Iterator[None]:
    """Joins the process group inside the block. name: the device to use, None for the default.

    A RazorError that leaves the block becomes an ElsewhereError in all processes but the first.
    """
    if count() == 1:
        yield
        return
    import torch

    join(cpu=name == "cpu" or not torch.cuda.is_available())
    try:
        yield
    except RazorError as error:
        leave()
        if first():
            raise
        raise ElsewhereError(str(error), error.exit_code) from None
    except (KeyboardInterrupt, SystemExit):
        leave()
        raise
    leave()


def leave() -> None:
    """Disconnects this process from the others; must be the last thing it does."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def of_first(make: Callable[[], T]) -> T:
    """The result of `make` in the first process; the others do not call it. Collective.

    A RazorError of `make` is raised as ElsewhereError in the others.
    """
    if count() == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    result: list[Any] = [None, None]  # the value, and the error
    failure = None
    if first():
        try:
            result[0] = make()
        except RazorError as error:
            failure, result[1] = error, (str(error), error.exit_code)
    broadcast_object_list(result)
    if failure is not None:
        raise failure
    if result[1] is not None:
        raise ElsewhereError(*result[1])
    value: T = result[0]
    return value


@contextmanager
def together() -> Iterator[None]:
    """If a process leaves the block with a RazorError, all do. Collective; the block need not be.

    The first process raises its own error, or else another process's.
    """
    failure: RazorError | None = None
    try:
        yield
    except RazorError as error:
        if count() == 1:
            raise
        failure = error
    if count() == 1:
        return
    failures = every(None if failure is None else (str(failure), failure.exit_code))
    if failure is not None and first():
        raise failure
    for number, each in enumerate(failures):
        if each is not None:
            message, code = each
            raise ElsewhereError(f"process {number}: {message}", code) from None


def every(value: T) -> list[T]:
    """The values of all processes by rank. Collective."""
    if count() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * count()
    dist.all_gather_object(values, value)
    return values


def mean(value: "Tensor") -> "Tensor":
    """The mean of a tensor over the processes, without waiting for the device. Collective."""
    if count() > 1:
        import torch.distributed as dist

        dist.all_reduce(value)
        value /= count()
    return value


def gathered(value: "Tensor") -> "Tensor":
    """The rows of all processes by rank, which have equally many; has a gradient. Collective."""
    if count() == 1:
        return value
    import torch
    import torch.distributed as dist

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: "Tensor") -> "Tensor":
            parts = [torch.empty_like(x) for _ in range(count())]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts)

        @staticmethod
        def backward(ctx: Any, *grads: "Tensor") -> "Tensor":
            whole = grads[0].contiguous()
            dist.all_reduce(whole)  # each process uses the rows of all
            return whole.chunk(count())[rank()]

    rows: Tensor = Gathered.apply(value)
    return rows


def most(value: int, device: "torch.device") -> int:
    """The largest number over the processes. Collective."""
    if count() == 1:
        return value
    import torch
    import torch.distributed as dist

    number = torch.tensor(value, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)
