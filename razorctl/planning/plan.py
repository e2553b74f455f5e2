"""plan: the ways to run a job that fit a card, their cost, and the one to take."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from razorctl.config.job import STATE, Job
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.errors import NoFitError, UsageError
from razorctl.memory import trace_cache as traces
from razorctl.models.joined_texts import Gain
from razorctl.planning import refusal
from razorctl.planning.candidates import CONTEXT, Candidate, Predicted
from razorctl.planning.gpus import Achieved, Gpu
from razorctl.planning.search import Search
from razorctl.planning.searches import Searches
from razorctl.registry import unknown
from razorctl.system import documents
from razorctl.system.processes import program
from razorctl.version import __version__


@dataclass(frozen=True)
class Plan:
    """The ways to run a job that were tried, and the one to take.

    Args:
        job: resolved except for `accumulate`, which is in the chosen candidate.
        budget: bytes of the card that may be used.
        steps: sentences on what was tried, in order, and why it was not taken.
        others: preference -> its choice, None if nothing fits.
        packing: the tokens of an epoch with packed texts, and with padded ones, in the
            micro-batches of the chosen way; None if the model cannot pack or pad them, or their
            lengths are unknown.
    """

    job: Job
    gpu: Gpu
    budget: int
    prefer: Prefer
    steps_per_epoch: int | None
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    steps: tuple[str, ...]
    others: dict[str, Candidate | None]
    packing: Gain | None = None

    @property
    def planned_job(self) -> Job:
        """The job with the chosen number of micro-batches and the chosen state."""
        return self.chosen.of(self.job)

    @property
    def planned_recipe(self) -> Recipe:
        """The chosen recipe with the job's seed, since `finetune --seed` sets both."""
        return replace(self.chosen.recipe, seed=self.job.seed)

    @property
    def reason(self) -> str:
        """A phrase that gives the reason for the choice."""
        if not self.others:
            return "as requested, with the fewest micro-batches that fit"
        if self.prefer == "fast":
            return "the fastest way that fits"
        if self.chosen.exact:
            return "the fastest exact way that fits"
        exact = self.others["exact"]
        rival = "nothing exact fits"
        if exact is not None:
            rival = f"{_times(exact.seconds, self.chosen)} as fast as {exact.label}"
        close = f"a measured cosine of {self.chosen.cosine:.3f} or more to the exact one"
        return f"{rival}, and in {self.job.precision} its gradient has {close}"

    @property
    def command(self) -> str:
        """The command line that runs exactly this plan."""
        return command_line(self.planned_job, self.planned_recipe)

    def document(self) -> dict[str, Any]:
        """The plan under the stable keys of `plan --json`."""
        body = {
            "razorctl": __version__,
            "fits": True,
            "prefer": self.prefer,
            "context_bytes": CONTEXT,
            **_document(self.planned_job, self.gpu, self.budget, self.candidates),
            "steps_per_epoch": self.steps_per_epoch,
            "packing": self.packing and asdict(self.packing),
            "chosen": _entry(self.chosen, self.job, self.budget),
            "reason": self.reason,
            "others": {
                prefer: way and _entry(way, self.job, self.budget)
                for prefer, way in self.others.items()
            },
            "explanation": list(self.steps),
            "command": self.command,
        }
        return documents.sealed(body)


def _document(job: Job, gpu: Gpu, budget: int, ways: Sequence[Candidate]) -> dict[str, Any]:
    """The part of the document that plans and refusals share."""
    return {
        "budget_bytes": budget,
        "gpu": {
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "compute_capability": gpu.compute_capability,
            "achieved": asdict(gpu.achieved),
        },
        "job": asdict(job),
        "candidates": [_entry(way, job, budget) for way in ways],
    }


def _entry(way: Candidate, job: Job, budget: int) -> dict[str, Any]:
    recipe = way.recipe
    return {
        "label": way.label,
        "method": recipe.method,
        "ratio": recipe.ratio,
        "joint_budget": recipe.joint_budget,
        "attention": recipe.attention,
        "precision": job.precision,
        "micro_batch": way.of(job).micro_batch,
        "accumulate": way.accumulate,
        **way.state._asdict(),
        "state": way.state.label if way.chosen else "",
        "exact": way.exact,
        "compiled": way.compiled,
        "cosine": way.cosine,
        "fits": way.fits(budget),
        "recipe": asdict(replace(recipe, seed=job.seed)),
        "predicted": asdict(way.predicted),
        # None if only tokenizing tells how many steps the epochs have.
        "run_seconds": None if job.steps is None else way.average_seconds * job.steps,
    }


def _times(seconds: float, way: Candidate) -> str:
    """How many times a step of `way` fits into `seconds`, from least to most."""
    least, most = (f"{seconds / end:.2f}" for end in (way.slow, way.predicted.step_seconds_low))
    return f"{least}x" if least == most else f"{least} to {most}x"


FLAGS = {"learning_rate": "lr"}


def command_line(job: Job, recipe: Recipe) -> str:
    """The command line that trains a job by a recipe with the same seed."""
    words = [*program(job.processes), "finetune", job.model, job.dataset]
    named = {"model", "dataset", "processes"}
    for settings in (job, recipe):
        for field in fields(settings):
            value = getattr(settings, field.name)
            default = STATE.get(field.name, field.default)
            if value not in (default, field.default) and field.name not in named:
                named.add(field.name)  # the seed is a field of both
                flag = FLAGS.get(field.name, field.name.replace("_", "-"))
                if isinstance(value, bool):
                    words.append(f"--{'' if value else 'no-'}{flag}")
                else:
                    words += [f"--{flag}", str(value)]
    if recipe == Recipe(seed=job.seed):
        words += ["--method", recipe.method]  # without a flag of the recipe, `finetune` would plan
    return shlex.join(words)


@dataclass(frozen=True)
class _Card:
    """The card in a plan's document."""

    name: str
    memory_bytes: int
    compute_capability: str
    achieved: Achieved


@dataclass(frozen=True)
class _Way:
    """A way in a plan's document, as written by `_entry`."""

    label: str
    method: str
    ratio: float
    joint_budget: float
    attention: str
    precision: str
    micro_batch: int
    accumulate: int
    optimizer: str
    weights: str
    optimizer_in_backward: bool
    optimizer_state: str
    state: str
    exact: bool
    compiled: bool
    cosine: float | None
    fits: bool
    recipe: Recipe
    predicted: Predicted
    run_seconds: float | None


@dataclass(frozen=True)
class Document:
    """The document that `plan --json` prints if a job fits; a run directory stores it."""

    razorctl: str
    fits: Literal[True]
    prefer: Prefer
    context_bytes: int
    budget_bytes: int
    gpu: _Card
    job: Job
    candidates: Sequence[_Way]
    steps_per_epoch: int | None
    packing: Gain | None
    chosen: _Way
    reason: str
    others: Mapping[str, _Way | None]
    explanation: Sequence[str]
    command: str
    digest: str


def read(file: Path) -> tuple[Job, Recipe, dict[str, Any]]:
    """The job, the chosen recipe and the whole document in a file of `plan --json`.

    Raises UsageError for a file that cannot be read, is not a plan, was edited, or was written by
    another version of razorctl.
    """
    try:
        content = documents.read_bytes(file)
        document: dict[str, Any] = documents.parse(content)
        version = document.get("razorctl") if isinstance(document, dict) else None
        if isinstance(version, str) and version != __version__:
            raise UsageError(f"{file} was planned by razorctl {version}; plan again.")
        documents.parse_kind(content, Document)
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); name another file.") from None
    except documents.UnlikeError as error:
        raise UsageError(
            f"{file} is not a plan ({error}); plan again with `razorctl plan --json`, or use flags."
        ) from None
    return Job(**document["job"]), Recipe(**document["chosen"]["recipe"]), document


def plan(
    job: Job,
    gpu: Gpu,
    recipe: Recipe | None = None,
    *,
    budget: int | None = None,
    prefer: Prefer = "balanced",
    host_memory: int | None = None,
    cache: traces.Cache | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> Plan:
    """Plans how to run a job in `budget` bytes of a card; None is all of its memory.

    Exact ways are full fine-tuning and activation checkpointing, each in one pass or accumulated
    over micro-batches. prefer:
    - `exact` takes the fastest exact way that fits.
    - `balanced` takes an approximate way instead if its predicted time is at least 5 % less, at the
      slow end of its range, and if its gradient was measured at a cosine of 0.98 or more at the
      job's precision.
    - `fast` takes the way with the least predicted time, with razor up to the job's `max_ratio`. At
      ratio 0.9 it may add what cost no more accuracy in fine-tuning than the spread of seeds
      (scripts/bench/accuracy.md): the int8 forward pass, and for encoders that classify texts
      gradients of only half of the residual branches per step.
    If no way fits with the weights and the optimizer's state that the job has, leaner ones are
    tried, unless the user gave them; see `states.LEANER`.

    Among ways whose times differ by at most 2 %, each takes the least approximate one. None takes
    LoRA, which trains other parameters. Plans for language models list it.

    Raises NoFitError with the smallest sufficient budget if nothing fits, and UsageError for
    settings that cannot be used.

    Args:
        recipe: if given, the only recipe that is tried.
        host_memory: bytes of the host that optimizer state may take; None for any number.
        report: called with the label of each way before it is traced.
    """
    if prefer not in get_args(Prefer):
        raise unknown("preference", prefer, get_args(Prefer))
    asked = Search(job, gpu, budget or gpu.memory_bytes, recipe, cache, report)
    searches = Searches(job, asked, host_memory)
    chosen, search = searches.choose(prefer)
    if chosen is None:
        message, needed = refusal.message(searches, prefer), refusal.needed_bytes(searches, prefer)
        document = _document(asked.job, gpu, asked.budget, searches.rows)
        raise NoFitError(message, needed, {"fits": False, "needed_bytes": needed, **document})
    names = get_args(Prefer) if recipe is None else ()
    others = {name: searches.choose(name)[0] for name in names if name != prefer}
    search.look_beside()
    assert search.job.batch_size is not None
    share = search.average_share(chosen)
    return Plan(
        job=asked.job,
        gpu=gpu,
        budget=asked.budget,
        prefer=prefer,
        steps_per_epoch=asked.examples and asked.examples // search.job.batch_size,
        candidates=tuple(way.averaging(share) for way in searches.rows),
        chosen=chosen.averaging(share),
        steps=tuple(searches.reasons[prefer]),
        others={name: way and way.averaging(share) for name, way in others.items()},
        packing=search.gain(chosen),
    )
