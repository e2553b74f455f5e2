"""Which of several ways to compute the same is the fastest on a card: timed once, kept on disk."""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

WARM_UPS = 2  # the first compiles
ROUNDS, CALLS = 3, 5
AHEAD = 2_000_000  # cycles that the card waits, so that launching takes none of the time


def fastest(
    ways: Mapping[str, Callable[..., None]], work: tuple[Any, ...], key: str
) -> Callable[..., None]:
    """Which of the `ways` takes least time on `work`, whose first entry says on which card.

    Times them all when it sees `key` for the first time on this kind of card, unless a CUDA graph
    is being captured, which gets the first of them. All must leave the same behind.
    """
    if len(ways) == 1:
        return next(iter(ways.values()))
    card = _card(work[0].device)
    chosen = _chosen(card)
    if chosen.get(key) not in ways:
        if torch.cuda.is_current_stream_capturing():
            return next(iter(ways.values()))
        times = {name: _milliseconds(way, work) for name, way in ways.items()}
        chosen[key] = min(times, key=times.__getitem__)
        _keep(card, key, chosen[key])
    return ways[chosen[key]]


def _milliseconds(way: Callable[..., None], work: tuple[Any, ...]) -> float:
    """The least time of a few calls; infinite for a way that this card cannot go."""
    best = float("inf")
    with suppress(RuntimeError, TritonError):
        for _ in range(WARM_UPS):
            way(*work)
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            start.record()
            for _ in range(CALLS):
                way(*work)
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / CALLS)
    return best


@cache
def _card(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def _file() -> Path:
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("razorctl")) / "kernels.json"


@cache
def _chosen(card: str) -> dict[str, str]:
    """Key -> way, as kept on disk for a card; grows in the process."""
    return _kept().get(card, {})


def _kept() -> dict[str, dict[str, str]]:
    """What is on disk; nothing if that cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {card: dict(ways.items()) for card, ways in json.loads(_file().read_text()).items()}
    return {}


def _keep(card: str, key: str, way: str) -> None:
    """Adds a choice to the file, in one step; if it cannot be written, the process remembers."""
    with suppress(OSError):
        kept, file = _kept(), _file()
        kept.setdefault(card, {})[key] = way
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        with os.fdopen(handle, "w") as part:
            json.dump(kept, part, indent=1)
        Path(name).replace(file)
