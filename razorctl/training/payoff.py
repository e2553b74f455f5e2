"""Whether compiling pays off in a run; nothing here imports torch."""

import math
from dataclasses import dataclass
from typing import Self

from razorctl import units


@dataclass(frozen=True)
class Payoff:
    """Seconds of compiling and of a step before and after, and the steps that make up for them.

    steps: None if a compiled step is no faster.
    """

    compile_seconds: float
    eager_step_seconds: float
    step_seconds: float
    steps: int | None

    @classmethod
    def of(cls, first: float, eager: float, compiled: float) -> Self:
        """The payoff from seconds of the first compiled step, and of steady ones of both kinds."""
        compiling, gain = max(0.0, first - compiled), eager - compiled
        return cls(compiling, eager, compiled, math.ceil(compiling / gain) if gain > 0 else None)

    def __str__(self) -> str:
        compiled, eager = units.duration(self.step_seconds), units.duration(self.eager_step_seconds)
        return (
            f"compiling took {units.duration(self.compile_seconds)}; a step takes {compiled} "
            f"instead of {eager}, so it {self.verdict}"
        )

    @property
    def verdict(self) -> str:
        """The end of a sentence on compiling."""
        if self.steps is None:
            return "does not pay off"
        return f"pays off after {units.count(self.steps, 'step')}"
