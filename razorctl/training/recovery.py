"""Settings with which a run continues after a step ran out of memory."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.methods import METHODS
from razorctl.rules.allocation import largest

log = logging.getLogger(__name__)

RATIOS = (0.5, 0.75, 0.9, 0.95)  # tried if above the run's ratio and below the largest allowed one
JOINT = (0.5, 0.25)  # joint budgets, tried last


@dataclass(frozen=True)
class Relief:
    """Settings with which a run needs less memory than before.

    parts: number of equal parts of each micro-batch, taken one after the other. ratio,
    joint_budget: of the recipe from this step on; None is unchanged. captured: whether
    micro-batches still become CUDA graphs, which hold memory that evaluations and updates need.
    """

    parts: int = 1
    ratio: float | None = None
    joint_budget: float | None = None
    captured: bool = False

    def job(self, job: Job) -> Job:
        """The job with the smaller micro-batches."""
        return replace(job, accumulate=job.accumulate * self.parts)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe that the model is sparsified by."""
        ratio = recipe.ratio if self.ratio is None else self.ratio
        budget = recipe.joint_budget if self.joint_budget is None else self.joint_budget
        return replace(recipe, ratio=ratio, joint_budget=budget)

    def describe(self, job: Job) -> str:
        """The settings in words, for a resolved job."""
        words = [f"in micro-batches of {self.job(job).micro_batch}"]
        if job.captured and self.parts == 1:
            words = ["without CUDA graphs"]
        if self.ratio is not None:
            words.append(f"at ratio {self.ratio:g}")
        if self.joint_budget is not None:
            words.append(f"with joint budget {self.joint_budget:g}")
        return ", ".join(words)


class Recovery:
    """The current relief of a run of a resolved job and a recipe.

    relieved: the steps that ran out of memory, each with the relief that followed.
    """

    def __init__(
        self, job: Job, recipe: Recipe, relieved: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.job, self._begun = job, recipe
        self.relief, self._left = Relief(captured=job.captured), reliefs(job, recipe)
        self.relieved = [dict(each) for each in relieved]
        for each in self.relieved[-1:]:
            last = {name: value for name, value in each.items() if name != "step"}
            self.relief = next(relief for relief in self._left if asdict(relief) == last)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the model is sparsified by."""
        return self.relief.recipe(self._begun)

    def relieve(self, step: int, sparsify: Callable[[Recipe], object]) -> bool:
        """Takes the next relief after a step ran out of memory; False if none is left.

        sparsify: sparsifies the model by another recipe; it may raise UsageError.
        """
        for relief in self._left:
            recipe = relief.recipe(self._begun)
            try:
                if recipe != self.recipe:
                    sparsify(recipe)
            except UsageError:  # the model does not support the recipe
                continue
            self.relief = relief
            self.relieved.append({"step": step, **asdict(relief)})
            how = relief.describe(self.job)
            log.warning("out of memory at step %s; from now on, steps run %s.", f"{step:,}", how)
            return True
        return False


def reliefs(job: Job, recipe: Recipe) -> Iterator[Relief]:
    """The reliefs of a run in order: exact ones, then higher ratios, then lower joint budgets.

    The first gives up CUDA graphs, and later ones capture none. A strict job has no reliefs. Nor
    has a job of several processes: if one fails inside a step, the others wait for it there.
    """
    if job.strict or job.processes > 1:
        return
    if job.captured:
        yield Relief()
    whole = job.micro_batch
    counts = [count for count in range(2, whole + 1) if whole % count == 0]
    if job.optimizer_in_backward:  # which needs the whole batch in one pass
        counts = []
    yield from map(Relief, counts)
    last = Relief(max(counts, default=1))
    for ratio in _ratios(job, recipe):
        last = replace(last, ratio=ratio)
        yield last
    if not job.compile and not recipe.part:
        yield from (replace(last, joint_budget=b) for b in JOINT if b < recipe.joint_budget)


def _ratios(job: Job, recipe: Recipe) -> list[float]:
    """The ratios above the recipe's that it can have, in ascending order.

    There are none with adapters, since new ones would lose their training.
    """
    if not METHODS[recipe.method].has_ratio or recipe.part:
        return []
    most = job.max_ratio
    if recipe.has_byte_budget:
        most = min(most, largest())
    return [ratio for ratio in sorted({*RATIOS, most}) if recipe.ratio < ratio <= most]


def parted(batch: Any, parts: int) -> Iterator[Any]:
    """The equal parts of a batch by rows; fewer, if joined texts left fewer rows."""

    def part(number: int, tensor: Tensor) -> Tensor:
        return tensor.chunk(parts)[number]

    first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    for number in range(len(first.chunk(parts))):
        yield tree_map_only(Tensor, partial(part, number), batch)
