"""Traced steps and their peak, on torch's private memory tracker."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.layers.lazy import Lazy
from razorctl.memory.costs import caller, cost
from razorctl.memory.draws import hold_largest
from razorctl.memory.fake import fake_copies
from razorctl.memory.saved import _forward, _note_saved, _tracing
from razorctl.memory.trace_cache import Calls, Kernel, Trace


def trace(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[nn.Module], Optimizer] | None,
    step: Callable[[nn.Module, Iterable[Any], Optimizer | None], object],
    forward: Callable[[nn.Module, Any], object],
    *,
    micro_batches: int = 1,
) -> Trace:
    """Traces a training step on fake copies of a model and of the inputs of one micro-batch.

    The trace counts parameters, buffers, inputs, gradients, optimizer state, kept activations and
    temporaries, and separately the workspaces of CUDA kernels. The optimizer has its state from
    the start, as in every step but the first.

    step: `step(model, micro_batches, optimizer)` runs the step; each micro-batch is `inputs`.
    forward: `forward(model, inputs)` runs only the forward pass of a micro-batch.
    micro_batches: their number. At most two are traced, since the second stands for all later
        ones: the gradients exist from its start.
    Raises UsageError if the model needs tensor values.
    """
    mode, model, inputs = fake_copies(model, inputs)
    tracker, marks = _Tracker(), list[tuple[Counter[Kernel], Counter[str]]]()

    def micro(count: int) -> Iterator[Any]:
        for _ in range(count):
            tracker.reset_mod_stats()  # otherwise it raises when a module runs a second time
            marks.append((tracker.kernels.copy(), tracker.calls.copy()))
            yield inputs
        marks.append((tracker.kernels.copy(), tracker.calls.copy()))

    sizes, run = list[int](), partial(forward, model, inputs)
    with _tracing(model, mode):
        hold_largest(model, partial(_note_saved, model, run))
        _note_saved(model, run, sizes.append)
        tracker.track_external(model, *(t for t in tree_leaves(inputs) if isinstance(t, Tensor)))
        updates = optimizer(model) if optimizer else None
        if updates is not None:
            _make_state(updates)
            tracker.track_external(updates)
        with tracker, _no_warning():
            step(model, micro(min(2, micro_batches)), updates)
    update = tracker.calls - marks[-1][1]
    kernels, calls = (
        _repeated(whole, end - start, max(0, micro_batches - 2))
        for whole, end, start in zip((tracker.kernels, tracker.calls), *marks[:-3:-1], strict=True)
    )
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
        calls=Calls(**calls),
        update=Calls(**update),
    )


def peak_bytes(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
) -> int:
    """Highest bytes of all tensors in a training step; see `trace`.

    optimizer: builds an optimizer from parameters; with None the step ends after the backward pass.
    accumulate: whether `inputs` are one of several micro-batches of the step.
    Raises UsageError if the model needs tensor values.
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


def _repeated(whole: Counter[Any], part: Counter[Any], times: int) -> Counter[Any]:
    """`whole` with its `part` so many times more."""
    return whole + Counter({name: times * count for name, count in part.items()})


@contextmanager
def _no_warning() -> Iterator[None]:
    """Inside the block torch's tracker does not warn of modules that run inside themselves.

    What it then loses is of no use here. It would also change how all warnings look.
    """
    formatted = warnings.formatwarning
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The module hierarchy tracking")
            warnings.filterwarnings("ignore", "Module is None")
            yield
    finally:
        warnings.formatwarning = formatted


def _make_state(optimizer: Optimizer) -> None:
    """Gives an optimizer of fake parameters the state that it has after a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """A MemTracker that also accepts frozen parameters, on which it cannot register a hook.

    kernels: how often each ran. calls: how often the operations of each field of `Calls` were
    called. highest: highest bytes of tensors and workspaces of kernels. fused: whether a kernel of
    fused attention ran.
    """

    def __init__(self) -> None:
        super().__init__()
        modules: Any = self._mod_tracker
        after = modules._fw_post_hook

        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            # It would hook logits that are not computed yet, and so have them computed.
            after(module, inputs, tree_map_only(Lazy, lambda _: None, outputs))

        modules._fw_post_hook = hook
        self.kernels: Counter[Kernel] = Counter()
        self.calls: Counter[str] = Counter()
        self.highest = 0
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TorchFunctionModes have already seen this call; they must not see the tracker's own.
        with torch._C.DisableTorchFunction():
            result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            kernels, workspace = cost(func, args, kwargs or {}, result)
        self.kernels.update(kernels)
        if kind := caller(func):
            self.calls[kind] += 1
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
        # MemTracker's own also updates a peak for every module: two thirds of a trace's time.
        for device, now in self._curr_mem_snap.items():
            if now["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)
