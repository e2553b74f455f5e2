"""Training through torch.compile, where that works, and whether it pays off."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.ops.op import OPS
from razorctl.training.payoff import Payoff

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# The sentence of a block that cannot be traced, in an error of torch.
REFUSAL = r"User-inserted graph break\. Message: (.*)"
EAGER, TIMED = 3, 3  # eager steps before the compiled ones; compiled steps that are timed
WARM_UPS = 1  # untimed eager steps, and untimed compiled steps after the one that compiles
JUDGED = EAGER + 1 + WARM_UPS + TIMED  # the step after which the payoff is known


def refuse_uncompilable(job: Job, recipe: Recipe) -> None:
    """Raises UsageError for a job whose steps cannot be compiled or captured as it asks."""
    if not (job.compile or job.captured):
        return
    how, kind, option = "compiled", "compiled", "--compile"
    if job.captured:
        how, kind, option = "captured as CUDA graphs", "CUDA", "--cuda-graphs"
    if job.processes > 1:
        raise UsageError(f"steps of several processes are not {how}; leave {option} out.")
    if recipe.joint_budget < 1:
        raise UsageError(
            f"a joint budget samples anew in every step, which a {kind} graph cannot follow; leave "
            f"{option} out, or set --joint-budget to 1."
        )
    if job.captured and job.optimizer_in_backward:
        raise UsageError(
            "a CUDA graph would repeat the learning rate of an update in the backward pass; leave "
            "--cuda-graphs or --optimizer-in-backward out."
        )


@contextmanager
def compiler_settings(budget: float | None = None) -> Iterator[None]:
    """The settings of torch's compiler for a step.

    The cache of programs has the schemas of razorctl's ops in its key, since programs call ops by
    their schemas. budget: the share of activations that is stored for backward; None: torch's.
    """
    import torch._functorch.config as graphs
    import torch.compiler.config as caches

    schemas = sorted(str(op.overload._schema) for op in OPS.values())
    tag = f"{caches.cache_key_tag} {schemas}"
    budget = graphs.activation_memory_budget if budget is None else budget
    stored = caches.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    with stored, graphs.patch(activation_memory_budget=budget):
        yield


class Compiled:
    """Runs the training steps of a model as one compiled graph; the model itself stays eager.

    So evaluation, traced bytes, state dict and hooks are of an eager model. A model that cannot be
    compiled gives a warning and is trained eagerly; one whose CUDA graphs fail is compiled without.
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.model, self._graphs = model, bool(job.cuda_graphs)
        self._budget = job.activation_memory_budget
        self._compiled = self._compile() if job.compile else None

    def _compile(self) -> nn.Module:
        torch.compiler.reset()  # the limit of recompilations counts other models too
        mode = "reduce-overhead" if self._graphs else None
        return torch.compile(self.model, fullgraph=True, mode=mode)  # type: ignore[return-value]

    @property
    def works(self) -> bool:
        """Whether steps are compiled; compiling may still fail."""
        return self._compiled is not None

    def step(
        self, take: Callable[Concatenate[nn.Module, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Returns `take(model, *args, **kwargs)` for the compiled model, else for the eager one.

        take: changes weights after all forward and backward passes, so that it may be called again.
        """
        if self._compiled is None:
            return take(self.model, *args, **kwargs)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            with compiler_settings(self._budget):
                return take(self._compiled, *args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            log.warning("training continues without compiling: %s", failure_reason(error))
            self._compiled = None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self._graphs:
                raise
            log.warning("training continues without CUDA graphs: %s", failure_reason(error))
            self._graphs = False
            self._compiled = self._compile()
        self.model.zero_grad()  # of the micro-batches before
        return self.step(take, *args, **kwargs)


class Trial(Compiled):
    """Compiles the steps of a resolved job after EAGER steps, and measures the gain.

    payoff: None before step JUDGED, and if steps are not compiled.
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__(model, job)
        assert job.steps is not None
        self.steps = job.steps
        self.payoff: Payoff | None = None
        self.compile_seconds = 0.0  # also of the run before it was resumed
        self._before = False  # whether steps were compiled before it was resumed
        self._seconds: list[float] = []
        if job.compile and job.steps < JUDGED:
            log.warning(
                "compiling does not pay off in a run of %s.", units.count(job.steps or 0, "step")
            )

    @property
    def done(self) -> bool:
        """Whether steps of this run have been compiled, and still are."""
        return self.works and (self._before or len(self._seconds) > EAGER)

    @property
    def steady(self) -> list[float]:
        """Seconds of this process's compiled steps after the first, which compiles."""
        return self._seconds[EAGER + 1 :] if self.works else []

    def state_dict(self) -> dict[str, Any]:
        """The payoff and the time of compiling so far, for a resumed run."""
        return {
            "payoff": self.payoff and asdict(self.payoff),
            "compile_seconds": self.compile_seconds,
            "done": self.done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; the model is compiled again after EAGER steps."""
        self.payoff = state["payoff"] and Payoff(**state["payoff"])
        self.compile_seconds, self._before = state["compile_seconds"], state["done"]

    def step(
        self, take: Callable[Concatenate[nn.Module, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if len(self._seconds) < EAGER:
            return take(self.model, *args, **kwargs)
        return super().step(take, *args, **kwargs)

    def note(self, seconds: float) -> None:
        """Takes the seconds of each step; after step JUDGED, logs the payoff."""
        self._seconds.append(seconds)
        if len(self._seconds) != JUDGED or not self.works:
            return
        eager, timed = median(self._seconds[WARM_UPS:EAGER]), median(self._seconds[-TIMED:])
        self.payoff = Payoff.of(self._seconds[EAGER], eager, timed)
        self.compile_seconds += self.payoff.compile_seconds
        if self.payoff.steps is None:
            log.warning("%s; leave --compile out.", self.payoff)
        elif self.payoff.steps > self.steps - EAGER:
            log.warning("%s, and the run has only %s.", self.payoff, f"{self.steps:,}")
        else:
            log.info("%s.", self.payoff)


def failure_reason(error: Exception) -> str:
    """The sentence of a block that refuses to be traced, else the first line of torch's error."""
    if match := re.search(REFUSAL, str(error)):
        return match[1]
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first
