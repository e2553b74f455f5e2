"""The search: which way a preference takes, and what is said where none fits."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.errors import NoFitError, UsageError
from razorctl.methods import METHODS
from razorctl.planning import gpus, refusal
from razorctl.planning.candidates import CONTEXT, FRAGMENTATION, Candidate, Predicted
from razorctl.planning.plan import Plan, plan
from razorctl.planning.search import ALIKE, BRANCHES, INT8, PAYS, SAME, Search
from razorctl.planning.searches import Searches
from razorctl.planning.states import State, states

GIB = 2**30
JOB = Job("vit-micro", "cifar100", batch_size=3, steps=10, precision="fp32")
PREFERENCES = get_args(Prefer)
CLOSE = METHODS["razor"].close_up_to("convolution", "narrow")
RATIOS = (0.5, 0.9, CLOSE, Job.max_ratio)
WAYS = (
    *(Recipe("full"), Recipe("checkpoint")),
    *(Recipe(ratio=ratio) for ratio in RATIOS),
    *(INT8, BRANCHES),
)
NEAR = [way for way in WAYS[2:] if way.close("bf16", "convolution")]


class MadeUpSearch(Search):
    """A search among made-up ways: of each recipe the bytes and the seconds of a step in one pass.

    spread: the time of approximate ways at their slow end, over the likely one. overhead: what a
    micro-batch takes beside its share.
    """

    def __init__(
        self,
        budget: int,
        ways: dict[Recipe, tuple[float, float]],
        spread: float,
        overhead: float,
    ):
        self.job = Job("made", "up", batch_size=16, steps=1, precision="bf16")
        self.budget, self.ways, self.overhead, self.spread = budget, ways, overhead, spread
        self.recipe, self.facts = None, {"classifies_texts": True}
        self.candidates, self.reasons, self._reasons = {}, {}, []
        self.state = State.of(self.job)

    _exact = WAYS[:2]
    family = "convolution"

    def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
        if (recipe, accumulate) in self.candidates:
            return self.candidates[recipe, accumulate]
        peak, seconds = self.ways[recipe]
        peak, seconds = GIB + peak / accumulate, seconds + self.overhead * (accumulate - 1)
        reserve = CONTEXT + math.ceil(FRAGMENTATION * peak)
        slow = seconds * (self.spread if recipe.approximates else 1)
        times = seconds, seconds, slow, seconds, 0.0
        predicted = Predicted(round(peak), 0, GIB, GIB // 4, 0, 0, reserve, *times, 1, 1.0)
        cosine = recipe.cosine(self.job.precision, self.family)
        way = Candidate(recipe, accumulate, predicted, cosine, self.state)
        return self.candidates.setdefault((recipe, accumulate), way)

    def all_that_fit(self, recipes) -> list[Candidate]:
        ways = [self.predict(recipe, count) for recipe in recipes for count in self.counts]
        return [way for way in ways if way.fits(self.budget)]


@st.composite
def made(draw):
    bytes_, seconds = st.floats(0.1 * GIB, 30 * GIB), st.floats(0.5, 2)
    ways = {recipe: (draw(bytes_), draw(seconds)) for recipe in WAYS}
    of_razor = draw(seconds)
    for recipe in WAYS[2:]:
        ways[recipe] = ways[recipe][0], of_razor * draw(st.floats(0.9, 1.1))
    spread, overhead = draw(st.floats(1, 1.4)), draw(st.floats(1e-4, 0.1))
    return ways, spread, overhead  # each micro-batch launches kernels of its own


def assert_undominated(chosen: Candidate, ways: Iterable[Candidate]) -> None:
    for way in ways:
        if way.approximation <= chosen.approximation:
            assert way.seconds >= chosen.seconds
            if way.seconds == chosen.seconds:
                assert way.predicted.needed_bytes >= chosen.predicted.needed_bytes


@settings(max_examples=50, deadline=None)
@given(made(), st.lists(st.integers(GIB, 40 * GIB), min_size=2, max_size=6).map(sorted))
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_choice_is_the_best_and_more_memory_never_worse(prefer, made, budgets):
    before = math.inf
    for budget in budgets:
        found = MadeUpSearch(budget, *made)
        chosen = found.choose(prefer)
        if chosen is None:
            assert before == math.inf
            allowed = {"exact": WAYS[:2], "balanced": [*WAYS[:2], *NEAR], "fast": WAYS}[prefer]
            assert not found.all_that_fit(allowed)
            continue
        assert chosen.fits(budget)
        # What counts of an approximate way that `balanced` takes is the slow end of its range.
        counts = chosen.slow if prefer == "balanced" else chosen.seconds
        assert counts <= before * (1 if prefer == "exact" else SAME)
        before = min(before, counts)
        assert_undominated(chosen, [row for row in found.rows if row.fits(budget)])
        exact = min((way.seconds for way in found.all_that_fit(WAYS[:2])), default=math.inf)
        close = found.all_that_fit(NEAR)
        slow = min((way.slow for way in close), default=math.inf)
        if prefer == "fast":
            alike = SAME * min(way.seconds for way in found.all_that_fit(WAYS))
            fastest = [way for way in found.all_that_fit(WAYS) if way.seconds <= alike]
            assert chosen.seconds <= alike
            assert chosen.approximation == min(way.approximation for way in fastest)
        elif chosen.exact:
            assert chosen.seconds == exact
            assert prefer == "exact" or slow * SAME > PAYS * exact
        else:
            assert prefer == "balanced"
            assert chosen.recipe.close("bf16", found.family)
            assert slow <= chosen.slow <= SAME * slow
            assert chosen.slow < exact
            alike = [way for way in close if way.slow <= min(SAME * slow, exact)]
            assert chosen.approximation == min(way.approximation for way in alike)


def test_balanced_takes_a_close_way_only_if_it_is_faster_at_its_slow_end():
    ways = dict.fromkeys(WAYS[:2], (GIB, 1.0)) | dict.fromkeys(WAYS[2:], (GIB, 0.7))
    for spread, taken in ((1.2, "razor"), (1.355, "razor"), (1.36, "full")):
        assert MadeUpSearch(40 * GIB, ways, spread, 0.1).choose("balanced").recipe.method == taken
        assert MadeUpSearch(40 * GIB, ways, spread, 0.1).choose("fast").recipe.method == "razor"


@pytest.mark.parametrize("prefer", ["balanced", "fast"])
def test_of_ways_that_are_as_fast_the_closest_is_taken(prefer):
    """The ways of llama-3.2-1b on an RTX 4090, where ratio 0.5 fits too."""
    ways = dict.fromkeys(WAYS[:2], (GIB, 1.0))
    ways |= dict.fromkeys(WAYS[2:], (GIB, 0.7)) | {Recipe(ratio=CLOSE): (GIB, 0.6)}
    for seconds, ratio in ((0.600, 0.5), (0.611, 0.5), (0.613, CLOSE)):
        own = {Recipe(ratio=0.5): (GIB, seconds)}
        chosen = MadeUpSearch(40 * GIB, ways | own, 1.1, 0.1).choose(prefer)
        assert chosen.recipe == Recipe(ratio=ratio)


ONE = replace(JOB, batch_size=1, optimizer="adamw")  # of no micro-batches, so sooner traced


def searched(cache, job: Job = JOB, budget: int = 1, recipe: Recipe | None = None) -> Search:
    """On a large card, with razor at one ratio: 0.5."""
    return Search(replace(job, max_ratio=0.5), gpus.load("h200"), budget, recipe, cache)


def refused(cache, job: Job = JOB, budget: int = 1, recipe: Recipe | None = None) -> Searches:
    """The searches of a plan that does not fit."""
    return Searches(job, searched(cache, job, budget, recipe))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ratios_of_razor_differ_as_little_as_the_search_relies_on(cache, precision):
    job = replace(JOB, batch_size=32768, precision=precision)
    trying = Search(job, gpus.load("rtx-4090"), GIB, None, cache)
    possible = filter(trying.possible, trying._razor)
    times = [trying.predict(recipe).seconds for recipe in possible]
    assert len(times) >= 2
    assert min(times) >= ALIKE * max(times)


@pytest.mark.parametrize(
    ("precision", "family", "close"),
    [
        ("fp32", "attention", {0.5, 0.9, 0.95, 0.97}),
        ("bf16", "attention", {0.5, 0.9, 0.95, 0.97}),
        ("fp32", "convolution", {0.5, 0.9, 0.95, 0.97}),
        ("bf16", "convolution", {0.5, 0.9, CLOSE}),
    ],
)
def test_the_largest_close_ratio_of_a_precision_is_tried(precision, family, close, cache):
    trying = Search(replace(JOB, precision=precision), gpus.load("h200"), GIB, None, cache)
    assert trying.family == "attention"
    trying.family = family
    assert {recipe.ratio for recipe in trying._close} == close
    assert {recipe.ratio for recipe in trying._razor} == close | {0.9, 0.95, 0.97}


@pytest.mark.parametrize(
    ("model", "dataset", "added"),
    [
        ("vit", "cifar100", [INT8]),
        ("bert", "rte", [INT8, BRANCHES]),
        ("gpt2", "rte", [INT8]),
    ],
)
def test_fast_adds_what_cost_no_accuracy(model, dataset, added, cache):
    def extra(max_ratio: float) -> list[Recipe]:
        trying = Search(
            Job(model, dataset, max_ratio=max_ratio), gpus.load("h200"), GIB, None, cache
        )
        return [way for way in trying.allowed("fast") if way not in trying.allowed("balanced")]

    assert [way for way in extra(0.95) if way.ratio == 0.9 and way != Recipe()] == added
    assert extra(0.5) == []


def test_rows_that_say_the_same_are_one(cache):
    trying = searched(cache)
    first, same = trying.predict(Recipe(ratio=0.5)), trying.predict(Recipe(ratio=0.501))
    assert first.predicted == same.predicted
    assert trying.rows == (first,)


def test_what_is_traced_is_known_by_all_that_it_depends_on(cache):
    """A cache that takes one step for another would give it the other's bytes."""
    changes = (
        {},
        {"batch_size": 6},
        {"precision": "bf16"},
        {"optimizer": "adamw"},
        {"momentum": 0.0},
        {"precision": "bf16", "optimizer": "adamw"},
        {"precision": "bf16", "optimizer": "adamw", "weights": "bf16"},
        {"precision": "bf16", "optimizer": "adamw", "optimizer_state": "host"},
        {"optimizer_in_backward": True},
    )
    job, full = replace(JOB, weight_decay=0.1), Recipe("full")
    found = [searched(cache, replace(job, **change)).predict(full).predicted for change in changes]
    found.append(searched(cache, job).predict(full, 3).predicted)
    assert len(set(found)) == len(changes) + 1


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_what_does_not_fit_says_what_would(prefer, cache):
    def fitted(budget: int) -> Plan:
        job, card = replace(JOB, max_ratio=0.5), gpus.load("h200")
        return plan(job, card, budget=budget, cache=cache, prefer=prefer)

    with pytest.raises(NoFitError, match=r"in 512 MiB; it needs at least \d+ MiB") as stop:
        fitted(GIB // 2)
    assert stop.value.exit_code == 3
    methods = {way["method"] for way in stop.value.document["candidates"]}
    assert methods >= {"full", "checkpoint", "lora"}
    assert fitted(stop.value.needed)
    with pytest.raises(NoFitError):
        fitted(stop.value.needed - 1)


def test_nothing_is_traced_where_the_weights_alone_do_not_fit(cache, monkeypatch):
    found = refused(cache, ONE, budget=CONTEXT)
    assert found.choose("balanced")[0] is None
    assert found.rows == ()
    assert "state on the host: weights need" in " ".join(found.reasons["balanced"])
    assert "so choose a smaller model" in refusal.message(found, "exact")


def test_the_closest_job_that_fits(cache):
    """What the user gave is never changed, and the first change that fits is named."""
    job = replace(ONE, optimizer_state="card", optimizer_in_backward=False, precision="bf16")
    least = {
        name: refusal.needed_bytes(refused(cache, replace(job, optimizer=name)), "balanced")
        for name in ("adamw", "adamw8bit")
    }
    assert least["adamw8bit"] < least["adamw"]
    one = refusal.message(refused(cache, job, least["adamw8bit"]), "balanced")
    assert one.endswith("and fits with --optimizer adamw8bit.")
    two = refusal.message(refused(cache, job, least["adamw8bit"] - 1), "balanced")
    assert two.endswith("and fits with --optimizer adamw8bit and --optimizer-in-backward.")
    single = replace(job, precision="fp32", weights="fp32")
    said = refusal.message(refused(cache, single, least["adamw8bit"]), "balanced")
    assert said.endswith("and fits with --precision bf16 and --optimizer adamw8bit.")


@pytest.mark.parametrize(
    ("job", "flags"),
    [
        (replace(ONE, precision="bf16"), {"adamw8bit", "bf16", "backward", "host"}),
        (replace(ONE, precision="bf16", optimizer_state="card"), {"adamw8bit", "bf16", "backward"}),
        (replace(ONE, precision="fp32"), {"adamw8bit", "backward", "host"}),
        (replace(ONE, precision="bf16", weights="bf16"), {"adamw8bit", "bf16", "backward", "host"}),
        (replace(ONE, processes=1, ema=0.9, precision="bf16"), {"adamw8bit", "backward", "host"}),
        (replace(JOB, precision="bf16", optimizer="sgd"), set()),
        (replace(ONE, batch_size=2, processes=2, strategy="fsdp"), set()),
    ],
)
def test_states_that_a_plan_may_choose(cache, job, flags):
    """Each that the job can have, apart from what the user gave; one optimizer is given here."""
    job = replace(job, optimizer=job.optimizer if job.optimizer == "sgd" else None)
    asked = searched(cache, replace(job, optimizer=job.optimizer or "adamw"))
    found = [*states(job, asked.job, "balanced")][1:]
    assert {word for state in found for word in WORDS if word in state.label} == flags
    exact = [*states(job, asked.job, "exact")][1:]
    assert all(state.exact for state in exact)
    masters = [state.on_host or state.weights == "fp32" for state in found]
    assert masters == sorted(
        masters, reverse=True
    )  # weights that are rounded without any come last


WORDS = ("adamw8bit", "bf16", "backward", "host")


def test_state_on_the_host_needs_its_memory(cache):
    job = replace(ONE, precision="bf16", optimizer=None)
    found = refused(cache, replace(job, optimizer="adamw"))
    host = State("adamw", "bf16", optimizer_state="host")
    need = host.host_bytes(found.of(host).weights)
    way = found.of(host).predict(Recipe("full"))
    assert way.predicted.host_bytes == need
    usual = found.asked.predict(Recipe("full"))
    assert way.seconds > usual.seconds
    assert way.predicted.needed_bytes < usual.predicted.needed_bytes
    for memory, fits in ((need, True), (need - 1, False)):
        found.host_memory = memory
        assert found.hosts(found.of(host)) is fits


def test_the_closest_job_may_be_of_smaller_inputs(cache):
    job = Job("vit", "cifar100", batch_size=1, input_size=1024, precision="bf16")

    def message(budget: int) -> str:
        return refusal.message(refused(cache, job, budget), "fast")

    needed = refusal.needed_bytes(refused(cache, job), "fast")
    enough = units.size(needed, math.ceil)  # so that it is enough
    assert message(needed - 1).endswith(f"needs at least {enough}, and fits with --input-size 768.")
    assert "and fits with --input-size " in message(needed - 2**22)


def test_the_closest_may_be_another_way(cache):
    def message(job: Job, budget: int, recipe: Recipe | None = None) -> str:
        return refusal.message(refused(cache, job, budget, recipe), "exact")

    job = replace(JOB, batch_size=8)
    needed = {prefer: refusal.needed_bytes(refused(cache, job), prefer) for prefer in PREFERENCES}
    assert needed["fast"] <= needed["balanced"] < needed["exact"]
    assert "and fits with --prefer balanced" in message(job, needed["balanced"])
    other = message(job, needed["balanced"], Recipe("full"))
    assert "and fits with another recipe; leave the settings" in other

    # Of inputs so small that few are smaller, and the optimizer's state is most of what it needs.
    job = Job("vit", "cifar100", batch_size=1, input_size=32, precision="fp32", optimizer="sgd")
    adapters = refusal.needed_bytes(refused(cache, job, recipe=Recipe("lora")), "exact")
    assert adapters < refusal.needed_bytes(refused(cache, job), "fast")
    said = "and only --method lora fits, which trains only adapters"
    assert said in message(job, adapters)


@pytest.mark.parametrize("recipe", [None, WAYS[0]])
def test_micro_batches_that_a_model_cannot_take_are_left_out(recipe, monkeypatch):
    class NeedsTwo(MadeUpSearch):
        def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
            if accumulate == self.job.batch_size:
                raise UsageError("no variance.")
            return super().predict(recipe, accumulate)

    search = NeedsTwo(1, dict.fromkeys(WAYS, (GIB, 1.0)), 1.0, 0.0)
    search.recipe = recipe
    assert search.choose("exact") is None
    eight = search.predict(WAYS[0], 8).predicted.needed_bytes
    searches = Searches(search.job, search)
    monkeypatch.setattr(MadeUpSearch, "least", 0)
    assert refusal.needed_bytes(searches, "exact") == eight


@pytest.mark.parametrize(
    ("model", "recipe", "draws"),
    [("bert", None, True), ("gpt2", None, False), ("gpt2", Recipe(joint_budget=0.5), True)],
)
def test_the_least_bytes_have_no_gradients_where_some_may_be_missing(cache, model, recipe, draws):
    job = Job(model, "rte", batch_size=1, precision="fp32", optimizer="adamw")
    found = Search(job, gpus.load("h200"), GIB, recipe, cache)
    each = 12 if draws else 16
    assert found.least == CONTEXT + int((1 + FRAGMENTATION) * each * found.weights)
    needed = found.predict(recipe or Recipe("checkpoint")).predicted.needed_bytes
    assert found.least <= needed


def test_a_compiled_step_waits_for_the_host_too(cache):
    found = refused(cache, replace(ONE, precision="bf16"))
    search = found.of(State("adamw", optimizer_state="host"))
    search.look_beside()
    assert (
        search.compiled.predicted.host_bytes == search.predict(Recipe("full")).predicted.host_bytes
    )


def test_a_model_of_objects_has_no_compiled_step(cache):
    """Its matcher runs on the host."""
    found = searched(cache)
    found.look_beside()
    assert found.compiled is not None
    found.job, found.compiled = replace(found.job, task="detection", metric=None), None
    found.look_beside()
    assert found.compiled is None
