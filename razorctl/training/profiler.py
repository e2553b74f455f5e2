"""profile: the bytes and the time of a training step, by module and by phase."""

import errno
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from razorctl import data, models
from razorctl.config.job import Job, Precision
from razorctl.config.recipe import Recipe
from razorctl.data.own import text_lengths
from razorctl.errors import UsageError
from razorctl.memory import measured
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.models import Model
from razorctl.ops import kernels
from razorctl.optimizer import build_optimizer
from razorctl.planning import job_trace as tracing
from razorctl.step import forward_backward, precision, train_step
from razorctl.surgery.byte_budget import Full, within
from razorctl.system import devices
from razorctl.system.atomic import atomic_file, check_room, scratch, writing
from razorctl.system.spans import watched
from razorctl.training import cuda_graphs, kept_bytes
from razorctl.training.compiled import Compiled, refuse_uncompilable
from razorctl.training.cuda_graphs import CapturedPasses
from razorctl.training.feed import Feed, sequenced
from razorctl.training.kept_bytes import Row

CLASSES = 10
RANDOM = "random"  # the data set of a job without one
WARM_UP, TRACED = 2, 2  # steps before the timed ones; steps in a trace or a snapshot
PHASES = ("data", "forward", "sampling", "backward", "optimizer")
File = Path | str | None


@dataclass(frozen=True)
class Phases:
    """Seconds of a step by phase, as medians over the steps; phases do not overlap.

    data: making a batch and moving it to the device.
    forward: the forward pass and the loss, without `sampling`.
    sampling: choosing and packing copies in the forward pass, and the draws of a joint budget; 0 in
        a compiled or captured step, where it is part of `forward`.
    backward: the backward pass, with unpacking and the updates of samplers; 0 in a CUDA graph that
        is not compiled, where it is part of `forward`.
    optimizer: clipping, the update, and setting the gradients to None.
    """

    data_s: float
    forward_s: float
    sampling_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Peak:
    """Highest bytes of a step: traced as in `plan`, and measured by CUDA's allocator if any."""

    traced: int
    measured_allocated: int | None
    measured_reserved: int | None


@dataclass(frozen=True)
class Profile:
    """The result of `profile`.

    step_s: median seconds of a whole step. kernels: how ops run on the device. compiled,
    cuda_graphs: whether steps were compiled or captured; bytes are of the eager model. dataset:
    None for random batches. notes: sentences for the user.
    """

    model: str
    dataset: str | None
    recipe: Recipe
    batch_size: int
    input_size: int | None
    precision: Precision
    optimizer: str
    device: str
    kernels: str
    steps: int
    rows: tuple[Row, ...]
    peak_bytes: Peak
    phases: Phases
    step_s: float
    compiled: bool
    cuda_graphs: bool
    notes: tuple[str, ...] = ()

    def result(self) -> dict[str, Any]:
        """The profile under the stable keys of `profile --json`; keys with `full` are of `full`."""
        return {**kept_bytes.sums(self.rows), **asdict(self)}


class Clock:
    """Times one step by phase; a Chrome trace shows ranges of the same names.

    The device is idle at the start and the end of a phase. Sampling inside a phase is timed by CUDA
    events, which do not synchronize.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: dict[str, float] = {}
        self._sampled: list[tuple[Any, Any]] = []
        self._sampling = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._idle()
        with record_function(name):
            yield
            self._seconds[name] = self._idle() - start

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Times the block, which is inside `forward`, as sampling; nested blocks count once."""
        if self._sampling:
            yield
            return
        self._sampling, start = True, self._mark()
        with record_function("sampling"):
            yield
        self._sampled.append((start, self._mark()))
        self._sampling = False

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; the step must have ended."""
        sampling = sum(self._between(*marks) for marks in self._sampled)
        forward = self._seconds["forward"] - sampling
        return {**self._seconds, "forward": forward, "sampling": sampling}

    def _idle(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000


class TimedTraining:
    """Times the steps of `finetune` for a model, on random batches or the batches of a feed."""

    def __init__(
        self,
        family: Model,
        model: nn.Module,
        job: Job,
        device: torch.device,
        feed: Feed | None = None,
    ) -> None:
        assert job.batch_size is not None
        self.family, self.model, self.job, self.device = family, model.train(), job, device
        self.batch_size = job.batch_size
        self._updates = build_optimizer(model, job)
        self._scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
        self.compiled = Compiled(model, job)
        self._captured = CapturedPasses() if job.captured else None
        self.feed = feed
        self._batches = None if feed is None else feed.loading.batches()

    def batch(self) -> tuple[Any, Tensor]:
        """Inputs and labels on the device; without a feed the labels are random."""
        if self.feed is not None and self._batches is not None:
            (rows,) = next(self._batches)  # one micro-batch
            return self.feed.trained(rows)
        batch = self.family.batch(self.model, self.batch_size, self.job.input_size, CLASSES)
        inputs, labels = tree_map_only(Tensor, lambda t: t.to(self.device), batch)
        return inputs, labels.random_(2 if labels.is_floating_point() else CLASSES)

    def step(self) -> dict[str, float]:
        """Runs a training step; returns its seconds by phase, and of the whole as "step"."""
        return self.compiled.step(self._step)

    def _step(self, model: nn.Module) -> dict[str, float]:
        clock = Clock(self.device)

        def batch() -> Iterator[tuple[Any, Tensor]]:
            with clock.phase("data"):
                rows = self.batch()
            yield rows

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            # A compiled graph cannot read a clock.
            eager = name == "forward" and not self.compiled.works
            sampling = watched(clock.sampling) if eager else nullcontext()
            with clock.phase(name), sampling:
                yield

        with clock.phase("step"):
            train_step(
                model,
                self.family.losses(self.job),
                batch(),
                self._updates,
                self.job,
                self._scaler,
                phase=phase,
                run=self._captured or forward_backward,
            )
        return clock.seconds


def profile(
    model: str,
    recipe: Recipe | None = None,
    *,
    dataset: str | None = None,
    steps: int = 5,
    device: torch.device | str | None = None,
    trace: File = None,
    snapshot: File = None,
    progress: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> Profile:
    """Profiles a training step of a model with fresh weights.

    Bytes are traced on fake tensors, as in `saved_bytes`; a byte budget is met as in `finetune`.
    Steps are captured as CUDA graphs if a long run would capture them. Raises UsageError for
    settings that cannot be used, before any step, and what reading the data set raises.

    Args:
        model: the name of a model.
        recipe: None is the default one.
        dataset: the data set of the batches; None is random batches.
        steps: the number of timed steps.
        device: None is CUDA if available, else the CPU.
        trace: file for a Chrome trace of two more steps.
        snapshot: file for a CUDA memory snapshot of two more steps.
        progress: called with the name of each stage.
        settings: of a `Job`, such as `batch_size`.
    """
    recipe, place = recipe or Recipe(), devices.find(device)
    job = Job(model, dataset or RANDOM, steps=steps, **settings)
    refuse_uncompilable(job, recipe)
    _check_files(place, trace, snapshot)
    job, note = capture_as_in_runs(job, recipe, place)
    job = replace(job, precision=precision(job, place))
    if dataset is None:
        family, splits = models.find(model, job.task), None
        classes = 1 if family.task == "regression" else CLASSES
        job = job.resolved(family.defaults, sys.maxsize)
    else:
        family, splits, job = _load(job, progress)
        classes = len(splits.classes)
    progress(f"profiling {model}")
    tracing.blueprint(job, classes)
    net = family.bare(classes, job.input_size).to(place)
    feed = None if splits is None else Feed(net, job, family, splits, place)
    rows = _sparsified_rows(net, recipe, JobForward(family, job, classes), place)
    training = TimedTraining(family, net, job, place, feed)  # after `sparsify` adds adapters
    result = _profile(training, recipe, classes, rows)
    _record(training.step, trace, snapshot)
    return replace(result, notes=(note,) if note else ())


def capture_as_in_runs(job: Job, recipe: Recipe, device: torch.device) -> tuple[Job, str]:
    """The job with `cuda_graphs` as in a long run, and the note of such a run; "" without one.

    Raises UsageError for graphs on another device than CUDA.
    """
    if job.cuda_graphs and device.type != "cuda":
        raise UsageError("CUDA graphs need a CUDA device; leave --cuda-graphs out.")
    resolved, note = cuda_graphs.resolve(replace(job, steps=None), recipe, device)
    return replace(job, cuda_graphs=resolved.cuda_graphs), note


def _load(job: Job, progress: Callable[[str], None]) -> tuple[Model, data.Splits, Job]:
    """The model's family, the splits of the data set, and the resolved job."""
    family, source = data.pair(job)
    progress(f"loading {job.dataset}")
    splits = sequenced(source.load(progress), family.fed(job), job, progress)
    job = job.resolved(family.defaults, len(splits.train))
    if text_lengths.has_texts_apart(job, source):
        job, _ = text_lengths.of_rows(splits.train, family, job).resolve(job)
    return family.fed(job), splits, job


def _profile(
    training: TimedTraining, recipe: Recipe, classes: int, rows: tuple[Row, ...]
) -> Profile:
    """Runs the steps of a sparsified model, whose rows are traced."""
    job, device = training.job, training.device
    assert job.steps is not None
    traced = tracing.trace(job, recipe, classes, device.type)
    gc.collect()  # the fake copies are in reference cycles
    medians, allocator = _measure(training, job.steps)
    return Profile(
        model=job.model,
        dataset=None if training.feed is None else job.dataset,
        recipe=recipe,
        batch_size=training.batch_size,
        input_size=job.input_size,
        precision=job.precision,
        optimizer=str(job.optimizer),
        device=devices.name(device),
        kernels=kernels.state(device),
        steps=job.steps,
        rows=rows,
        peak_bytes=Peak(traced.on(device.type), *allocator),
        phases=Phases(**{f"{name}_s": medians[name] for name in PHASES}),
        step_s=medians["step"],
        compiled=training.compiled.works,
        cuda_graphs=bool(job.cuda_graphs),
    )


def _sparsified_rows(
    net: nn.Module, recipe: Recipe, whole: JobForward, device: torch.device
) -> tuple[Row, ...]:
    """Sparsifies `net`; returns a row for each module that stores anything before or after."""
    modules = kept_bytes.kinds(net)
    inputs = whole.inputs(net, device)
    full = traced_bytes_by_module(net, inputs, **whole.options)
    parts = within(net, recipe, inputs, Full(sum(full.values())), **whole.options).parts
    sparsified = parts or traced_bytes_by_module(net, inputs, **whole.options)
    # Adapters are new modules.
    return kept_bytes.make_rows(kept_bytes.kinds(net) | modules, sparsified, full)


def _measure(
    training: TimedTraining, steps: int
) -> tuple[dict[str, float], tuple[int | None, int | None]]:
    """Runs steps after a warm-up; returns median seconds by phase, and CUDA's `Peak` if any."""
    warm_up = WARM_UP + 1 if training.job.captured else WARM_UP  # the last one captures
    for _ in range(warm_up):
        training.step()
    cuda = training.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(training.device)
    times = [training.step() for _ in range(steps)]
    medians = {name: median(seconds[name] for seconds in times) for name in times[0]}
    if not cuda:
        return medians, (None, None)
    allocated = torch.cuda.max_memory_allocated(training.device)
    return medians, (allocated, torch.cuda.max_memory_reserved(training.device))


def _record(step: Callable[[], Any], trace: File, snapshot: File) -> None:
    """Runs steps for a snapshot and for a trace, if there is a file for it."""
    if snapshot is not None:
        with atomic_file(Path(snapshot), True) as file, measured.snapshot(file):
            for _ in range(TRACED):
                step()
    if trace is not None:
        # At other levels torch logs each trace to stderr, and an error without a GPU.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with torch.profiler.profile() as profiler:  # records all available activities
            for _ in range(TRACED):
                step()
        out = Path(trace)
        with writing(out, "file", "--trace"), scratch(out.parent) as folder:
            whole = folder / "trace.json"
            profiler.export_chrome_trace(str(whole))
            if not (whole.exists() and whole.read_bytes().endswith(b"}")):  # torch raises nothing
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with atomic_file(out, replace=True) as file:
                whole.replace(file)


def _check_files(device: torch.device, trace: File, snapshot: File) -> None:
    """Raises UsageError for a snapshot without CUDA, and for a file that cannot be written."""
    if snapshot is not None and device.type != "cuda":
        raise UsageError(
            "a memory snapshot needs a CUDA device; leave --snapshot out, or choose --device cuda."
        )
    for flag, file in (("--trace", trace), ("--snapshot", snapshot)):
        if file is not None:
            check_room(Path(file), flag, replace=True)
