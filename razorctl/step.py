"""One optimizer step: training runs it, and planning traces it."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from razorctl.config.job import TEMPERATURE, Job, Precision, resolve_precision
from razorctl.config.tasks import LANGUAGE, NO_LABEL
from razorctl.errors import DivergedError, UsageError
from razorctl.ops.contrastive import Similarity, embedding_loss
from razorctl.ops.weight_copies import shared_by
from razorctl.system import processes

# `Job.precision` -> the dtype of autocast; None disables it.
DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def precision(job: Job, device: torch.device) -> Precision:
    """The precision that `job.precision` means on a device; raises UsageError if it cannot run."""
    if device.type != "cuda":
        if job.precision == "fp16":
            raise UsageError(f"fp16 cannot be trained on {device.type}; choose bf16 or fp32.")
        auto: Precision = "bf16" if job.weights == "bf16" else "fp32"
        return auto if job.precision == "auto" else job.precision
    major, minor = torch.cuda.get_device_capability(device)
    return resolve_precision(job.precision, f"{major}.{minor}")


# (model, inputs, labels, reduction as in `F.cross_entropy`) -> the loss of a micro-batch.
Losses = Callable[[nn.Module, Any, Tensor, str], Tensor]


@runtime_checkable
class HasGradients(Protocol):
    """An optimizer that has the gradients itself, as `optimizer.host_state.HostAdamW`."""

    def clip(self, weights: Iterable[Tensor], most: float) -> Tensor:
        """Scales gradients of `weights` to a norm of at most `most`; returns the norm before."""


# (model, losses, batch, job, scaler, phase, check) -> the loss; see `forward_backward`.
ForwardBackward = Callable[..., Tensor]


def forward_backward(
    model: nn.Module,
    losses: Losses,
    batch: tuple[Any, Tensor, Tensor | None],
    job: Job,
    scaler: torch.amp.GradScaler,
    phase: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    check: Callable[[Tensor, Tensor], object] = lambda *_: None,
) -> Tensor:
    """Runs forward and backward of a micro-batch; returns its share of the step's loss.

    Args:
        batch: inputs, labels and `total`; see `train_step` for these and the rest.
    """
    inputs, labels, total = batch
    with phase("forward"), autocast(labels.device, job):
        loss = losses(model, inputs, labels, "mean" if total is None else "sum")
        loss = loss / (job.accumulate if total is None else total)
    if job.optimizer_in_backward:
        check(processes.mean(loss.detach()), torch.zeros_like(loss.detach()))
    with phase("backward"):
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train_step(
    model: nn.Module,
    losses: Losses,
    micro_batches: Iterable[tuple[Any, Tensor]],
    optimizer: Optimizer,
    job: Job,
    scaler: torch.amp.GradScaler,
    phase: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
    check: Callable[[Tensor, Tensor], object] = lambda *_: None,
    unsynced: Callable[[nn.Module], AbstractContextManager[object]] = lambda _: nullcontext(),
    keep_gradients: bool = False,
    total: Tensor | None = None,
    run: ForwardBackward = forward_backward,
) -> tuple[Tensor, Tensor]:
    """Runs forward and backward of every micro-batch, clips the gradient and updates the weights.

    Returns the mean loss over all processes, and the norm of the gradient before clipping, without
    waiting for the device. The norm is 0 if the optimizer runs in the backward pass, since the
    gradient never exists as a whole.

    Args:
        losses: a `ByLogits`, or for micro-batches with losses of their own an equivalent.
        micro_batches: `job.accumulate` pairs of inputs, as `losses` takes them, and labels [rows]
            or their shares [rows, classes], all of one size; each is taken when it is needed.
        scaler: enabled only if `job.precision` is fp16.
        phase: the context for each of "forward", "backward" and "optimizer".
        check: called with the return values before weights and optimizer change; it may raise.
        unsynced: the context for a pass whose gradients are not reduced over processes.
        keep_gradients: whether gradients stay in memory, as zeros, after the step.
        total: the `label_count` of the whole batch; None gives each micro-batch the same weight.
        run: `forward_backward`, or an equivalent.
    """
    shares = []
    with shared_by(job.accumulate):
        if job.cached_embeddings:
            batches, micro_batches = list(micro_batches), ()
            shares = [cached_step(model, losses, batches, job, scaler, phase)]  # type: ignore[arg-type]
        for number, (inputs, labels) in enumerate(micro_batches, 1):
            with nullcontext() if number == job.accumulate else unsynced(model):
                batch = inputs, labels, total
                shares.append(run(model, losses, batch, job, scaler, phase, check))
    if job.optimizer_in_backward:
        return processes.mean(torch.stack(shares).sum()), torch.zeros_like(shares[0])
    with phase("optimizer"):
        scaler.unscale_(optimizer)
        norm = clip(model, optimizer, job, scaler)
        if hasattr(norm, "full_tensor"):  # a DTensor; importing the class takes half a second
            norm = norm.full_tensor()
        loss = processes.mean(torch.stack(shares).sum())
        check(loss, norm)
        scaler.step(optimizer)
        scaler.update()
        # A compiled graph's output must not become a gradient: its next replay would write over
        # the sum.
        keep = keep_gradients or bool(job.cuda_graphs and job.compile and job.accumulate > 1)
        optimizer.zero_grad(set_to_none=not keep)
    return loss, norm


def cached_step(
    model: nn.Module,
    losses: "ByLogits",
    batches: Sequence[tuple[Any, Tensor]],
    job: Job,
    scaler: torch.amp.GradScaler,
    phase: Callable[[str], AbstractContextManager[object]],
) -> Tensor:
    """Computes the gradient of one loss over the embeddings of all micro-batches; returns the loss.

    Each micro-batch runs forward twice, with the same dropout, and its graph exists alone:
    GradCache (Gao et al., 2021, section 3.2). Arguments are those of `train_step`.
    """
    device = batches[0][1].device
    states: list[tuple[Tensor, ...]] = []

    def embeddings(inputs: Any) -> Tensor:
        with phase("forward"), autocast(device, job):
            return losses.logits(model, inputs)

    first = []
    for inputs, _ in batches:
        states.append(_random_states(device))
        # With a graph, which is freed at once, since layers draw more numbers if they store copies.
        first.append(embeddings(inputs).detach().clone())
    whole = torch.cat(first).requires_grad_()
    loss = losses.of_output(model, whole, torch.cat([labels for _, labels in batches]), "mean")
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    parts = torch.split(whole.grad, [len(part) for part in first])
    after = _random_states(device)
    for (inputs, _), state, grad in zip(batches, states, parts, strict=True):
        _set_random_states(device, state)
        output = embeddings(inputs)
        with phase("backward"):
            # By a product, as the tracing of a plan follows the backward pass of a loss alone.
            (output * grad).sum().backward()  # type: ignore[no-untyped-call]
    _set_random_states(device, after)
    return loss.detach()


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the default generators that a forward pass on a device draws from."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def _set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def clip(model: nn.Module, optimizer: Optimizer, job: Job, scaler: torch.amp.GradScaler) -> Tensor:
    """Clips the gradient to `Job.clip_norm`; returns its norm before.

    A fused optimizer divides by `grad_scale` as it reads the gradient, which saves a pass over it.
    """
    most, parameters = job.clip_norm, [*model.parameters()]
    if isinstance(optimizer, HasGradients):
        return optimizer.clip(parameters, most)
    if job.processes > 1 or scaler.is_enabled() or not optimizer.defaults.get("fused"):
        return torch.nn.utils.clip_grad_norm_(parameters, most, foreach=True)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    optimizer.grad_scale = ((norm.float() + 1e-6) / most).clamp(min=1)  # type: ignore[attr-defined]
    return norm


@dataclass(frozen=True)
class ByLogits:
    """The losses of a job's model, by `Model.logits`; class_weights: as in `losses_of`.

    similarity: of embeddings, by the model; None is by the job.
    """

    logits: Callable[[nn.Module, Any], Tensor]
    job: Job
    class_weights: Tensor | None = None
    similarity: Callable[[nn.Module], Similarity] | None = None

    def __call__(self, model: nn.Module, inputs: Any, labels: Tensor, reduction: str) -> Tensor:
        return self.scored(model, inputs, labels, reduction)[1]

    def scored(
        self, model: nn.Module, inputs: Any, labels: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor]:
        """The logits of inputs, and their loss."""
        output = self.logits(model, inputs)
        return output, self.of_output(model, output, labels, reduction)

    def of_output(self, model: nn.Module, output: Tensor, labels: Tensor, reduction: str) -> Tensor:
        """The loss of logits; model: for losses with parameters of their own."""
        if self.job.task == "embedding":
            return embedding_loss(output, labels, self.similarity_of(model), reduction)
        return losses_of(output, labels, self.job, reduction, self.class_weights)

    def similarity_of(self, model: nn.Module) -> Similarity:
        """How cosines of embeddings become a loss."""
        if self.similarity is not None:
            return self.similarity(model)
        return Similarity(1 / (self.job.temperature or TEMPERATURE), None, self.job.symmetric)


def losses_of(
    output: Tensor,
    labels: Tensor,
    job: Job,
    reduction: str = "mean",
    class_weights: Tensor | None = None,
) -> Tensor:
    """The cross-entropy of logits, as `Model.logits` returns them; NO_LABEL does not count.

    Regression: squared error, labels [rows]. Multi-label: binary
    cross-entropy, labels 0/1 [rows, classes]; the mean is over all entries.

    Args:
        output: may be a `lazy_tensor.Lazy`, which computes logits when they are needed.
        reduction: as in `F.cross_entropy`. Only a mean with class weights differs: it is the sum
            divided by the number of labels, so that it does not depend on how a batch is split.
        class_weights: [classes], as `weight` there.
    """
    if job.task == "regression":
        return F.mse_loss(output.float().squeeze(-1), labels, reduction=reduction)
    if job.task == "multi-label":
        return F.binary_cross_entropy_with_logits(output.float(), labels, reduction=reduction)
    if class_weights is not None and reduction == "mean":
        count = len(labels) if labels.is_floating_point() else (labels != NO_LABEL).sum()
        return losses_of(output, labels, job, "sum", class_weights) / count
    if job.task in (*LANGUAGE, "token-classification"):
        output, labels = output.flatten(0, -2), labels.flatten()
    return F.cross_entropy(
        output, labels, class_weights, label_smoothing=job.label_smoothing, reduction=reduction
    )


def unit_weights(job: Job, classes: int, device: torch.device) -> Tensor | None:
    """Stand-ins for a job's class weights [classes], for traces; None if it has none."""
    return None if job.class_weights is None else torch.ones(classes, device=device)


def counted(labels: Tensor) -> Tensor:
    """The number of labels that count: all numbers, and all classes except NO_LABEL."""
    if labels.is_floating_point():
        return torch.tensor(labels.numel(), device=labels.device)
    return (labels != NO_LABEL).sum()


def label_count(labels: Iterable[Tensor], device: torch.device) -> Tensor:
    """The number of labels that count, as a mean over processes, at least 1. Collective."""
    count = sum(int(counted(each)) for each in labels)
    return processes.mean(torch.tensor(float(count), device=device)).clamp(min=1)


def refuse_infinite(loss: Tensor, norm: Tensor, *, scaled: bool) -> None:
    """Raises DivergedError for a loss or a gradient norm that is not finite; waits for the device.

    scaled: whether there is loss scaling. Overflowed gradients are then normal, and their steps are
    skipped.
    """
    values = torch.stack([loss, norm.to(loss.device, loss.dtype)]).tolist()
    for what, value in zip(("loss", "norm of the gradient"), values, strict=True):
        if not math.isfinite(value) and not (scaled and what != "loss"):
            raise DivergedError(f"the {what} is {value}")


def autocast(device: torch.device, job: Job) -> torch.autocast:
    """The context for a forward pass of a resolved job.

    It holds no copies of weights until the forward pass ends, since most weights are used once.
    """
    dtype = DTYPES[job.precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def scored(device: torch.device, job: Job) -> torch.autocast:
    """The context for an evaluation of a resolved job.

    Numbers of a regression, such as years, may need more than 16 bits.
    """
    return autocast(device, replace(job, precision="fp32") if job.task == "regression" else job)
