"""The search for ways to run a job on a card, and which of them a preference chooses."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Literal

from razorctl.errors import UsageError
from razorctl.job import Job, settle_precision
from razorctl.memory import trace_cache as traces
from razorctl.memory.trace_cache import Trace
from razorctl.planning.candidates import (
    CONTEXT,
    FRAGMENTATION,
    Candidate,
    Predicted,
    label,
)
from razorctl.planning.gpus import Gpu
from razorctl.recipe import Recipe
from razorctl.rules.allocation import largest

Prefer = Literal["balanced", "exact", "fast"]
WIDER: dict[Prefer, tuple[Prefer, ...]] = {  # preferences that may take more
    "exact": ("balanced", "fast"),
    "balanced": ("fast",),
    "fast": (),
}
RATIOS = (0.5, 0.9)  # of razor, beside the largest that is allowed
ALIKE = 0.75  # of the time of a method at one ratio: what it takes at another at least
PAYS = 0.95  # of an exact way's time: what an approximate one may take at most to be worth it
ADAPTERS = Recipe("lora")
SMALLER = (0.75, 0.5, 0.25)  # shares of an input size that are tried where nothing fits


def facts(job: Job, cache: traces.Cache) -> dict[str, Any]:
    """What planning needs to know of a job's model and data set.

    That is `defaults` for a Job, the number of `classes` and of `train_examples`. Raises UsageError
    for names that are not known, or that do not go together.
    """
    known: dict[str, Any] | None = cache.get("facts", job.model, job.dataset)
    if known is None:
        from razorctl import data

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
        from razorctl.planning import job_trace as tracing  # imports torch

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
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.cache, self.report = cache or traces.Cache(), report
        known = facts(job, self.cache)
        self.classes, self.examples = known["classes"], known["train_examples"]
        precision = settle_precision(job.precision, gpu.compute_capability)
        self.job = replace(job, precision=precision).resolved(known["defaults"], self.examples)
        self.gpu, self.budget, self.recipe, self.max_ratio = gpu, budget, recipe, max_ratio
        self.looked_at: dict[tuple[Recipe, int], Candidate] = {}
        self.reasons: dict[str, list[str]] = {}
        self._reasons: list[str] = []

    @property
    def rows(self) -> tuple[Candidate, ...]:
        """What is worth showing of all that was looked at, from exact to ever more approximate.

        In one pass every way is, in micro-batches one that fits or, where none does, the smallest;
        of ways that only differ in name the least approximate.
        """
        ways = list(self.looked_at.values())
        fitting = [way for way in ways if way.fits(self.budget)]
        last = [way for way in ways if way.accumulate == self._counts[-1]]
        ways = [way for way in ways if way.accumulate == 1 or way in (fitting or last)]
        ways.sort(key=lambda way: (way.approximation, way.recipe.method != "full", way.accumulate))
        unlike = {(way.exact, way.accumulate, way.predicted): way for way in reversed(ways)}
        return tuple(way for way in ways if way in unlike.values())

    def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
        """What one way takes."""
        key = recipe, accumulate
        if key not in self.looked_at:
            self.report(label(recipe, accumulate))
            predicted = Predicted.of(self._trace(recipe, accumulate), self.gpu)
            self.looked_at[key] = Candidate(recipe, accumulate, predicted)
        return self.looked_at[key]

    def _trace(self, recipe: Recipe, accumulate: int) -> Trace:
        job = replace(self.job, accumulate=accumulate)
        return traced(job, recipe, self.classes, self.cache)

    def choose(self, prefer: Prefer) -> Candidate | None:
        """The way that a preference takes, None if nothing fits."""
        self.reasons[prefer] = self._reasons = []
        if prefer == "balanced" and self.recipe is None:
            chosen = self._balanced()
        else:
            chosen = self._fastest(self._allowed(prefer))
        if chosen is not None:
            self._reasons.append(f"{chosen.label}: taken.")
        return chosen

    def _balanced(self) -> Candidate | None:
        """The fastest exact way, or a close one that is faster, if any such pays.

        A close way that pays in less memory stays worth its approximation where there is more;
        or else more memory could make a step slower.
        """
        exact = self._fastest(self._exact)
        limit = math.inf if exact is None else exact.seconds
        close = self._fastest(self._close, limit=limit)
        if close is None or limit <= close.seconds:
            return exact
        ways = (way for recipe in self._close for way in self._fitting(recipe, self.budget))
        return close if any(map(self._pays, ways)) else exact

    def _pays(self, way: Candidate) -> bool:
        """Whether it is clearly faster than all that is exact in the memory that it needs."""
        rival = self._fastest(self._exact, way.predicted.needed_bytes)
        if rival is None or way.seconds <= PAYS * rival.seconds:
            return True
        self._reasons.append(
            f"{way.label}: {way.seconds:.3g} s a step is not 5 % less than of {rival.label}."
        )
        return False

    @cached_property
    def _exact(self) -> list[Recipe]:
        """What has the gradient of full fine-tuning."""
        if self._trace(Recipe("full"), 1).fused:
            return [Recipe("full"), Recipe("checkpoint")]
        return [Recipe("full"), Recipe("full", attention="flash"), Recipe("checkpoint")]

    @cached_property
    def _razor(self) -> list[Recipe]:
        """razor at the ratios that are allowed, the largest that is close to exact first."""
        width = "wide" if self.job.precision == "fp32" else "narrow"
        most = min(self.max_ratio, largest(width))
        ratios = [*(ratio for ratio in RATIOS if ratio < most), most]
        recipes = [Recipe(ratio=ratio) for ratio in ratios]
        return sorted(recipes, key=lambda recipe: (not recipe.close, -recipe.ratio))

    @property
    def _close(self) -> list[Recipe]:
        """Those of them whose gradient was measured to be close to the exact one."""
        return [recipe for recipe in self._razor if recipe.close]

    def _allowed(self, prefer: Prefer) -> list[Recipe]:
        """What a preference may take."""
        if self.recipe is not None:
            return [self.recipe]
        approximate = {"exact": [], "balanced": self._close, "fast": self._razor}
        return [*self._exact, *approximate[prefer]]

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

    def _fastest(
        self, recipes: list[Recipe], budget: int | None = None, limit: float = math.inf
    ) -> Candidate | None:
        """Of the ways of these recipes that fit, the fastest; of equals the least approximate.

        None if all take more than `limit` seconds.
        """
        best: Candidate | None = None
        for recipe in recipes:
            if self._least(recipe) > limit or not self._possible(recipe):
                continue
            whole = self.predict(recipe)
            if whole.seconds > limit:  # in micro-batches it is slower
                self._note(f"{whole.label}: {whole.seconds:.3g} s a step, too slow.", budget)
            else:
                way = next(self._fitting(recipe, budget or self.budget), None)
                best = min(filter(None, (best, way)), key=_speed, default=None)
            limit = min(limit, math.inf if best is None else best.seconds)
        return best

    def _least(self, recipe: Recipe) -> float:
        """Seconds that a step takes at least, as far as is known without tracing it."""
        whole = {known: way.seconds for (known, n), way in self.looked_at.items() if n == 1}
        if recipe in whole:
            return whole[recipe]  # micro-batches are slower
        others = whole.items()
        alike = (taken for known, taken in others if replace(known, ratio=recipe.ratio) == recipe)
        return ALIKE * max(alike, default=0.0)

    def _fitting(self, recipe: Recipe, budget: int) -> Iterator[Candidate]:
        """Ways of a recipe that fit, over ever more micro-batches, each slower than the last."""
        for accumulate in self._counts:
            if self._hopeless(recipe, accumulate, budget):
                continue
            if self._possible(recipe, accumulate):
                way = self.predict(recipe, accumulate)
                over = way.predicted.needed_bytes - budget
                if over <= 0:
                    self._note(f"{way.label}: fits, {way.seconds:.3g} s a step.", budget)
                    yield way
                else:
                    self._note(f"{way.label}: needs {_gib(over)} more than there is.", budget)

    def _note(self, reason: str, budget: int | None) -> None:
        """Keeps a reason once, and none of less memory than there is."""
        if budget in (None, self.budget) and reason not in self._reasons:
            self._reasons.append(reason)

    @property
    def _counts(self) -> list[int]:
        """The numbers of equal micro-batches that a batch can be cut into."""
        assert self.job.batch_size is not None
        batch = self.job.batch_size
        return [count for count in range(1, batch + 1) if batch % count == 0]

    def _hopeless(self, recipe: Recipe, accumulate: int, budget: int) -> bool:
        """Whether a way cannot fit, as tensors of the batch shrink no faster than it does."""
        whole = self.predict(recipe).predicted
        fixed = whole.weights_bytes + whole.optimizer_bytes
        least = fixed + (whole.peak_bytes - fixed - whole.gradients_bytes) / accumulate
        return accumulate > 1 and CONTEXT + (1 + FRAGMENTATION) * least > budget

    def refusal(self, prefer: Prefer) -> tuple[str, int]:
        """What to say where nothing fits, with what would have to change; and `needed`."""
        needed = self.needed(prefer)
        enough = math.ceil(100 * needed / 2**30) / 100  # so that asking for it will do
        return (
            f"{self.job.model} on {self.job.dataset} does not fit in {_gib(self.budget)}; "
            f"it needs {enough:.2f} GiB, and {self._closest(prefer)}.",
            needed,
        )

    def needed(self, prefer: Prefer) -> int:
        """The smallest budget in which a preference finds a way."""
        sizes = list(self._sizes(prefer))
        if not sizes:
            raise UsageError(
                f"no way to train {self.job.model} can be traced; change its settings."
            )
        return min(sizes)

    def _sizes(self, prefer: Prefer) -> Iterator[int]:
        """What the ways of a preference need that may need least, of the likeliest first."""
        for counts in (reversed(self._counts), (1,)):  # all between them take more
            tried = list(counts)
            for recipe in self._allowed(prefer):
                count = next((n for n in tried if self._possible(recipe, n)), None)
                if count is not None:
                    yield self.predict(recipe, count).predicted.needed_bytes

    def _finds(self, prefer: Prefer) -> bool:
        """Whether a preference finds a way."""
        return any(size <= self.budget for size in self._sizes(prefer))

    def _closest(self, prefer: Prefer) -> str:
        """The nearest to this that fits: the job in another way, or another job."""
        if self.recipe is not None:
            free = Search(
                self.job, self.gpu, self.budget, None, self.max_ratio, self.cache, self.report
            )
            if free._finds("balanced"):
                return "fits with another recipe; leave the settings of this one out"
        else:
            for other in WIDER[prefer]:
                if self._finds(other):
                    return f"fits with --prefer {other}"
        flags: dict[str, str] = {}
        so_far: dict[str, Any] = {}
        for flag, change in self._changes():
            so_far |= change
            flags |= dict.fromkeys(change, flag)
            if "input_size" not in so_far and self._floor > self.budget:
                continue  # so no trace is needed to see that it does not fit
            job = replace(self.job, **so_far)
            search = Search(
                job, self.gpu, self.budget, self.recipe, self.max_ratio, self.cache, self.report
            )
            with suppress(UsageError):  # a size that the model cannot take
                if search._finds(prefer):
                    return f"fits with {' and '.join(flags.values())}"
        if self.recipe is None and self._fastest([ADAPTERS]):
            return f"only --method {ADAPTERS.method} fits, which trains adapters alone"
        return "no way to train all of this model fits; choose a smaller one"

    @property
    def _floor(self) -> int:
        """What a card must have for the weights alone, of which an input size may change some."""
        weights = min(way.predicted.weights_bytes for way in self.looked_at.values())
        return CONTEXT + math.ceil((1 + FRAGMENTATION) * weights)

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


def _speed(way: Candidate) -> tuple[Any, ...]:
    return way.seconds, way.approximation, way.predicted.needed_bytes


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
