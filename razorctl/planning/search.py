"""The search for ways to run a job on a card, and the choice of each preference."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from razorctl import units
from razorctl.config.job import Job, resolve_precision
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.config.tasks import LANGUAGE
from razorctl.errors import UsageError
from razorctl.memory import trace_cache as traces
from razorctl.memory.trace_cache import Calls, Trace
from razorctl.methods import DEFAULT_METHOD, METHODS, Family
from razorctl.models.joined_texts import Gain
from razorctl.planning.cached_traces import cached_trace, job_facts, weight_count
from razorctl.planning.candidates import CONTEXT, FRAGMENTATION, Candidate, Predicted, label
from razorctl.planning.gpus import Gpu
from razorctl.planning.states import State
from razorctl.planning.times import step_seconds
from razorctl.rules.allocation import largest, width

# Ratios of razor to try beside the largest close ratio and the largest allowed one.
RATIOS = (0.5, 0.9, 0.95)
# Additions to razor for `fast`: in fine-tuning with this ratio they cost no more accuracy than the
# spread of seeds; for branches, when encoders classified texts (scripts/bench/accuracy.md).
INT8 = Recipe(ratio=0.9, int8_forward=True)
BRANCHES = Recipe(ratio=0.9, joint_budget=0.5, joint="branches")
ALIKE = 0.6  # at another ratio, a method takes at least this share of its time
PAYS = 0.95  # an approximate way pays at this share of an exact way's time or less
SAME = 1.02  # times within this factor count as the same
ADAPTERS = Recipe("lora")


class Search:
    """The ways to run one job on one card; each is traced on first use."""

    compiled: Candidate | None = None  # full fine-tuning, which is shown beside the others

    def __init__(
        self,
        job: Job,
        gpu: Gpu,
        budget: int,
        recipe: Recipe | None,
        cache: traces.Cache | None = None,
        report: Callable[[str], object] = lambda _: None,
        facts: Mapping[str, Any] | None = None,
        chosen: bool = False,
    ) -> None:
        """facts: the result of `job_facts(job)`; None computes it.

        chosen: whether a plan chose the weights and the optimizer's state of the job.
        """
        self.cache, self.report = cache or traces.Cache(), report
        self.facts = job_facts(job) if facts is None else facts
        self.classes, self.examples = self.facts["classes"], self.facts["train_examples"]
        precision = resolve_precision(job.precision, gpu.compute_capability)
        job = replace(job, precision=precision)
        part = "" if recipe is None else recipe.part
        self.job = job.resolved(self.facts["defaults"], self.examples, part)
        if self.facts["lengths"] is not None:
            graphs = replace(self.job, cuda_graphs=self._captures(recipe or Recipe()))
            packing = self.facts["lengths"].resolve(graphs)[0].packing
            self.job = replace(self.job, packing=packing)
        self.gpu, self.budget, self.recipe, self._chosen = gpu, budget, recipe, chosen
        self.state = State.of(self.job)
        self.candidates: dict[tuple[Recipe, int], Candidate] = {}
        self.reasons: dict[str, list[str]] = {}
        self._reasons: list[str] = []

    @property
    def rows(self) -> tuple[Candidate, ...]:
        """The tried ways to show, from exact to most approximate.

        Every way in one pass is shown. Ways in micro-batches are shown if they fit; if no way fits,
        the ones with the most micro-batches are. Of ways with equal predictions, only the least
        approximate is shown.
        """
        ways = list(self.candidates.values())
        fitting = [way for way in ways if way.fits(self.budget)]
        last = [way for way in ways if way.accumulate == self.counts[-1]]
        ways = [way for way in ways if way.accumulate == 1 or way in (fitting or last)]
        ways += [] if self.compiled is None else [self.compiled]
        ways.sort(key=lambda way: (way.approximation, way.recipe.method != "full", way.accumulate))
        unlike = {(way.exact, way.accumulate, way.predicted): way for way in reversed(ways)}
        return tuple(way for way in ways if way in unlike.values())

    def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
        """The candidate of a recipe and a number of micro-batches, traced on first use."""
        key = recipe, accumulate
        if key not in self.candidates:
            self.report(label(recipe, accumulate))
            full = self._trace(Recipe("full"), 1)
            predicted = Predicted.of(
                *(self._trace(recipe, accumulate), self.gpu, full),
                shards=self.shards,
                graphs=accumulate if self._captures(recipe) else 0,
            )
            self.candidates[key] = self._candidate(recipe, accumulate, predicted)
        return self.candidates[key]

    def _candidate(
        self, recipe: Recipe, accumulate: int, predicted: Predicted, compiled: bool = False
    ) -> Candidate:
        """The candidate of a prediction for the card, with the update of a state on the host."""
        cosine = recipe.cosine(self.job.precision, self.family)
        state = self.state, self._chosen
        way = Candidate(recipe, accumulate, predicted, cosine, *state, compiled)
        if not self.state.on_host:
            return way
        return way.with_host_update(self._trace(recipe, accumulate).trained, self.gpu)

    def like(self, job: Job, recipe: Recipe | None, chosen: bool = False) -> "Search":
        """A search on the same card for a job with the same data set and model."""
        rest = self.cache, self.report, self.facts, chosen
        return Search(job, self.gpu, self.budget, recipe, *rest)

    @cached_property
    def weights(self) -> int:
        """The number of weights of the model that can be trained."""
        return weight_count(self.job, self.classes, self.cache)

    @property
    def least(self) -> int:
        """Bytes that the card needs without activations; for adapters, without state either."""
        whole = self.job.freeze is None and (self.recipe is None or not self.recipe.part)
        trained = self.weights if whole else 0
        draws: bool = self.facts["classifies_texts"]  # BRANCHES may be taken
        if self.recipe is not None:
            draws = self.recipe.joint_budget < 1
        size = self.state.least(self.weights, trained, draws)
        return CONTEXT + int((1 + FRAGMENTATION) * size)

    def _captures(self, recipe: Recipe) -> bool:
        """Whether a run on the card captures CUDA graphs."""
        if self.job.cuda_graphs is not None:
            return self.job.cuda_graphs
        return self.job.eager_reason(recipe.joint_budget) is None

    def needed_bytes(self, recipe: Recipe) -> int:
        """Bytes that the card must have free for a recipe in one pass; traces nothing else."""
        trace = self._trace(recipe, 1)
        return Predicted.of(trace, self.gpu, trace, self.shards).needed_bytes

    @property
    def shards(self) -> int:
        """The number of processes over which weights, gradients and optimizer state are sharded."""
        return self.job.processes if self.job.strategy == "fsdp" else 1

    def _trace(self, recipe: Recipe, accumulate: int) -> Trace:
        job = replace(self.job, accumulate=accumulate)
        return cached_trace(
            job, recipe, self.classes, self.cache, dot=self.gpu.multiplies_in_triton
        )

    def choose(self, prefer: Prefer) -> Candidate | None:
        """The choice of a preference; None if nothing fits."""
        self.reasons[prefer] = self._reasons = []
        if prefer == "balanced" and self.recipe is None:
            chosen = self._balanced()
        else:
            chosen = self.fastest(self.allowed(prefer))
        if chosen is not None:
            self._reasons.append(f"{chosen.label}: chosen.")
        return chosen

    def gain(self, way: Candidate) -> Gain | None:
        """The `Gain` of joining texts in the micro-batches of a way; None if it does not apply."""
        lengths = self.facts["lengths"]
        if lengths is None:
            return None
        graphs = self._captures(way.recipe)
        job = replace(self.job, accumulate=way.accumulate, cuda_graphs=graphs)
        gained: Gain | None = lengths.resolve(job)[1]
        return gained

    def average_share(self, way: Candidate) -> float:
        """The time of an average step relative to the predicted one, which is the largest.

        An average micro-batch has as many tokens as remain after packing or grouping.
        """
        gain, job = self.gain(way), replace(self.job, accumulate=way.accumulate)
        if gain is None or not self.examples:
            return 1.0
        assert job.packing is not None
        rows, tokens = gain.average(
            job.packing,
            self.examples / job.micro_batch,
            job.micro_batch,
            self.facts["lengths"].most,
        )
        batch = rows * job.processes * job.accumulate
        try:
            trace = cached_trace(
                replace(job, batch_size=batch, input_size=tokens),
                *(way.recipe, self.classes, self.cache),
                dot=self.gpu.multiplies_in_triton,
            )
        except UsageError:  # with so few tokens the recipe may be impossible
            return 1.0
        return min(1.0, step_seconds(trace, self.gpu).likely / way.seconds)

    def look_beside(self) -> None:
        """Adds ways to those that are shown, which are never chosen.

        They are LoRA for a language model, and compiled full fine-tuning. It is shown with the
        memory of full fine-tuning: an H100 took 99 % of it.
        """
        if self.recipe is None and self.job.task in LANGUAGE:
            self.fastest([ADAPTERS])
        if self.recipe is None and not (self.job.compile or self.job.task == "detection"):
            full = Recipe("full")
            whole, way = self._trace(full, 1), self.predict(full)
            calls = Calls(sum(whole.compiled.values()))
            trace = replace(whole, kernels=whole.compiled, calls=calls)
            predicted = Predicted.of(trace, self.gpu, whole, shards=self.shards)
            vs_full = predicted.step_seconds / way.seconds
            predicted = replace(predicted, step_seconds_vs_full=vs_full)
            self.compiled = self._candidate(full, 1, predicted, compiled=True)

    def _balanced(self) -> Candidate | None:
        """The fastest exact way, or the fastest close way if it is faster and any close way pays.

        A close way counts with the slow end of its range. It suffices that any close way pays in
        the memory that it needs. Otherwise a larger budget could lead to a slower choice.
        """
        exact = self.fastest(self._exact)
        limit = math.inf if exact is None else exact.seconds
        close = self.fastest(self._close, limit=limit, end="slow")
        if close is None or limit <= close.slow:
            return exact
        ways = (way for recipe in self._close for way in self._fitting(recipe, self.budget))
        return close if any(map(self._pays, ways)) else exact

    def _pays(self, way: Candidate) -> bool:
        """Whether `way`, at its slow end, takes at most PAYS of the time of exact ways.

        Only exact ways that fit in the memory of `way` count.
        """
        rival = self.fastest(self._exact, way.predicted.needed_bytes)
        if rival is None or way.slow <= PAYS * rival.seconds:
            return True
        self._note(
            f"{way.label}: {_takes(way)} a step, which may be less than 5 % faster than "
            f"{rival.label} ({_takes(rival)}).",
            None,
        )
        return False

    @cached_property
    def family(self) -> Family:
        """The family of the model, by whether it runs fused attention."""
        return "attention" if self._trace(Recipe("full"), 1).fused else "convolution"

    @cached_property
    def _exact(self) -> list[Recipe]:
        """The recipes with the gradient of full fine-tuning."""
        if self.family == "attention":
            return [Recipe("full"), Recipe("checkpoint")]
        return [Recipe("full"), Recipe("full", attention="flash"), Recipe("checkpoint")]

    @cached_property
    def _razor(self) -> list[Recipe]:
        """razor at the allowed ratios: close recipes first, larger ratios before smaller ones."""
        precision, family = self.job.precision, self.family
        most = min(self.job.max_ratio, largest())
        tried = {*RATIOS, METHODS[DEFAULT_METHOD].close_up_to(family, width(precision))}
        recipes = [Recipe(ratio=ratio) for ratio in (*(r for r in tried if r < most), most)]
        return sorted(recipes, key=lambda way: (not way.close(precision, family), -way.ratio))

    @property
    def _close(self) -> list[Recipe]:
        """The recipes of razor whose gradient was measured close to the exact one."""
        return [way for way in self._razor if way.close(self.job.precision, self.family)]

    @property
    def _fast(self) -> list[Recipe]:
        """All recipes of razor, and those with additions that cost no accuracy in fine-tuning."""
        added = [INT8, BRANCHES] if self.facts["classifies_texts"] else [INT8]
        return [*self._razor, *(recipe for recipe in added if recipe.ratio <= self.job.max_ratio)]

    def allowed(self, prefer: Prefer) -> list[Recipe]:
        """The recipes that a preference may take."""
        if self.recipe is not None:
            return [self.recipe]
        approximate = {"exact": [], "balanced": self._close, "fast": self._fast}
        return [*self._exact, *approximate[prefer]]

    def possible(self, recipe: Recipe, accumulate: int = 1) -> bool:
        """Whether the model can take a recipe; if not, adds the reason to the explanation.

        Raises UsageError instead if the user chose the recipe but not the number of micro-batches.
        """
        try:
            self.predict(recipe, accumulate)
        except UsageError as error:
            if self.recipe is not None and accumulate == 1:
                raise
            self._reasons.append(f"{label(recipe, accumulate)}: {error}")
            return False
        return True

    def fastest(
        self,
        recipes: list[Recipe],
        budget: int | None = None,
        limit: float = math.inf,
        end: Literal["seconds", "slow"] = "seconds",
    ) -> Candidate | None:
        """The least approximate of the fastest ways of these recipes that fit.

        Ways that take the SAME time as the fastest count as the fastest. Returns None if no way
        fits, or if all take more than `limit` seconds.

        Args:
            recipes: the recipes to compare.
            budget: bytes of the card; None for the budget of the search.
            limit: the most seconds of a step.
            end: which time of a way counts, the likely one or the slow end.
        """
        time: Callable[[Candidate], float] = attrgetter(end)
        fitting: list[Candidate] = []
        for recipe in recipes:
            if self._least(recipe) > limit or not self.possible(recipe):
                continue
            whole = self.predict(recipe)
            if time(whole) > limit:  # micro-batches would be slower still
                self._note(f"{whole.label}: {_takes(whole)} a step, too slow.", budget)
            else:
                way = next(self._fitting(recipe, budget or self.budget), None)
                fitting += [] if way is None else [way]
            limit = min([limit, *(SAME * time(way) for way in fitting)])
        fastest = [way for way in fitting if time(way) <= limit]

        def order(way: Candidate) -> tuple[Any, ...]:
            return way.approximation, time(way), way.predicted.needed_bytes

        return min(fastest, key=order, default=None)

    def _least(self, recipe: Recipe) -> float:
        """A lower bound of the seconds of a step, from ways that are traced already."""
        whole = {other: way.seconds for (other, n), way in self.candidates.items() if n == 1}
        if recipe in whole:
            return whole[recipe]  # with micro-batches a step is slower
        alike = (
            seconds
            for other, seconds in whole.items()
            if replace(other, ratio=recipe.ratio) == recipe
        )
        return ALIKE * max(alike, default=0.0)

    def _fitting(self, recipe: Recipe, budget: int) -> Iterator[Candidate]:
        """The ways of a recipe that fit, from few micro-batches to many; each is slower."""
        for accumulate in self.counts:
            if self._hopeless(recipe, accumulate, budget):
                continue
            if self.possible(recipe, accumulate):
                way = self.predict(recipe, accumulate)
                over = way.predicted.needed_bytes - budget
                if over <= 0:
                    self._note(f"{way.label}: fits, {_takes(way)} a step.", budget)
                    yield way
                else:
                    self._note(
                        f"{way.label}: needs {units.size(over, math.ceil)} more than is free.",
                        budget,
                    )

    def _note(self, reason: str, budget: int | None) -> None:
        """Adds a reason to the explanation, if it is new and about the plan's own budget."""
        if budget in (None, self.budget) and reason not in self._reasons:
            self._reasons.append(reason)

    @property
    def counts(self) -> list[int]:
        """The numbers of equal micro-batches that the batch can be split into."""
        if self.job.optimizer_in_backward or self.job.task == "embedding":  # one batch of negatives
            return [1]
        batch = replace(self.job, accumulate=1).micro_batch
        return [count for count in range(1, batch + 1) if batch % count == 0]

    def _hopeless(self, recipe: Recipe, accumulate: int, budget: int) -> bool:
        """Whether a way cannot fit, even if all tensors except weights and optimizer state shrink.

        They shrink with the micro-batch at most in proportion.
        """
        whole = self.predict(recipe).predicted
        fixed = whole.weights_bytes + whole.optimizer_bytes
        least = fixed + (whole.peak_bytes - fixed - whole.gradients_bytes) / accumulate
        return accumulate > 1 and CONTEXT + (1 + FRAGMENTATION) * least > budget


def _takes(way: Candidate) -> str:
    """The time of a step as text, a range if its ends differ."""
    return units.between(way.predicted.step_seconds_low, way.slow)
