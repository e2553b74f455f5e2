"""The ways to run a job on a card: what each takes, and which of them a preference chooses.

Every figure comes from a traced step: bytes as its tensors and its kernels take them, time as the
slower of arithmetic and memory for each kernel, at the rates of the card's preset.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from razorctl import traces
from razorctl.allocation import largest
from razorctl.errors import NoFitError, UsageError
from razorctl.gpus import Gpu, settle_precision
from razorctl.job import Job
from razorctl.recipe import METHODS, Joint, Recipe
from razorctl.traces import Trace

Prefer = Literal["balanced", "exact", "fast"]
RATIOS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
SMALLER = (0.75, 0.5, 0.25)  # shares of an input size that are tried where nothing fits
JOINT_BUDGETS = (0.75, 0.5, 0.25)
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

    def fits(self, budget: int) -> bool:
        """In that many bytes of a card."""
        return self.predicted.needed_bytes <= budget


def facts(job: Job, cache: traces.Cache) -> dict[str, Any]:
    """What planning needs to know of a job's model and data set.

    That is `defaults` for a Job, the number of `classes` and of `train_examples`. Raises UsageError
    for names that are not known, or that do not go together.
    """
    known: dict[str, Any] | None = cache.get("facts", job.model, job.dataset)
    if known is None:
        from razorctl import data  # imports the libraries that models come from

        family, source = data.pair(job.model, job.dataset)
        known = {
            "defaults": dict(family.defaults),
            "classes": source.classes,
            "train_examples": source.train_examples,
        }
        cache.put(known, "facts", job.model, job.dataset)
    return known


def traced(
    job: Job, recipe: Recipe, classes: int, cache: traces.Cache, device: str = "cuda"
) -> Trace:
    """A training step of a resolved job on a kind of device.

    Raises UsageError for a recipe that the model cannot take.
    """
    # Alone what tells one step from another, so that other jobs find it too.
    step = [
        *(job.model, classes, job.input_size, job.batch_size, job.accumulate),
        *(job.precision, job.optimizer, bool(job.momentum), bool(job.weight_decay)),
        asdict(replace(recipe, seed=0)),
        device,
    ]
    document = cache.get("trace", *step)
    if document is None:
        from razorctl import tracing  # imports torch

        try:
            document = traces.dump(tracing.trace(job, recipe, classes, device))
        except UsageError as error:
            document = {"refused": str(error)}
        cache.put(document, "trace", *step)
    if "refused" in document:
        raise UsageError(document["refused"])
    return traces.load(document)


class Search:
    """Ways to run one job on one card, traced when they are asked for."""

    def __init__(
        self,
        job: Job,
        gpu: Gpu,
        budget: int,
        recipe: Recipe | None,
        max_ratio: float,
        cache: traces.Cache | None = None,
    ) -> None:
        self.cache = cache or traces.Cache()
        known = facts(job, self.cache)
        self.classes, self.examples = known["classes"], known["train_examples"]
        precision = settle_precision(job.precision, gpu.compute_capability)
        self.job = replace(job, precision=precision).resolved(known["defaults"], self.examples)
        self.gpu, self.budget, self.recipe, self.max_ratio = gpu, budget, recipe, max_ratio
        width = "wide" if precision == "fp32" else "narrow"
        most = min(max_ratio, largest(width))
        self.ratios = [*(ratio for ratio in RATIOS if ratio < most), most]
        self.looked_at: dict[tuple[Recipe, int], Candidate] = {}
        self.reasons: dict[str, list[str]] = {}
        self._reasons: list[str] = []

    def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
        """What one way takes."""
        key = recipe, accumulate
        if key not in self.looked_at:
            predicted = Predicted.of(self._trace(recipe, accumulate), self.gpu)
            self.looked_at[key] = Candidate(recipe, accumulate, predicted)
        return self.looked_at[key]

    def _trace(self, recipe: Recipe, accumulate: int) -> Trace:
        job = replace(self.job, accumulate=accumulate)
        return traced(job, recipe, self.classes, self.cache)

    def choose(self, prefer: Prefer) -> Candidate | None:
        """The way that a preference takes, None if nothing fits."""
        self.reasons[prefer] = self._reasons = []
        if self.recipe is not None:
            chosen = self._accumulated(self.recipe)
        elif prefer == "balanced":
            chosen = self._balanced()
        else:
            chosen = self._fastest(prefer)
        if chosen is not None:
            self._reasons.append(f"{chosen.label}: taken.")
        return chosen

    def _balanced(self) -> Candidate | None:
        """The first of a chain of ever more approximate recipes that fits in one pass."""
        for recipe in (Recipe("full"), Recipe("full", attention="flash")):
            if recipe.attention == "flash" and self._trace(Recipe("full"), 1).fused:
                self._reasons.append("full, flash attention: the model runs fused attention as is.")
            elif chosen := self._try(recipe):
                return chosen
        half = Recipe("half")
        if self.job.precision == "fp32" and (chosen := self._try(half)):
            return chosen
        if self._last is None:
            return self._accumulated(Recipe("full"))
        if self._try(self._last):
            return self._smallest()
        for recipe in self._jointly():
            if chosen := self._try(recipe):
                return chosen
        return self._accumulated(recipe)

    @cached_property
    def _last(self) -> Recipe | None:
        """razor at the largest ratio that is allowed and that the model can keep, if any."""
        while self.ratios and not self._possible(Recipe(ratio=self.ratios[-1])):
            self.ratios.pop()
        return Recipe(ratio=self.ratios[-1]) if self.ratios else None

    def _possible(self, recipe: Recipe, accumulate: int = 1) -> bool:
        """Whether the model can take a recipe; if not, notes why."""
        try:
            self.predict(recipe, accumulate)
        except UsageError as error:
            if self.recipe is not None:
                raise
            self._reasons.append(f"{label(recipe, accumulate)}: {error}")
            return False
        return True

    def _smallest(self) -> Candidate:
        """razor at the smallest ratio that fits, where the last one does."""
        low, high = 0, len(self.ratios) - 1
        while low < high:
            middle = (low + high) // 2
            if self._try(Recipe(ratio=self.ratios[middle])):
                high = middle
            else:
                low = middle + 1
        return self.predict(Recipe(ratio=self.ratios[high]))

    def _jointly(self) -> list[Recipe]:
        """razor at the largest ratio under ever smaller joint budgets: of branches, if known."""
        if self._last is None:
            return []
        joint: Joint = "branches"
        if not self._possible(replace(self._last, joint_budget=JOINT_BUDGETS[0], joint=joint)):
            joint = "weights"
        return [replace(self._last, joint_budget=b, joint=joint) for b in JOINT_BUDGETS]

    def _fastest(self, prefer: Prefer) -> Candidate | None:
        """Of the exact ways, or of all at the largest ratio, the fastest that fits."""
        methods = [Recipe("full"), Recipe("checkpoint")]
        if prefer == "fast" and self._last is not None:
            methods.append(self._last)
        if prefer == "exact" and (chosen := self._try(methods[0])):
            return chosen
        ways = [self._accumulated(recipe) for recipe in methods if self._possible(recipe)]
        fitting = [way for way in ways if way is not None]
        for way in fitting:
            self._reasons.append(f"{way.label}: {way.predicted.step_seconds:.3g} s a step.")
        return min(fitting, key=lambda way: way.predicted.step_seconds, default=None)

    def _accumulated(self, recipe: Recipe) -> Candidate | None:
        """A recipe over as few micro-batches as fit, at best one."""
        for accumulate in self._counts:
            if not self._hopeless(recipe, accumulate) and (found := self._try(recipe, accumulate)):
                return found
        return None

    @property
    def _counts(self) -> list[int]:
        """The numbers of equal micro-batches that a batch can be cut into."""
        assert self.job.batch_size is not None
        batch = self.job.batch_size
        return [count for count in range(1, batch + 1) if batch % count == 0]

    def _hopeless(self, recipe: Recipe, accumulate: int) -> bool:
        """Whether a way cannot fit, as tensors of the batch shrink no faster than it does."""
        whole = self.predict(recipe).predicted
        fixed = whole.weights_bytes + whole.optimizer_bytes
        least = fixed + (whole.peak_bytes - fixed - whole.gradients_bytes) / accumulate
        return CONTEXT + (1 + FRAGMENTATION) * least > self.budget

    def _try(self, recipe: Recipe, accumulate: int = 1) -> Candidate | None:
        """A way, if it fits; if not, notes why."""
        if not self._possible(recipe, accumulate):
            return None
        candidate = self.predict(recipe, accumulate)
        if candidate.fits(self.budget):
            return candidate
        over = candidate.predicted.needed_bytes - self.budget
        self._reasons.append(f"{candidate.label}: needs {_gib(over)} more than there is.")
        return None

    def refusal(self, prefer: Prefer) -> NoFitError:
        """The error for a job that fits in no way, with what would have to change."""
        needed = self.needed(prefer)
        enough = math.ceil(100 * needed / 2**30) / 100  # so that asking for it will do
        return NoFitError(
            f"{self.job.model} on {self.job.dataset} does not fit in {_gib(self.budget)}; "
            f"it needs {enough:.2f} GiB, and {self._closest(prefer)}.",
            self.budget,
            needed,
        )

    def needed(self, prefer: Prefer) -> int:
        """The smallest budget in which a preference finds a way."""
        if self.recipe is not None:
            last = [self.recipe]
        elif prefer == "balanced":
            last = self._jointly()[-1:] or [Recipe("full"), Recipe("half")]
        else:
            last = [Recipe("full"), Recipe("checkpoint")]
            if prefer == "fast" and self._last is not None:
                last.append(self._last)
        sizes = []
        for recipe in last:
            for counts in ((1,), reversed(self._counts)):  # all between them take more
                count = next((n for n in counts if self._possible(recipe, n)), None)
                if count is not None:
                    sizes.append(self.predict(recipe, count).predicted.needed_bytes)
        if not sizes:
            raise UsageError(
                f"no way to train {self.job.model} can be traced; change its settings."
            )
        return min(sizes)

    def _closest(self, prefer: Prefer) -> str:
        """The nearest to this that fits: the job in another way, or another job."""
        if self.recipe is not None:
            free = Search(self.job, self.gpu, self.budget, None, self.max_ratio, self.cache)
            if free.needed("balanced") <= self.budget:
                return "fits with another recipe; leave the settings of this one out"
        elif prefer != "balanced" and self.needed("balanced") <= self.budget:
            return "fits with --prefer balanced"
        flags: dict[str, str] = {}
        so_far: dict[str, Any] = {}
        for flag, change in self._changes():
            so_far |= change
            flags |= dict.fromkeys(change, flag)
            job = replace(self.job, **so_far)
            search = Search(job, self.gpu, self.budget, self.recipe, self.max_ratio, self.cache)
            with suppress(UsageError):  # a size that the model cannot take
                if search.needed(prefer) <= self.budget:
                    return f"fits with {' and '.join(flags.values())}"
        return "no way to train all of this model fits; choose a smaller one"

    def _changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Settings of the job that make it smaller, each to be tried with those before it."""
        half = settle_precision("auto", self.gpu.compute_capability)
        if self.job.precision == "fp32" != half:
            yield f"--precision {half}", {"precision": half}
        if self.job.optimizer != "sgd":
            yield "--optimizer sgd", {"optimizer": "sgd"}
        if self.job.input_size is not None:  # a smaller one, the model's own as the last
            for size in (round(self.job.input_size * share / 32) * 32 for share in SMALLER):
                if 0 < size < self.job.input_size:
                    yield f"--input-size {size}", {"input_size": size}
            yield "the model's own input size", {"input_size": None}


def label(recipe: Recipe, accumulate: int) -> str:
    """What a way does, in a few words."""
    words = recipe.method
    if METHODS[recipe.method].ratio != "nothing" and METHODS[recipe.method].approximates:
        words += f" {recipe.ratio:g}"
    if recipe.joint_budget < 1:
        words += f", {recipe.joint} {recipe.joint_budget:g}"
    if recipe.attention != "auto":
        words += f", {recipe.attention} attention"
    if accumulate > 1:
        words += f", {accumulate} micro-batches"
    return words


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
