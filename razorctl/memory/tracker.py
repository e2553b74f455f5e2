"""Traced and measured bytes: the only place that touches torch's private trackers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from razorctl.memory.costs import cost
from razorctl.memory.draws import hold_largest
from razorctl.memory.fake import fake_copies
from razorctl.memory.saved import _forward, _note_saved, _tracing
from razorctl.memory.trace_cache import Kernel, Trace


def trace(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[nn.Module], Optimizer] | None,
    step: Callable[[nn.Module, Iterable[Any], Optimizer | None], object],
    forward: Callable[[nn.Module, Any], object],
    *,
    micro_batches: int = 1,
) -> Trace:
    """Runs a step on fake copies, as `saved_bytes` does, of an optimizer that has run before.

    Counts parameters, buffers, inputs, gradients, what the optimizer holds, saved activations and
    every tensor that comes and goes in between; apart from these, what kernels take inside on CUDA.
    `step(model, micro_batches, optimizer)` takes a step over micro-batches, each of these inputs,
    and `forward(model, inputs)` is the forward pass in it. Of a larger number two are traced: with
    the second the gradients are there from the start, as with all that follow.
    """
    mode, model, inputs = fake_copies(model, inputs)
    tracker, marks = _Tracker(), list[Counter[Kernel]]()

    def micro(count: int) -> Iterator[Any]:
        for _ in range(count):
            tracker.reset_mod_stats()  # it takes no module for its second pass otherwise
            marks.append(tracker.kernels.copy())
            yield inputs
        marks.append(tracker.kernels.copy())

    def run() -> None:
        forward(model, inputs)

    sizes: list[int] = []
    with _tracing(model, mode):
        hold_largest(model, partial(_note_saved, model, run))
        _note_saved(model, run, sizes.append)
        tracker.track_external(model, *(t for t in tree_leaves(inputs) if isinstance(t, Tensor)))
        updates = optimizer(model) if optimizer else None
        if updates is not None:
            _make_state(updates)
            tracker.track_external(updates)
        with tracker:
            step(model, micro(min(2, micro_batches)), updates)
    kernels = tracker.kernels
    for kernel, count in (marks[-1] - marks[-2]).items():
        kernels[kernel] += max(0, micro_batches - 2) * count
    parts: Counter[Any] = Counter()
    for device in tracker.get_tracker_snapshot("peak").values():
        parts.update({getattr(name, "value", name): size for name, size in device.items()})
    return Trace(
        peak=parts["Total"],
        workspace=max(0, tracker.highest - parts["Total"]),
        weights=parts["Parameter"] + parts["Buffer"],
        gradients=parts["Gradient"],
        optimizer=parts["Optstate"],
        saved=sum(sizes),
        kernels=kernels,
        fused=tracker.fused,
    )


def peak_bytes(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
) -> int:
    """Highest bytes of tensors alive in a training step; see `trace`.

    `optimizer` builds one from parameters; with None the step ends with the backward pass.
    `accumulate` is for a step over several micro-batches, of which the inputs are one.
    """

    def step(model: nn.Module, micro_batches: Iterable[Any], updates: Optimizer | None) -> None:
        for inputs in micro_batches:
            leaves = tree_leaves(_forward(model, inputs, autocast))
            loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
            torch.autograd.backward(loss.float().sum())
        if updates is not None:
            updates.step()

    def build(model: nn.Module) -> Optimizer:
        assert optimizer is not None
        return optimizer(p for p in model.parameters() if p.requires_grad)

    def forward(model: nn.Module, inputs: Any) -> None:
        _forward(model, inputs, autocast)

    micro_batches = 2 if accumulate else 1
    return trace(
        model, inputs, build if optimizer else None, step, forward, micro_batches=micro_batches
    ).peak


def _make_state(optimizer: Optimizer) -> None:
    """Gives an optimizer of fake parameters the state that it has after a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """MemTracker that takes frozen parameters, on which it cannot put a hook.

    kernels: how often each ran. highest: bytes at a time, workspaces of kernels counted in.
    fused: whether a kernel of fused attention was among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self.highest = 0
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Modes that watch functions saw this one; what is asked of tensors in here is not theirs.
        with torch._C.DisableTorchFunction():
            result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            kernels, workspace = cost(func, args, kwargs or {}, result)
        self.kernels.update(kernels)
        now = sum(device["Total"] for device in self._curr_mem_snap.values())
        self.highest = max(self.highest, now + workspace)
        self.fused = self.fused or "scaled_dot_product" in func.name()
        return result

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        trainable = all(p.requires_grad for p in module.parameters())
        sizes: tuple[int, int] = super()._track_module_params_and_buffers(
            module, install_grad_hooks and trainable
        )
        return sizes

    def _update_peak_stats(self, peak_state: Any) -> None:
        # The stock one keeps a peak of every module too, which takes two thirds of a trace.
        for device, now in self._curr_mem_snap.items():
            if now["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)
