"""The fastest of several ways to compute the same on a card: timed once, stored on disk."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from razorctl.ops import kernels
from razorctl.ops.triton import launch
from razorctl.system import documents, folders
from razorctl.system.atomic import atomic_file

WARM_UPS = 2  # the first compiles
ROUNDS, CALLS = 3, 5
AHEAD = 2_000_000  # cycles that the card waits, so that the time of launching is not measured
LONGEST = 32_000_000  # most cycles, for a way of many launches
TRIES = 3  # timings that run out of memory before the process keeps its choice

_short: Counter[tuple[str, str]] = Counter()  # (card, key) -> timings that ran out of memory
_uncompiled: set[tuple[str, str]] = set()  # (op, way)


def fastest(
    ways: Mapping[str, Callable[..., None]], work: tuple[Any, ...], key: str
) -> Callable[..., None]:
    """The fastest way.

    All ways are timed at the first call with a `key` on a kind of card, except while a CUDA graph
    is being captured, which gets the first way. If a way fails, the choice is not stored on disk,
    so that the next process times all again and reports the failure. If a way runs out of memory,
    this process does not keep its choice either until it has timed them TRIES times. Raises the
    error of a way if all fail, or if the card can run nothing after it.

    Args:
        ways: Name -> function of `work`. All have the same results.
        work: Arguments of the ways. The first is a tensor on the card.
        key: The name of the op, a space, and the sizes that the choice depends on.
    """
    if len(ways) == 1:
        return next(iter(ways.values()))
    if (recorder := launch.recorder()) is not None:
        choice = recorder.device and _chosen(_card(recorder.device)).get(key)
        return ways.get(choice or "", partial(_each, ways, recorder))
    card = _card(work[0].device)
    chosen = _chosen(card)
    if chosen.get(key) not in ways:
        if torch.cuda.is_current_stream_capturing():
            return next(iter(ways.values()))
        times, short = _times(ways, work, key.split()[0])
        best = min(times, key=times.__getitem__)
        _short[card, key] += short
        if short and _short[card, key] < TRIES:
            return ways[best]
        chosen[key] = best
        if times.keys() == ways.keys():
            _store(card, key, best)
    return ways[chosen[key]]


def _each(ways: Mapping[str, Callable[..., None]], recorder: launch.Recorder, *work: Any) -> None:
    """Calls all ways, as a card without a choice would; the first stands for the chosen one."""
    for way in ways.values():
        way(*work)
        recorder.trial = True
    recorder.trial = False


def _times(
    ways: Mapping[str, Callable[..., None]], work: tuple[Any, ...], op: str
) -> tuple[dict[str, float], bool]:
    """Way -> milliseconds, without failed ways, and whether one ran out of memory.

    A way that Triton cannot compile is not tried for other sizes either.
    """
    times: dict[str, float] = {}
    errors: list[Exception] = []
    short = False
    for name, way in ways.items():
        if (op, name) in _uncompiled:
            continue
        try:
            times[name] = _milliseconds(way, work)
        except Exception as error:
            errors.append(error)
            if kernels.out_of_memory(error):
                short = True
            elif kernels.fatal(error, work[0]) is not None or kernels.give_up(error):
                raise
            else:
                kernels.note_failed_way(op, name, error)
                if isinstance(error, TritonError):
                    _uncompiled.add((op, name))
    if not times:
        errors = errors or [RuntimeError(f"no way to compute {op} works here")]
        raise next(filter(kernels.out_of_memory, errors), errors[0])
    return times, short


def _milliseconds(way: Callable[..., None], work: tuple[Any, ...]) -> float:
    """The least time of a few calls; raises the errors of the way."""
    for _ in range(WARM_UPS):
        way(*work)
    times: list[float] = []
    ahead = AHEAD
    while len(times) < ROUNDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(ahead)
        start.record()
        for _ in range(CALLS):
            way(*work)
        overtaken = start.query()  # the card had begun before all was launched
        end.record()
        end.synchronize()
        if overtaken and ahead < LONGEST:
            ahead = min(4 * ahead, LONGEST)
        else:
            times.append(start.elapsed_time(end) / CALLS)
    return min(times)


@cache
def _card(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def _file() -> Path:
    return folders.cache() / "kernels.json"


@cache
def _chosen(card: str) -> dict[str, str]:
    """Key -> way on a card, from disk and from this process."""
    return _stored().get(card, {})


def _stored() -> dict[str, dict[str, str]]:
    """Card -> key -> way on disk; empty if the file cannot be read or is not valid."""
    with suppress(ModuleNotFoundError):  # of pydantic, where razorctl is not installed
        return documents.read_cached(_file(), dict[str, dict[str, str]]) or {}
    return {}


def _store(card: str, key: str, way: str) -> None:
    """Adds a choice to the file, atomically; if it cannot be written, only the process keeps it."""
    with suppress(OSError, ModuleNotFoundError):
        choices, file = _stored(), _file()
        choices.setdefault(card, {})[key] = way
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file, replace=True) as partial:
            partial.write_text(documents.text(choices, indent=1))
