"""The trace of a training step, counted on fake tensors."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from razorctl.memory.costs import caller, cost
from razorctl.memory.draws import hold_largest
from razorctl.memory.fake import fakes
from razorctl.memory.fake_mode import storage_key
from razorctl.memory.fusion import Fusion
from razorctl.memory.operations import tensors
from razorctl.memory.saved import kept_storages, tracing
from razorctl.memory.trace_cache import Calls, KernelWork, Trace

_DEVICE = torch.ops.prim.device.default
# What a storage holds, as fields of `Trace`; the rest is activations and temporaries.
WEIGHTS, GRADIENTS, OPTIMIZER, REST = "weights", "gradients", "optimizer", "rest"


def trace_step(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[nn.Module], Optimizer] | None,
    step: Callable[[nn.Module, Iterable[Any], Optimizer | None], object],
    forward: Callable[[nn.Module, Any], object],
    micro_batches: int,
    alike: bool = True,
) -> Trace:
    """Traces a training step on fake copies of a model and of the inputs of one micro-batch.

    Counts parameters, buffers, inputs, gradients, optimizer state, saved activations and
    temporaries, and separately the workspaces of CUDA kernels. The optimizer has its state from the
    start, as in every step but the first. Raises UsageError if the model needs tensor values.

    Args:
        model, inputs: real, fake or meta; not changed.
        optimizer: builds the optimizer of the fake model; None for no optimizer.
        step: `step(model, micro_batches, optimizer)` runs the step; each micro-batch is `inputs`.
        forward: `forward(model, inputs)` returns the result of a micro-batch's forward pass.
        micro_batches: their number.
        alike: whether the second micro-batch stands for all later ones; otherwise all are traced.
    """
    marks = list[tuple[Counter[Any], Counter[Any], Counter[Any]]]()

    def micro(count: int) -> Iterator[Any]:
        for _ in range(count):
            for parameter in model.parameters():
                tracker.note_gradient(parameter.grad)  # gradients from before the first pass
            marks.append(tracker.counts())
            yield inputs
        marks.append(tracker.counts())

    with fakes(model, inputs) as (mode, inputs), tracing(model, mode):
        run = partial(forward, model, inputs)
        hold_largest(model, partial(kept_storages, model, run))
        saved = sum(s.size for s in kept_storages(model, run, lambda: None))
        updates = optimizer(model) if optimizer else None
        if updates is not None:
            _make_state(updates)
        with _Tracker(model, inputs, updates) as tracker:
            traced = min(2, micro_batches) if alike else micro_batches
            step(model, micro(traced), updates)
    untraced = micro_batches - traced
    # Around the last micro-batch.
    kernels, compiled, calls = (
        _repeated(whole, after - before, untraced)
        for whole, before, after in zip(tracker.counts(), *marks[-2:], strict=True)
    )
    peak = tracker.peak.total()
    return Trace(
        peak=peak,
        workspace=max(0, tracker.highest - peak),
        weights=tracker.peak[WEIGHTS],
        gradients=tracker.peak[GRADIENTS],
        optimizer=tracker.peak[OPTIMIZER],
        saved=saved,
        kernels=kernels,
        compiled=compiled,
        fused=tracker.fused,
        calls=Calls(**calls),
        update=Calls(**(tracker.calls - marks[-1][-1])),
    )


def _repeated(whole: Counter[Any], part: Counter[Any], times: int) -> Counter[Any]:
    """`whole` with its `part` repeated `times` more."""
    return whole + Counter({name: times * count for name, count in part.items()})


def _make_state(optimizer: Optimizer) -> None:
    """Gives an optimizer of fake parameters the state that it has after a first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@dataclass(slots=True)
class _Storage:
    """A counted storage: a reference that tells when it is freed, its label and its bytes."""

    freed: weakref.ref[torch.UntypedStorage]
    label: str
    size: int = 0


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living storages, and the kernels that run inside the mode.

    peak: bytes at the highest moment, by label.
    kernels: how often each ran. fusion: the kernels of a compiled step.
    calls: how often the operations of each field of `Calls` were called.
    highest: the most bytes of tensors and workspaces of kernels.
    fused: whether a kernel of fused attention ran.
    """

    def __init__(self, model: nn.Module, inputs: Any, optimizer: Optimizer | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[KernelWork] = Counter()
        self.fusion = Fusion()
        self.calls: Counter[str] = Counter()
        self.highest = 0
        self.fused = False
        self._storages: dict[int, _Storage] = {}
        self._now: Counter[str] = Counter()
        self._label, self._total = REST, 0
        self._hooks: list[Any] = []
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor, WEIGHTS)
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                self._note(leaf, REST)
        if optimizer is not None:
            self._note_state(optimizer)
        for parameter in model.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_hook(self.note_gradient)
                hooked.register_post_accumulate_grad_hook(lambda p: self.note_gradient(p.grad))
        self.peak, self._most = self._now.copy(), self._total

    def __enter__(self) -> Self:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "_label", OPTIMIZER)),
            register_optimizer_step_post_hook(self._updated),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and hasattr(args[0], "fake_device"):  # most calls
            return args[0].fake_device
        # TorchFunctionModes have already seen this call; they must not see the tracker's own.
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
            if func.namespace == "prim":
                return result
            for tensor in tensors((result,)):
                self._note(tensor)
            kernels, workspace = cost(func, args, kwargs or {}, result)
            alone = self._label == OPTIMIZER  # never compiled with the model
            self.fusion.note((*args, *(kwargs or {}).values()), result, kernels, alone)
        self.kernels.update(kernels)
        if kind := caller(func):
            self.calls[kind] += 1
        if self._total > self._most:
            self.peak, self._most = self._now.copy(), self._total
        self.highest = max(self.highest, self._total + workspace)
        self.fused = self.fused or "scaled_dot_product" in func.name()
        return result

    def counts(self) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
        """Copies of the counts so far: kernels, kernels of a compiled step, and calls."""
        self.fusion.end()
        return self.kernels.copy(), self.fusion.kernels.copy(), self.calls.copy()

    def _note(self, tensor: Tensor, label: str | None = None) -> None:
        """Counts the storage of a tensor once, under `label` or the current label."""
        storage = tensor.untyped_storage()
        key, size = storage_key(tensor), storage.nbytes()
        counted = self._storages.get(key)
        if counted is None:
            freed = weakref.ref(storage, lambda _: self._free(key))
            self._storages[key] = counted = _Storage(freed, label or self._label)
        elif counted.size == size and label in (None, counted.label):
            return
        self._count(counted.label, -counted.size)
        counted.size, counted.label = size, label or counted.label
        self._count(counted.label, size)

    def _free(self, key: int) -> None:
        freed = self._storages.pop(key)
        self.fusion.forget(key)
        self._count(freed.label, -freed.size)

    def _count(self, label: str, size: int) -> None:
        self._now[label] += size
        self._total += size

    def note_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # None if an optimizer in the backward pass has freed it
            self._note(gradient, GRADIENTS)

    def _note_state(self, optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            for tensor in tensors(state.values()):
                self._note(tensor, OPTIMIZER)

    def _updated(self, optimizer: Optimizer, *_: Any) -> None:
        self._note_state(optimizer)
        self._label = REST
