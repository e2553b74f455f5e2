"""Ways to run a job on a card, with the predicted memory and time of each.

All figures come from a traced step. Memory is what its tensors and kernels allocate; `times`
predicts the time.
"""

import math
from dataclasses import dataclass, replace

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory.trace_cache import Trace
from razorctl.methods import CLOSE, METHODS
from razorctl.planning.gpus import Gpu
from razorctl.planning.states import State, with_host
from razorctl.planning.times import Seconds, launch_count, on_card, on_host, step_seconds

# Memory of a process beside its tensors: CONTEXT is bytes of the CUDA context and the libraries'
# workspaces, FRAGMENTATION the share of the tensors' bytes that the allocator loses. Both are
# guesses. An H100 reserved 1.04 (full) to 1.23 (razor) times the allocated peak (phases.py), but
# PyTorch returns segments without tensors before it runs out of memory.
CONTEXT = 640 * 2**20
FRAGMENTATION = 0.04
# What CUDA graphs keep beside that, as a share of the peak, and do not return: there they reserved
# 1.06 (full) to 1.23 (razor at 0.97) times the peak. It is not needed: a run that lacks it goes on
# without graphs.
KEPT_BY_GRAPHS = 0.19
# Copies of a block that FSDP2 holds at most, chosen high: the weights of two blocks, the buffer
# that receives them, and the gradients of two.
GATHERED = 5


@dataclass(frozen=True)
class Predicted:
    """Predicted bytes and seconds of a training step.

    Args:
        peak_bytes: the most allocated bytes: the sum of weights, gradients, optimizer and transient
            bytes, and of the saved bytes that are alive at that moment.
        reserve_bytes: memory of the process beside its tensors; not in `peak_bytes`.
        step_seconds: the likely time, between step_seconds_low and step_seconds_high.
        card_seconds, host_seconds: likely times of the card and of the host; the step takes the
            longer one.
        launches: kernels that a step runs.
        step_seconds_vs_full: relative to full fine-tuning in one pass, at the same precision.
        host_bytes: memory of the host for the optimizer's state; 0 if that is on the card.
        average_share: the time of an average step relative to this one, which has the largest
            micro-batches.
    """

    peak_bytes: int
    saved_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    transient_bytes: int
    reserve_bytes: int
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    card_seconds: float
    host_seconds: float
    launches: int
    step_seconds_vs_full: float
    host_bytes: int = 0
    average_share: float = 1.0

    @property
    def needed_bytes(self) -> int:
        """Bytes that the card must have free."""
        return self.peak_bytes + self.reserve_bytes

    @classmethod
    def of(
        cls, trace: Trace, gpu: Gpu, full: Trace, shards: int = 1, graphs: int = 0
    ) -> "Predicted":
        """The prediction for a traced step on a card; `full` is the trace of full fine-tuning.

        Args:
            graphs: the number of CUDA graphs that the host replays in a step, one per micro-batch.
            shards: the number of cards over which FSDP2 shards weights, gradients and optimizer
                state. The gathered bytes are an estimate. The time of exchanges is not predicted.
        """
        step = step_seconds(trace, gpu, graphs)
        kept = [trace.weights, trace.gradients, trace.optimizer]
        activations = trace.highest - sum(kept)
        transient = activations - min(trace.saved, activations)
        if shards > 1:
            kept = [math.ceil(size / shards) for size in kept]
            gathered = trace.rest + GATHERED * trace.block
            activations, transient = activations + gathered, transient + gathered
        peak = activations + sum(kept)
        weights, gradients, optimizer = kept
        return cls(
            peak_bytes=peak,
            saved_bytes=trace.saved,
            weights_bytes=weights,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            transient_bytes=transient,
            reserve_bytes=reserve(peak),
            step_seconds=step.likely,
            step_seconds_low=step.low,
            step_seconds_high=step.high,
            card_seconds=on_card(trace, gpu, graphs).likely,
            host_seconds=on_host(trace, gpu, graphs).likely,
            launches=launch_count(trace, gpu),
            step_seconds_vs_full=step.likely / step_seconds(full, gpu, min(graphs, 1)).likely,
        )


@dataclass(frozen=True)
class Candidate:
    """A way to run a job: a recipe, the number of micro-batches in a step, and a state.

    Args:
        cosine: of its gradient to the exact one at the job's precision, as `Recipe.cosine`.
        compiled: whether torch.compile compiles the step, beside what the job says.
        state: of weights and optimizer. chosen: whether the plan chose it.
    """

    recipe: Recipe
    accumulate: int
    predicted: Predicted
    cosine: float | None
    state: State
    chosen: bool = False
    compiled: bool = False

    @property
    def exact(self) -> bool:
        """Whether its gradient is the gradient of full fine-tuning."""
        return not self.recipe.approximates

    @property
    def label(self) -> str:
        """The recipe, the micro-batches, and a state that the plan chose, in a few words."""
        words = label(self.recipe, self.accumulate) + ", compiled" * self.compiled
        return f"{words}, {self.state.label}" if self.chosen else words

    def of(self, job: Job) -> Job:
        """A resolved job with the micro-batches and the state of this way."""
        return replace(job, accumulate=self.accumulate, **self.state._asdict())

    @property
    def seconds(self) -> float:
        """The likely seconds of a step."""
        return self.predicted.step_seconds

    @property
    def average_seconds(self) -> float:
        """Predicted seconds of an average step."""
        return self.seconds * self.predicted.average_share

    @property
    def slow(self) -> float:
        """The seconds of a step at the slow end of their range."""
        return self.predicted.step_seconds_high

    @property
    def approximation(self) -> tuple[float, ...]:
        """A sort key: ways whose gradient is closer to the exact one come first."""
        recipe = self.recipe
        ratio = recipe.ratio if METHODS[recipe.method].has_ratio else 0.0
        far, measured = self.cosine is None or self.cosine < CLOSE, -(self.cosine or 0.0)
        return bool(recipe.part), 1 - recipe.joint_budget, far, recipe.int8_forward, measured, ratio

    def with_host_update(self, trained: int, gpu: Gpu) -> "Candidate":
        """A replica whose optimizer state, for so many trained weights, is on the host."""
        now = self.predicted
        card = Seconds(now.step_seconds_low, now.step_seconds, now.step_seconds_high)
        step = with_host(card, self.state, trained, gpu)
        predicted = replace(
            now,
            host_bytes=self.state.host_bytes(trained),
            step_seconds=step.likely,
            step_seconds_low=step.low,
            step_seconds_high=step.high,
            step_seconds_vs_full=now.step_seconds_vs_full * step.likely / now.step_seconds,
        )
        return replace(self, predicted=predicted)

    def averaging(self, share: float) -> "Candidate":
        """A copy with another `Predicted.average_share`."""
        return replace(self, predicted=replace(self.predicted, average_share=share))

    def fits(self, budget: int) -> bool:
        """Whether it needs at most `budget` bytes of the card."""
        return self.predicted.needed_bytes <= budget


def reserve(peak: int) -> int:
    """Bytes that a process needs beside its tensors, of which the most are `peak`."""
    return CONTEXT + math.ceil(FRAGMENTATION * peak)


def label(recipe: Recipe, accumulate: int) -> str:
    """A recipe and a number of micro-batches in a few words."""
    words = recipe.method
    if METHODS[recipe.method].has_ratio:
        words += f" {recipe.ratio:g}"
    if recipe.joint_budget < 1:
        words += f", {recipe.joint} {recipe.joint_budget:g}"
    if recipe.attention != "auto":
        words += f", {recipe.attention} attention"
    if recipe.int8_forward:
        words += ", int8 forward"
    if recipe.lora:
        words += ", LoRA"
    if recipe.activation_checkpointing:
        words += ", checkpointing"
    if accumulate > 1:
        words += f", {accumulate} micro-batches"
    return words
