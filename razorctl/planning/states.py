"""Weights and optimizer state as a part of a plan's way: their dtypes, and where they are.

For a decoder they take most of a card. The states are tried in the order of `states`: each costs
more time than those before it, or changes the update more.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import NamedTuple

from razorctl.config.job import Job
from razorctl.config.keywords import Prefer
from razorctl.errors import UsageError
from razorctl.planning.gpus import Gpu
from razorctl.planning.times import Seconds

EIGHT = "adamw8bit"
# State in 8 bits: both moments, with a scale of 4 bytes for 256 elements.
EIGHT_BITS = 2 * (1 + 4 / 256)


class State(NamedTuple):
    """The settings of a job that decide the bytes of weights, gradients and optimizer state."""

    optimizer: str
    weights: str = "fp32"
    optimizer_in_backward: bool = False
    optimizer_state: str = "card"

    @classmethod
    def of(cls, job: Job) -> "State":
        """The state of a resolved job."""
        return cls(*(getattr(job, name) for name in cls._fields))

    @property
    def label(self) -> str:
        """What it changes, in a few words; empty for optimizer and weights as usual."""
        words = [self.optimizer] * (self.optimizer == EIGHT)
        words += ["bf16 weights"] * (self.weights == "bf16")
        words += ["update in backward"] * self.optimizer_in_backward
        words += ["state on the host"] * (self.optimizer_state == "host")
        return ", ".join(words)

    @property
    def exact(self) -> bool:
        """Whether its update is AdamW's, or SGD's, in single precision."""
        return self.optimizer != EIGHT and (self.weights == "fp32" or self.on_host)

    @property
    def on_host(self) -> bool:
        """Whether masters and moments are on the host."""
        return self.optimizer_state == "host"

    def host_bytes(self, trained: int) -> int:
        """Bytes of the host's memory: masters, moments, and a buffer for each weight.

        PyTorch rounds a pinned buffer up to a power of two; this counts half more on average.
        """
        return 0 if not self.on_host else trained * (12 + 3 * self.itemsize // 2)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight on the card."""
        return 2 if self.weights == "bf16" else 4

    def least(self, weights: int, trained: int, draws: bool = False) -> int:
        """Bytes on the card at the end of a backward pass, without activations.

        weights: the number of all weights. trained: of weights with a state. draws: whether some of
        these may get no gradient in a step.
        """
        each = self.itemsize
        moments = {EIGHT: EIGHT_BITS, "adamw": 2 * each}.get(self.optimizer, 0)
        gradients = 0 if self.optimizer_in_backward or draws else each
        return weights * each + (0 if self.on_host else int(trained * (moments + gradients)))


# Below a state as it was asked for, by preference. A host is slower than rounding to 8 bits, but
# weights that are rounded without masters lost points on R8 (scripts/bench/accuracy.md).
_EIGHT = [State(EIGHT), State(EIGHT, optimizer_in_backward=True)]
_HOST = [State("adamw", optimizer_state="host"), State("adamw", "bf16", optimizer_state="host")]
_ROUNDED = State(EIGHT, "bf16", optimizer_in_backward=True)
LEANER: dict[Prefer, list[State]] = {
    "exact": [_HOST[0], State("adamw", optimizer_in_backward=True), _HOST[1]],
    "balanced": [*_EIGHT, *_HOST, _ROUNDED],
    "fast": [*_EIGHT, _ROUNDED, *_HOST],
}


def states(asked: Job, resolved: Job, prefer: Prefer) -> Iterator[State]:
    """The states that a plan may choose, in the order in which they are tried.

    Args:
        asked: the job as the user gave it; what is not None there is never changed.
        resolved: the same job with all defaults.
        prefer: the preference of the plan.
    """
    usual = State.of(resolved)
    yield usual
    fixed = {n: getattr(asked, n) for n in State._fields if getattr(asked, n) is not None}
    for state in leaner(resolved, prefer):
        if all(getattr(state, name) == value for name, value in fixed.items()):
            yield state


def leaner(job: Job, prefer: Prefer) -> Iterator[State]:
    """The states of LEANER that a resolved job can have, apart from its own."""
    if job.optimizer not in ("adamw", EIGHT) or job.processes > 1:
        return
    for state in LEANER[prefer]:
        installed = state.optimizer != EIGHT or find_spec("torchao") is not None
        with suppress(UsageError):
            replace(job, **state._asdict())
            if installed and state != State.of(job):
                yield state


# Bytes per second of a host's memory that an update reaches: half of the 51 GB/s of two channels
# of DDR4-3200, and two thirds of the 96 GB/s of two of DDR5-6000. No such host was measured.
HOST_MEMORY = 25e9, 64e9
# Bytes of the host's memory that an update of one weight reads and writes, apart from the buffer:
# its gradient is written in single precision, and then read and written back scaled; the master and
# two moments are read and written, and the master is read once more.
UPDATED = 4 + 8 + 24 + 4
BUS = 0.8  # share of a bus that copies of pinned memory reach


def with_host(step: Seconds, state: State, trained: int, gpu: Gpu) -> Seconds:
    """The seconds of a step whose update is on the host. step: its seconds on the card.

    At best gradients are copied during the backward pass, and weights during the update. At worst
    nothing overlaps.
    """
    moved = state.itemsize * trained
    bus = moved / (BUS * gpu.bus)
    slow, fast = ((UPDATED * trained + 2 * moved) / rate for rate in HOST_MEMORY)
    return Seconds.between(max(step.low, bus) + max(fast, bus), step.high + slow + 2 * bus)
