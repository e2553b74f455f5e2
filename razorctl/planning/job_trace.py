"""Traces a job's training step on fake tensors, without weights, data or a device."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.layers.shared_copies.mlp_tiles import as_compiled
from razorctl.memory import fake, tracker
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes, tracing
from razorctl.memory.trace_cache import Trace
from razorctl.methods import METHODS
from razorctl.ops.kernels import assumed
from razorctl.optimizer import cast_weights, traceable_optimizer
from razorctl.step import autocast, train_step, unit_weights
from razorctl.surgery import freezing
from razorctl.surgery.blocks import blocks, parameter_bytes
from razorctl.surgery.byte_budget import Full, full_step, within

if TYPE_CHECKING:
    from razorctl.ops.triton.recorded import Card, Launch

# Functions that autocast runs in fp32 on CUDA but not on the CPU.
SINGLE = (
    *(torch.softmax, Tensor.softmax, F.softmax),
    *(torch.log_softmax, Tensor.log_softmax, F.log_softmax),
    *(torch.layer_norm, F.layer_norm, torch.group_norm, F.group_norm, torch.rms_norm, F.rms_norm),
)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Fused attention without dropout, which CUDA's kernels draw themselves and the CPU lacks."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, **options
    )


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout that saves its mask as bytes, as on CUDA; the CPU's saves the scaled mask."""
    if not training or inplace or not 0 < p < 1:
        return F.dropout(x, p, training, inplace)
    out: Tensor = torch.native_dropout(x, p, True)[0]
    return out


def _single(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
    return function(*args, **kwargs)


_CUDA: dict[Any, Callable[..., Any]] = {
    **{function: partial(_single, function) for function in SINGLE},
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
}


class _AsOnCuda(TorchFunctionMode):
    """Makes autocast of SINGLE, fused attention and dropout behave on the CPU as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            return self._backward(args[0])
        return _CUDA.get(func, func)(*args, **(kwargs or {}))

    def _backward(self, loss: Tensor) -> None:
        """`loss.backward()` inside this mode; torch's own call would leave the mode.

        Layers may recompute their forward in the backward pass, which must run in the mode.
        """
        engine: Any = Variable._execution_engine
        with self:
            engine.run_backward(
                (loss,),
                (torch.ones_like(loss),),
                False,  # retain_graph
                False,  # create_graph
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


Blueprint = tuple[nn.Module, FakeTensorMode, dict[Any, Full]]


def blueprint(job: Job, classes: int) -> Blueprint:
    """A model with fake parameters of their real sizes, their fake mode, and a cache.

    The cache maps (job, device, dot) to a traced full step. Raises DataError if the model's local
    files do not agree with it, or if it cannot be called.
    """
    of_job = job.model, job.task, classes, job.input_size, not job.from_scratch
    return _blueprint(*of_job, models.stamp(job.model))


@cache
def _blueprint(
    name: str, task: str | None, classes: int, input_size: int | None, weights: bool, _: str
) -> Blueprint:
    attempt = partial(_attempt, task, classes, input_size)
    return models.tried(name, partial(attempt, weights), partial(attempt, False))


def _attempt(
    task: str | None, classes: int, input_size: int | None, weights: bool, name: str
) -> Blueprint:
    """The blueprint of a model; weights: whether to compare the local files with it."""
    family = models.find(name, task)
    with torch.device("meta"):
        model = family.bare(classes, input_size)
    if family.unproven:
        family.check(model, weights)
    mode = fake.fake(model)
    if family.unproven:
        batch = family.example(model, 2, input_size)  # batch norms take no single row
        traced_bytes(model, batch, forward=family.logits)
    return model, mode, {}


@dataclass(frozen=True)
class _Prepared:
    """A job's sparsified model, its largest micro-batch, and the functions of its step."""

    model: nn.Module
    batch: Any
    optimizer: Callable[[nn.Module], Optimizer]
    step: Callable[[nn.Module, Iterable[Any], Optimizer | None], None]
    forward: Callable[[nn.Module, Any], Any]


def trace(job: Job, recipe: Recipe, classes: int, device: str = "cuda", dot: bool = True) -> Trace:
    """Traces the step that `finetune` takes for a resolved job and a recipe on a kind of device.

    An evaluation needs no more memory: it runs the same rows through the same layers and stores
    nothing. Raises UsageError for a recipe that the model cannot take.

    Args:
        dot: whether Triton's products run on the card's tensor cores.
    """
    with _uncollected(), _prepared(job, recipe, classes, device, dot) as it:
        step = tracker.trace_step(
            *(it.model, it.batch, it.optimizer, it.step, it.forward, job.accumulate),
            alike=not job.cached_embeddings,
        )
        sizes = [parameter_bytes(block) for block in blocks(it.model)]
        rest = parameter_bytes(it.model) - sum(sizes)
        trained = sum(p.numel() for p in it.model.parameters() if p.requires_grad)
        average = sum(t.nbytes for t in _averaged(it.model)) if job.ema is not None else 0
    weights = step.weights + average
    block = max(sizes, default=0)
    return replace(step, weights=weights, block=block, rest=rest, trained=trained)


def _averaged(model: nn.Module) -> list[Tensor]:
    """The tensors that `Job.ema` averages."""
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def launches(
    job: Job, recipe: Recipe, classes: int, *cards: "Card", device: torch.device | None = None
) -> "dict[Card, list[Launch]]":
    """The launches of the first micro-batch of a step and of its optimizer, for each card.

    Recording the launches needs Triton, but no card; see `Recording`. Raises what `trace` raises.

    Args:
        job, recipe, classes: as in `trace`.
        cards: all with compute capability 8.0 or more, or all with less.
        device: the device of the recording.
    """
    from razorctl.ops.triton.gemm_tiles import tiles_for  # imported here: needs Triton
    from razorctl.ops.triton.recorded import Recording

    with _prepared(job, recipe, classes, "cuda", bool(tiles_for(cards[0].capability))) as it:
        model, recording = it.model, Recording(*cards, device=device)
        with fake.fakes(model, it.batch) as (mode, batch), tracing(model, mode), recording:
            it.step(model, [batch], it.optimizer(model))
    launches: dict[Card, list[Launch]] = recording.launches
    return launches


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection, which would search everything that was imported."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _prepared(
    job: Job, recipe: Recipe, classes: int, device: str, dot: bool
) -> Iterator[_Prepared]:
    """Prepares a job's step with CPU tensors in place of the device's; see `trace`."""
    family = models.of_job(job)
    model, mode, full = blueprint(job, classes)
    whole = JobForward(family, job, classes)
    with mode:
        batch = family.batch(model, job.micro_batch, job.input_size, classes)
        inputs = whole.inputs(model, torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # enabled, it would read tensor values

    def step(model: nn.Module, micro_batches: Iterable[Any], optimizer: Optimizer | None) -> None:
        assert optimizer is not None
        weights = unit_weights(job, classes, torch.device("cpu"))
        now = _averaged(model) if job.ema is not None else []
        average = [torch.empty_like(tensor) for tensor in now]
        for parameter in model.parameters():
            if job.buckets and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        train_step(
            *(model, family.losses(job, weights), micro_batches, optimizer, job, scaler),
            keep_gradients=job.buckets,
            total=None if job.of_rows else torch.ones(()),
        )
        if average:
            blend = get_ema_multi_avg_fn()  # type: ignore[no-untyped-call]
            blend(average, now, None)  # includes the few integer buffers

    def forward(model: nn.Module, batch: tuple[Any, Tensor]) -> Any:
        with autocast(batch[1].device, job):
            if job.of_rows:
                return family.logits(model, batch[0])
            return whole.loss(model, batch)

    optimizer = partial(traceable_optimizer, job=job)
    # Real adapters could not be merged back into fake weights.
    copies = fake.fakes(model, ())
    with copies, torch.random.fork_rng(devices=[]), as_compiled(job.compile), ExitStack() as card:
        with mode:
            cast_weights(model, job)
        freezing.freeze_weights(model, job, recipe.part)
        if device != "cpu":
            card.enter_context(assumed(dot))
            card.enter_context(_AsOnCuda())
        key = job, device, dot
        if METHODS[recipe.method].skips_outputs and key not in full:
            full[key] = full_step(model, inputs, **whole.options)
        within(model, recipe, inputs, full.get(key, Full(0)), **whole.options)
        yield _Prepared(model, batch, optimizer, step, forward)
