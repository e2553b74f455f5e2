"""Times whole training steps with every method, and measures their memory, against full.

    .venv/bin/python scripts/bench/step.py

A step is forward, cross-entropy, backward, SGD with momentum and zero_grad, on random images. On a
CUDA device it is of ViT-B/16, batch 128, in bf16 and fp32; on a CPU of ViT-S/16, batch 8, in fp32.
Cases take turns on one set of weights; ratios to full are medians over the turns, and those of
compiled cases to compiled full too. Compiled are whole models, by torch.compile, in the first
precision alone; `activation_memory_budget` is what torch.compile may keep, as a share of what it
would. Of micro-batches those are taken too that have razor's peak, or less. CUDA graphs are tried
on CUDA alone; of a case with them only the time and its peak are taken with graphs.

The peak is measured on CUDA. On a CPU it is traced, that of compiled cases measured; the two agree
(tests/test_step.py). The script writes results/step_DEVICE.json after every turn of a case; razor
comes first, beside full.

The logits and the bias gradient of the classifier are exact by contract: a case in which they
differ from those of full gets no time. Of a case whose forward pass runs in int8 the logits must
have a cosine of COSINE to those of full, and must not be the same, or nothing ran in int8.
"""

import copy
import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
from pages import MIB, Row
from passes import allocated_on_cpu, peak_bytes
from record import Attempts, run_in_turns
from torch import Tensor, nn
from torch.amp import GradScaler

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.config.job import Job
from razorctl.memory.saved import kept_storages, run_forward
from razorctl.methods import METHODS
from razorctl.ops import kernels
from razorctl.training.compiled import compiler_settings
from razorctl.training.cuda_graphs import WARM_UPS, CapturedPasses

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# Relative distance between kernels that round differently; stored attention is one of them.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
COSINE = 0.99  # at least, of logits that int8 GEMMs made to those of full
# All cases find the same weights; a run's SGD is fused on CUDA.
SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.9, fused=torch.cuda.is_available() or None)
FULL = Recipe("full")
SMOKE = {"model": "vit_tiny_patch16_224", "image_size": 32, "depth": 2, "turns": 1, "steps": 1}
COLUMNS = (  # that are printed, in milliseconds and MiB
    *(("step_seconds", 1e-3, ".1f"), ("step_time_vs_full", 1, ".2f")),
    *(("step_time_vs_full_compiled", 1, ".2f"), ("saved_bytes", MIB, ",.1f")),
    *(("peak_bytes", MIB, ",.0f"), ("peak_vs_full", 1, ".2f")),
)
LIBRARIES = ("torch", "timm", "transformers", "torchao")


@dataclass(frozen=True)
class Workload:
    """A step and its turns.

    turns: the most that are run; see --seconds. steps: timed in each turn of a case.
    """

    model: str
    batch_size: int
    precisions: tuple[str, ...]
    turns: int
    steps: int
    image_size: int = 224
    depth: int = 12


@dataclass(frozen=True)
class Case:
    """How a step runs.

    rows: of a micro-batch; None: of the whole batch. graphs: whether the passes that are timed are
    captured as CUDA graphs. budget: `activation_memory_budget`, for compiled cases. exact: whether
    the forward pass is that of full by contract.
    """

    recipe: Recipe = FULL
    rows: int | None = None
    compiled: bool = False
    graphs: bool = False
    budget: float = 1.0
    exact: bool = True


@dataclass
class Run(Attempts):
    """A case in a precision, with its figures; seconds: of a step, one figure for each turn."""

    name: str
    case: Case
    precision: str
    seconds: list[float] = field(default_factory=list)
    saved: int | None = None
    peak: int | None = None
    reserved: int | None = None

    @property
    def compiled(self) -> bool:  # type: ignore[override]
        return self.case.compiled


class Bench:
    """One set of weights and one batch, which all cases share.

    models: name of a case -> the model as that changes it, with the parameters of `full`.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.workload = device, workload
        size, rows = workload.image_size, workload.batch_size
        model = timm.create_model(workload.model, img_size=size, depth=workload.depth)
        self.full: nn.Module = model.train().to(device)
        self.models: dict[str, nn.Module] = {}
        self.x = torch.randn(rows, 3, size, size, device=device)
        self.labels = torch.randint(model.num_classes, (rows,), device=device)

    def model(self, run: Run) -> nn.Module:
        """The model of a case; compiled ones stay compiled from turn to turn."""
        if run.name not in self.models:
            shared = {id(t): t for t in (*self.full.parameters(), *self.full.buffers())}
            model = copy.deepcopy(self.full, shared)  # type: ignore[arg-type]
            sparsify(model, run.case.recipe)
            self.models[run.name] = _compiled(model) if run.case.compiled else model
        return self.models[run.name]

    @contextmanager
    def running(self, run: Run) -> Iterator[nn.Module]:
        """The model of a case, with an empty cache; no gradients are left afterwards."""
        if self.device.type == "cuda":
            gc.collect()  # a failed case before this one may have left cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            with compiler_settings(run.case.budget):
                yield self.model(run)
        finally:
            self.full.zero_grad()

    def gradients(self, run: Run, model: nn.Module) -> list[Tensor]:
        """Runs forward and backward of the whole batch; returns the logits of each micro-batch."""
        dtype, logits = PRECISIONS[run.precision], []
        rows = run.case.rows or len(self.x)
        pieces = (torch.split(t, rows) for t in (self.x, self.labels))
        for x, labels in zip(*pieces, strict=True):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                y = model(x)
                loss = F.cross_entropy(y, labels) * (len(x) / len(self.x))
            loss.backward()  # type: ignore[no-untyped-call]
            logits.append(y.detach())
        return logits

    def check(self, run: Run, exact: list[Tensor]) -> None:
        """Compares a case with full, whose logits and bias gradient the first run leaves."""
        with self.running(run) as model:
            logits = torch.cat(self.gradients(run, model)).float()
            got = [logits, self.full.get_classifier().bias.grad.float()]  # type: ignore[operator]
        exact[:] = exact or got
        if not run.case.exact:
            cosine = F.cosine_similarity(logits.flatten(), exact[0].flatten(), dim=0).item()
            if not cosine >= COSINE:
                raise ArithmeticError(f"the logits have cosine {cosine:.4f} < {COSINE}")
            if _distance(logits, exact[0]) <= TOLERANCE["fp32"]:
                raise ArithmeticError("nothing ran in int8: the logits are those of full")
        elif not all(map(partial(_near, TOLERANCE[run.precision]), got, exact)):
            raise ArithmeticError("differs from full where it must not")

    def measure(self, run: Run) -> None:
        """Notes the bytes kept, and on a CPU the peak, which timing does not measure there."""
        x, autocast = self.x[: run.case.rows], PRECISIONS[run.precision]
        with self.running(run) as model:
            if run.case.compiled:  # which takes no fake tensors
                kept = kept_storages(model, partial(run_forward, model, x, autocast), lambda: None)
                run.saved = sum(storage.size for storage in kept)
            else:
                run.saved = saved_bytes(model, x, autocast=autocast)
        if self.device.type == "cpu":
            self.measure_peak(run)

    def measure_peak(self, run: Run) -> None:
        """Notes the peak: measured, or traced on a CPU if the case is not compiled."""
        with self.running(run) as model:
            if self.device.type == "cuda":
                optimizer = SGD(self.full.parameters())
                for _ in range(2):  # the optimizer has its state in the second
                    self.step(run, model, optimizer)
                run.peak = torch.cuda.max_memory_allocated()
            elif run.case.compiled:
                run.peak = self.allocated(run, model)
            else:
                x, autocast = self.x[: run.case.rows], PRECISIONS[run.precision]
                more = len(x) < len(self.x)
                run.peak = peak_bytes(model, x, SGD, autocast=autocast, accumulate=more)

    def allocated(self, run: Run, model: nn.Module) -> int:
        """The measured peak of a step on a CPU."""
        optimizer = SGD(self.full.parameters())
        self.step(run, model, optimizer)
        state = [value["momentum_buffer"] for value in optimizer.state.values()]
        resident = (*self.full.parameters(), *self.full.buffers(), *state, self.x, self.labels)
        most = allocated_on_cpu(partial(self.step, run, model, optimizer))
        return most + sum(t.untyped_storage().nbytes() for t in resident)

    def step(
        self,
        run: Run,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        captured: CapturedPasses | None = None,
    ) -> None:
        if captured is None:
            self.gradients(run, model)
        else:
            job = Job(self.workload.model, "random", precision=run.precision)  # type: ignore[arg-type]
            captured(model, _loss, (self.x, self.labels, None), job, GradScaler(enabled=False))
        optimizer.step()
        optimizer.zero_grad()

    def time(self, run: Run) -> None:
        """Runs one turn of a case: warm-up steps, then the timed steps."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        steps, optimizer = self.workload.steps, SGD(self.full.parameters())
        captured = CapturedPasses() if run.case.graphs else None
        with self.running(run) as model:
            for _ in range(1 if captured is None else WARM_UPS + 1):
                self.step(run, model, optimizer, captured)
            wait()
            start = time.perf_counter()
            for _ in range(steps):  # the host may run ahead, as it does in training
                self.step(run, model, optimizer, captured)
            wait()
            if captured is not None and not captured.works:
                raise RuntimeError("the passes could not be captured")
            if failed := kernels.replaced():  # what would be timed is the way around them
                raise RuntimeError(f"kernels failed: {', '.join(op for op, _ in failed)}")
            run.seconds.append((time.perf_counter() - start) / steps)
            if self.device.type == "cuda":
                run.peak = max(run.peak or 0, torch.cuda.max_memory_allocated())
                run.reserved = max(run.reserved or 0, torch.cuda.max_memory_reserved())


def groups(cases: Callable[[Bench, str], Mapping[str, Case]], bench: Bench) -> list[list[Run]]:
    """A run of every case in every precision, compiled ones in the first; full is the first."""
    precisions = bench.workload.precisions
    return [
        [
            Run(name, case, precision)
            for name, case in cases(bench, precision).items()
            if precision == precisions[0] or not case.compiled
        ]
        for precision in precisions
    ]


def as_row(run: Run, group: list[Run]) -> Row:
    """The row of a run in the result; the group has the runs of its precision."""
    full, recipe = group[0], run.case.recipe
    compiled = next((other for other in group if other.name == "full, compiled"), None)

    def over(other: Run) -> float | None:
        turns = [t / f for t, f in zip(run.seconds, other.seconds, strict=False)]  # one may be cut
        return median(turns) if turns and not run.error else None

    return {
        "case": run.name,
        "precision": run.precision,
        "ratio": recipe.ratio if METHODS[recipe.method].has_ratio else None,
        "step_seconds": median(run.seconds) if run.seconds and not run.error else None,
        "step_time_vs_full": over(full),
        "step_time_vs_full_compiled": over(compiled) if compiled and run.compiled else None,
        "saved_bytes": run.saved,
        "peak_bytes": run.peak,
        "peak_vs_full": run.peak / full.peak if run.peak and full.peak else None,
        "reserved_bytes": run.reserved,
        "error": run.error or (None if run.seconds else "not timed in the seconds given"),
    }


def main(
    script: str,
    description: str | None,
    workloads: Mapping[str, Workload],
    cases: Callable[[Bench, str], Mapping[str, Case]],
    **about: Any,
) -> None:
    """Runs a script of whole steps; `about` goes into its result."""
    own, names = partial(groups, cases), ("case", "precision", "error")
    rest = own, as_row, names, COLUMNS, LIBRARIES
    run_in_turns(script, description, workloads, SMOKE, Bench, *rest, **about)


def _compiled(model: nn.Module) -> nn.Module:
    """The model through torch.compile, as razorctl.training.compiled does it."""
    from torch._inductor import compile as inductor

    # A backend of its own: Dynamo would take what it compiled for an equal model and backend.
    compiled = torch.compile(model, fullgraph=True, backend=lambda *graph: inductor(*graph))
    return compiled  # type: ignore[return-value]


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(model(inputs), labels, reduction=reduction)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative."""
    norm = torch.linalg.vector_norm
    return float(norm(ours - theirs) / norm(theirs))


def _near(bound: float, ours: Tensor, theirs: Tensor) -> bool:
    return _distance(ours, theirs) <= bound


RATIO, MORE = 0.9, 0.97
BUDGET = 0.1  # about the one of least peak on a CPU, which is above razor's
MICRO_BATCH = {"cuda": 16, "cpu": 2}
WORKLOADS = {
    "cuda": Workload("vit_base_patch16_224", 128, ("bf16", "fp32"), turns=5, steps=5),
    "cpu": Workload("vit_small_patch16_224", 8, ("fp32",), turns=7, steps=1),
}


def at_peak(bench: Bench, precision: str, recipe: Recipe) -> dict[str, Case]:
    """The largest micro-batch, of halves of the batch, whose peak is at most that of a recipe.

    If there is none, the smallest one, with a name that says so; nothing if the recipe fails.
    """

    def peak(case: Case) -> int | None:
        run = Run(f"peak of {case}", case, precision)
        run.attempt(bench.measure_peak)
        return run.peak

    most, rows, sizes = peak(Case(recipe)), bench.workload.batch_size, list[int]()
    while rows := rows // 2:
        sizes.append(rows)
    if most is None:
        return {}
    where = bisect_left(sizes, True, key=lambda rows: (peak(Case(rows=rows)) or 0) <= most)
    rows = sizes[min(where, len(sizes) - 1)]
    side = "at" if where < len(sizes) else "above"
    return {f"accumulate {rows}, {side} {recipe.method}'s peak": Case(rows=rows)}


def cases(bench: Bench, precision: str) -> dict[str, Case]:
    """Every case by name; full is the first, and but for full compiled ones are the last."""
    few = MICRO_BATCH[bench.device.type]
    pruning = [name for name, method in METHODS.items() if method.prunes]
    sheared, razor = Recipe("prebackrazor++", RATIO), Recipe("razor", RATIO)
    int8 = replace(razor, int8_forward=True)
    more = replace(razor, ratio=MORE)
    graphs = {
        "full, CUDA graphs": Case(graphs=True),
        "razor, CUDA graphs": Case(razor, graphs=True),
        f"razor at {MORE}, CUDA graphs": Case(more, graphs=True),
    }
    return {
        "full": Case(),
        "razor": Case(razor),
        f"razor at {MORE}": Case(more),
        **(graphs if bench.device.type == "cuda" else {}),
        "full, compiled": Case(compiled=True),
        "razor, int8 forward": Case(int8, exact=False),
        "full, stored attention": Case(Recipe("full", attention="stored")),
        "checkpoint": Case(Recipe("checkpoint")),
        f"accumulate {few}": Case(rows=few),
        **at_peak(bench, precision, razor),
        **{name: Case(Recipe(name, RATIO)) for name in pruning if name != "razor"},
        "prebackrazor++, flash": Case(replace(sheared, attention="flash")),
        "prebackrazor++, joint budget 0.5": Case(replace(sheared, joint_budget=0.5)),
        "razor, branches 0.5": Case(replace(razor, joint_budget=0.5, joint="branches")),
        "razor, compiled": Case(razor, compiled=True),
        "razor, int8 forward, compiled": Case(int8, compiled=True, exact=False),
        f"full, compiled, activation_memory_budget {BUDGET}": Case(compiled=True, budget=BUDGET),
        "torchao int8 mixed precision, compiled": Case(
            Recipe("torchao-int8"), compiled=True, exact=False
        ),
    }


if __name__ == "__main__":
    main("step", __doc__, WORKLOADS, cases, ratio=RATIO)
