"""Which of several ways to compute the same is the fastest on a card: timed once, kept on disk."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from razorctl import documents, folders
from razorctl.ops import kernels
from razorctl.ops.triton import launch

WARM_UPS = 2  # the first compiles
ROUNDS, CALLS = 3, 5
AHEAD = 2_000_000  # cycles that the card waits, so that launching takes none of the time
LONGEST = 32_000_000  # the most of them, for a way that takes many launches
TRIES = 3  # timings that run out of memory before the process keeps what it found

_short: Counter[tuple[str, str]] = Counter()  # (card, key) -> how often memory did not suffice
_uncompiled: set[tuple[str, str]] = set()  # (op, way)


def fastest(
    ways: Mapping[str, Callable[..., None]], work: tuple[Any, ...], key: str
) -> Callable[..., None]:
    """Which of the `ways` takes least time on `work`, whose first entry says on which card.

    Times them all when it sees `key`, whose first word names the op, for the first time on this
    kind of card, unless a CUDA graph is being captured, which gets the first of them. All must
    leave the same behind. Where one of them fails, the disk keeps nothing, so that the next process
    times them again and names what fails. Where memory does not suffice for one, this process keeps
    nothing either until it has timed them TRIES times. Raises what a way raises if all do, or if
    the card can run nothing after it.
    """
    if len(ways) == 1:
        return next(iter(ways.values()))
    if (recorder := launch.recorder()) is not None:
        known = recorder.device and _chosen(_card(recorder.device)).get(key)
        return ways.get(known or "", partial(_each, ways, recorder))
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
            _keep(card, key, best)
    return ways[chosen[key]]


def _each(ways: Mapping[str, Callable[..., None]], recorder: launch.Recorder, *work: Any) -> None:
    """Takes all ways, as a card that has not chosen yet; the first stands for the chosen one."""
    for way in ways.values():
        way(*work)
        recorder.trial = True
    recorder.trial = False


def _times(
    ways: Mapping[str, Callable[..., None]], work: tuple[Any, ...], op: str
) -> tuple[dict[str, float], bool]:
    """Way -> milliseconds, without those that fail, and whether one failed for lack of memory.

    What Triton could not compile it could not for other sizes either.
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
    """The least time of a few calls; raises what the way raises."""
    for _ in range(WARM_UPS):
        way(*work)
    found: list[float] = []
    ahead = AHEAD
    while len(found) < ROUNDS:
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
            found.append(start.elapsed_time(end) / CALLS)
    return min(found)


@cache
def _card(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def _file() -> Path:
    return folders.cache() / "kernels.json"


@cache
def _chosen(card: str) -> dict[str, str]:
    """Key -> way, as kept on disk for a card; grows in the process."""
    return _kept().get(card, {})


def _kept() -> dict[str, dict[str, str]]:
    """What is on disk; nothing if that cannot be read or is anything else."""
    return documents.read_cached(_file(), dict[str, dict[str, str]]) or {}


def _keep(card: str, key: str, way: str) -> None:
    """Adds a choice to the file, in one step; if it cannot be written, the process remembers."""
    with suppress(OSError):
        kept, file = _kept(), _file()
        kept.setdefault(card, {})[key] = way
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as part:
            part.write(documents.text(kept, indent=1))
        Path(name).replace(file)
