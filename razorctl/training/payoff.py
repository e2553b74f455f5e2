"""Whether compiling pays off in a run. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Self

from razorctl import units


@dataclass(frozen=True)
class Payoff:
    """Seconds of compiling and of a step before and after it, and the steps until it pays off.

    steps: None if a compiled step is not faster.
    """

    compile_seconds: float
    eager_step_seconds: float
    step_seconds: float
    steps: int | None

    @classmethod
    def of(cls, first: float, eager: float, compiled: float) -> Self:
        """The payoff, by seconds of the first compiled step, of an eager and of a compiled step."""
        compiling, gain = max(0.0, first - compiled), eager - compiled
        return cls(compiling, eager, compiled, math.ceil(compiling / gain) if gain > 0 else None)

    def __str__(self) -> str:
        took, eager, compiled = map(
            units.duration, (self.compile_seconds, self.eager_step_seconds, self.step_seconds)
        )
        step = f"a step takes {compiled} instead of {eager}"
        return f"compiling took {took}; {step}, so it {self.verdict}"

    @property
    def verdict(self) -> str:
        """The end of a sentence on compiling."""
        if self.steps is None:
            return "does not pay off"
        return f"pays off after {units.count(self.steps, 'step')}"
