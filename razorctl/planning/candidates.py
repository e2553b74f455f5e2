"""Ways to run a job on a card, and what each is predicted to take.

Every figure comes from a traced step: bytes as its tensors and its kernels take them, time as the
slower of arithmetic and memory for each kernel, at the rates of the card's preset.
"""

import math
from dataclasses import dataclass

from razorctl.memory.trace_cache import Trace
from razorctl.methods import METHODS
from razorctl.planning.gpus import Gpu
from razorctl.recipe import Recipe

# What a process takes beside its tensors: the context and the libraries' workspaces, and, of the
# tensors, what the allocator loses between them. Not measured yet: both are on the safe side.
CONTEXT = 640 * 2**20
FRAGMENTATION = 0.04
LAUNCH = 5e-6  # seconds that a kernel takes at least


@dataclass(frozen=True)
class Predicted:
    """Of a training step, in bytes and seconds.

    peak_bytes: most that is allocated at a time; weights, gradients, optimizer and transient bytes
    and as many of the saved ones as are alive then make it up. reserve_bytes come on top: what the
    process takes beside its tensors.
    """

    peak_bytes: int
    saved_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    transient_bytes: int
    reserve_bytes: int
    step_seconds: float

    @property
    def needed_bytes(self) -> int:
        """All that the card must have."""
        return self.peak_bytes + self.reserve_bytes

    @classmethod
    def of(cls, trace: Trace, gpu: Gpu) -> "Predicted":
        """What a traced step takes on a card."""
        activations = trace.highest - trace.weights - trace.gradients - trace.optimizer
        return cls(
            trace.highest,
            trace.saved,
            trace.weights,
            trace.gradients,
            trace.optimizer,
            activations - min(trace.saved, activations),
            CONTEXT + math.ceil(FRAGMENTATION * trace.highest),
            seconds(trace, gpu),
        )


def seconds(trace: Trace, gpu: Gpu) -> float:
    """Of a step: each kernel takes what its arithmetic or its memory does, whichever is longer.

    Both at the shares of the card's peaks that published measurements reach.
    """
    total = 0.0
    for kernel, count in trace.kernels.items():
        arithmetic = kernel.operations / gpu.operations_per_second(kernel.precision)
        total += count * (LAUNCH + max(arithmetic, kernel.bytes / gpu.bytes_per_second))
    return total


@dataclass(frozen=True)
class Candidate:
    """A way to run a job: a recipe, and the micro-batches that a step accumulates over."""

    recipe: Recipe
    accumulate: int
    predicted: Predicted

    @property
    def exact(self) -> bool:
        """Whether its gradient is that of full fine-tuning."""
        return not self.recipe.approximates

    @property
    def label(self) -> str:
        """What it does, in a few words."""
        return label(self.recipe, self.accumulate)

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.predicted.step_seconds

    @property
    def approximation(self) -> tuple[float, ...]:
        """Orders ways by how far their gradient is from the exact one, which comes first."""
        recipe = self.recipe
        ratio = recipe.ratio if METHODS[recipe.method].has_ratio else 0.0
        adapts = METHODS[recipe.method].adapts
        return adapts, 1 - recipe.joint_budget, not (self.exact or recipe.close), ratio

    def fits(self, budget: int) -> bool:
        """In that many bytes of a card."""
        return self.predicted.needed_bytes <= budget


def label(recipe: Recipe, accumulate: int) -> str:
    """What a way does, in a few words."""
    words = recipe.method
    if METHODS[recipe.method].has_ratio:
        words += f" {recipe.ratio:g}"
    if recipe.joint_budget < 1:
        words += f", {recipe.joint} {recipe.joint_budget:g}"
    if recipe.attention != "auto":
        words += f", {recipe.attention} attention"
    if accumulate > 1:
        words += f", {accumulate} micro-batches"
    return words
