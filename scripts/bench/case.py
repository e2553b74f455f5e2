"""One case of a whole training step: how it runs, is checked, measured and timed.

A step is forward, cross-entropy, backward, SGD with momentum and zero_grad, on random images.
"""

import copy
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.memory.measured import allocated_on_cpu
from razorctl.memory.saved import _forward, _note_saved
from razorctl.memory.tracker import peak_bytes
from razorctl.ops import kernels

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# Relative distance between kernels that round differently; stored attention is one of them.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
COSINE = 0.99  # at least, of logits that int8 GEMMs made to those of full
SGD = partial(torch.optim.SGD, lr=0.0, momentum=0.9)  # all cases find the same weights
FULL = Recipe("full")


@dataclass(frozen=True)
class Workload:
    """What is timed. turns: the most that are run; see --seconds. steps: timed in each turn of a
    case.
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

    rows: of a micro-batch; None: of the whole batch. budget: `activation_memory_budget`, for
    compiled cases. exact: whether the forward pass is that of full by contract.
    """

    recipe: Recipe = FULL
    rows: int | None = None
    compiled: bool = False
    budget: float = 1.0
    exact: bool = True


@dataclass
class Run:
    """A case in a precision, and what is known of it.

    seconds: of a step, one figure for each turn. error: why the case is not timed.
    """

    name: str
    case: Case
    precision: str
    seconds: list[float] = field(default_factory=list)
    saved: int | None = None
    peak: int | None = None
    reserved: int | None = None
    error: str | None = None

    def attempt(self, action: Any, *args: Any) -> None:
        """Calls `action` with this run, unless it has failed before; an exception becomes its
        error.
        """
        try:
            if self.error is None:
                action(self, *args)
        except Exception as error:  # running out of memory too
            line = next(iter(str(error).strip().splitlines()), "")[:300]
            self.error = f"{type(error).__name__}: {line}"


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
            with torch._functorch.config.patch(activation_memory_budget=run.case.budget):
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
        """Compares a case with full, whose logits and bias gradient the first run puts in
        `exact`.
        """
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
        x, autocast, sizes = self.x[: run.case.rows], PRECISIONS[run.precision], list[int]()
        with self.running(run) as model:
            if run.case.compiled:  # which takes no fake tensors
                _note_saved(model, partial(_forward, model, x, autocast), sizes.append)
                run.saved = sum(sizes)
            else:
                run.saved = saved_bytes(model, x, autocast=autocast)
        if self.device.type == "cpu":
            self.measure_peak(run)

    def measure_peak(self, run: Run) -> None:
        """Notes the peak: measured, or traced if the device is a CPU and the case is not
        compiled.
        """
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

    def step(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.gradients(run, model)
        optimizer.step()
        optimizer.zero_grad()

    def time(self, run: Run) -> None:
        """Runs one turn of a case: a warm-up step, then the timed steps."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        steps, optimizer = self.workload.steps, SGD(self.full.parameters())
        with self.running(run) as model:
            self.step(run, model, optimizer)
            wait()
            start = time.perf_counter()
            for _ in range(steps):  # the host may run ahead, as it does in training
                self.step(run, model, optimizer)
            wait()
            if failed := kernels.replaced():  # what would be timed is the way around them
                raise RuntimeError(f"kernels failed: {', '.join(op for op, _ in failed)}")
            run.seconds.append((time.perf_counter() - start) / steps)
            if self.device.type == "cuda":
                run.peak = max(run.peak or 0, torch.cuda.max_memory_allocated())
                run.reserved = max(run.reserved or 0, torch.cuda.max_memory_reserved())


def _compiled(model: nn.Module) -> nn.Module:
    """The model through torch.compile, as razorctl.training.compiled does it."""
    from torch._inductor import compile as inductor

    # A backend of its own: Dynamo would take what it compiled for an equal model and backend.
    compiled = torch.compile(model, fullgraph=True, backend=lambda *graph: inductor(*graph))
    return compiled  # type: ignore[return-value]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative."""
    norm = torch.linalg.vector_norm
    return float(norm(ours - theirs) / norm(theirs))


def _near(bound: float, ours: Tensor, theirs: Tensor) -> bool:
    return _distance(ours, theirs) <= bound
