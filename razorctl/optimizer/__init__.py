"""The optimizer of a job, with the learning rate and weight decay of each parameter."""

import re
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.ops import kernels
from razorctl.optimizer.host_state import HostAdamW, TracedHostAdamW
from razorctl.optimizer.slices import BLOCK, Slices, lift_zeros


def check_optimizer(job: Job) -> None:
    """Raises UsageError for an optimizer whose library is not installed."""
    if _of_torchao(job) and find_spec("torchao") is None:
        what, other = "adamw8bit", "--optimizer adamw"
        if job.weights == "bf16":
            what, other = "rounding of bf16 weights", "--weights fp32"
        raise UsageError(
            f"{what} needs torchao, which is not installed; run pip install torchao, or choose "
            f"{other}."
        )


def _of_torchao(job: Job) -> bool:
    return job.optimizer == "adamw8bit" or (job.weights == "bf16" and not _on_host(job))


def _on_host(job: Job) -> bool:
    return job.optimizer_state == "host"


def cast_weights(model: nn.Module, job: Job) -> None:
    """Casts the weights of `model` to `Job.weights`; buffers stay as they are.

    So do weights of batch norms, which torch wants to have the dtype of their statistics.
    """
    for module in model.modules() if job.weights == "bf16" else ():
        if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)


def build_optimizer(model: nn.Module, job: Job) -> Optimizer:
    """The optimizer of a resolved job, over the trainable parameters of `model`.

    It may update weights in the backward pass. Raises UsageError as `check_optimizer` does.
    """
    optimizer = _build(model, job)
    if job.optimizer_in_backward:
        in_backward(optimizer)
    return optimizer


def in_backward(optimizer: Optimizer) -> None:
    """Makes an optimizer update each parameter once its gradient exists, and free the gradient.

    Each parameter gets a hook. There is still one optimizer, with one state and one schedule.
    """

    def update(parameter: Tensor) -> None:
        groups = optimizer.param_groups
        own = next(group for group in groups if any(p is parameter for p in group["params"]))
        optimizer.param_groups = [{**own, "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(update)


def _build(model: nn.Module, job: Job) -> Optimizer:
    groups = parameter_groups(model, job)
    assert job.learning_rate is not None
    if _on_host(job):
        return HostAdamW(groups, job.learning_rate)
    if _of_torchao(job):
        check_optimizer(job)
        from torchao.optim import AdamW8bit, _AdamW

        kind = AdamW8bit if job.optimizer == "adamw8bit" else _AdamW
        rounds = job.weights == "bf16"
        rounding: Optimizer = kind(groups, job.learning_rate, bf16_stochastic_round=rounds)
        lift_zeros(rounding)
        if job.strategy != "fsdp" or job.processes == 1:  # slices are of plain tensors
            Slices(rounding)
        return rounding
    if job.optimizer == "adamw":  # fused, since foreach allocates temporaries as large as the model
        return AdamW(groups, job.learning_rate, fused=True)
    # No fused SGD takes the DTensors of FSDP2.
    card = kernels.assumed_dot() is not None or all(p.is_cuda for p in model.parameters())
    fused = card and job.strategy != "fsdp"
    optimizer = SGD(
        groups, job.learning_rate, momentum=job.momentum, foreach=not fused, fused=fused
    )
    if fused and job.momentum:  # fused SGD then skips weights that a joint budget has not drawn
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def traceable_optimizer(model: nn.Module, job: Job) -> Optimizer:
    """`build_optimizer` for traces, with stand-ins for optimizers that fake tensors cannot run."""
    if _on_host(job):
        return TracedHostAdamW(parameter_groups(model, job))
    if not _of_torchao(job):
        return build_optimizer(model, job)
    optimizer = TracedAdamW(model, job)
    if job.optimizer_in_backward:
        in_backward(optimizer)
    return optimizer


class TracedAdamW(Optimizer):
    """Allocates as much as torchao's AdamW, whose compiled step cannot run on fake tensors.

    A state of `adamw8bit` has one byte per element and a scale per BLOCK elements. It is in the
    parameter's dtype if it is small or not a multiple of BLOCK. A step restores both states of 8
    bits in single precision, for one slice of a parameter at a time; other states change in place.
    """

    SMALLEST, LEVELS = 4096, 256

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._eight = job.optimizer == "adamw8bit"
        super().__init__(parameter_groups(model, job), {})
        Slices(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter)

    def _update(self, parameter: Tensor) -> None:
        state, count = self.state[parameter], parameter.numel()
        names = "exp_avg", "exp_avg_sq"
        eight = self._eight and count >= self.SMALLEST and count % BLOCK == 0
        if not state:
            for name in names:
                if not eight:
                    state[name] = torch.zeros_like(parameter)
                    continue
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                for what, size in (("scale", count // BLOCK), ("levels", self.LEVELS)):
                    state[f"{name} {what}"] = parameter.new_zeros(size, dtype=torch.float32)
        first, second = (state[name].float() if eight else state[name] for name in names)
        first.mul_(parameter.grad)
        second.mul_(parameter.grad)
        parameter.copy_(first.div_(second))
        if eight:
            state["exp_avg"].copy_(first)
            state["exp_avg_sq"].copy_(second)


def parameter_groups(model: nn.Module, job: Job) -> list[dict[str, Any]]:
    """The trainable parameters, grouped by learning rate and weight decay for an optimizer.

    Biases, norms and the model's `no_weight_decay` get no weight decay. With a layer decay d, a
    parameter k layers below the last has a learning rate of d^k times the highest.
    """
    assert job.learning_rate is not None
    assert job.weight_decay is not None
    layers = {} if job.layer_decay == 1 else layer_numbers(model)
    last = max(layers.values(), default=0)
    no_weight_decay: Any = getattr(model, "no_weight_decay", set)  # timm's models have it
    spared = no_weight_decay()
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spare = parameter.ndim < 2 or name.endswith(".bias") or name in spared
        rate = job.learning_rate * job.layer_decay ** (last - layers.get(name, last))
        groups.setdefault((rate, 0.0 if spare else job.weight_decay), []).append(parameter)
    if not groups and job.freeze is not None:
        raise UsageError(
            f"freeze {job.freeze!r} leaves nothing of what the method trains; freeze less, or "
            "choose another method."
        )
    return [
        {"params": parameters, "lr": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Parameter name -> number of its layer, counted from the input.

    timm's models define it. In other models each numbered part is a layer; everything before these
    is one layer, and everything after them another.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        numbers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return numbers
    layers: dict[str, int] = {}
    number, part = 0, None
    for name, _ in model.named_parameters():
        match = re.match(r".*?\.\d+(?=\.)", name)
        if (current := match and match[0]) != part:
            number, part = number + 1, current
        layers[name] = number
    return layers
