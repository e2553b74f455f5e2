"""Traced and measured bytes: the only place that touches torch's private trackers."""

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.errors import UsageError
from razorctl.memory.costs import cost
from razorctl.memory.trace_cache import Kernel, Trace
from razorctl.sampling.samplers import Blocks, draws


def saved_bytes(model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None) -> int:
    """`promise.saved_bytes`, without a look at what a recipe promises."""
    sizes: list[int] = []
    _trace(*fake_copies(model, inputs), autocast, sizes.append)
    return sum(sizes)


def saved_by_module(
    model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None
) -> dict[str, int]:
    """`saved_bytes`, traced in the same way, by the module in whose forward pass they are saved.

    The keys are dotted names, "" for the model itself; modules that save nothing have none. A
    storage counts once, for the first to save it, and of nested modules for the innermost.
    """
    mode, model, inputs = fake_copies(model, inputs)
    running, sizes = [""], Counter[str]()

    def leave(*_: Any) -> None:  # a hook that returned the name would replace the output by it
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(leave)
    _trace(mode, model, inputs, autocast, lambda size: sizes.update({running[-1]: size}))
    return dict(sizes)


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
        _hold_largest_draw(model, run)
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


def allocated_on_cpu(run: Callable[[], object]) -> int:
    """Most bytes at a time that `run` allocates on the CPU, measured; kernels' own are counted."""
    now = most = 0
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@contextmanager
def snapshot(path: Path) -> Iterator[None]:
    """Records each allocation on CUDA inside it in a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


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


def fake(
    model: nn.Module, mode: FakeTensorMode | None = None, device: torch.device | str = "cpu"
) -> FakeTensorMode:
    """Gives a model, for what it has on the meta device, fake tensors on one that can be.

    Returns their mode, which is a new one if none is given.
    """
    mode, known = mode or FakeTensorMode(), dict[int, Tensor]()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in known:  # tied weights stay tied
                    stand_in = _fake_like(tensor, mode, device)
                    if isinstance(tensor, nn.Parameter):
                        stand_in = nn.Parameter(stand_in, tensor.requires_grad)
                    known[id(tensor)] = stand_in
                tensors[name] = known[id(tensor)]  # type: ignore[assignment]
    return mode


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A fake tensor on `device` of the layout of one on the meta device."""
    with mode:
        return torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=device,
            requires_grad=tensor.requires_grad,
        )


def copied(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a model whose parameters and buffers are fake."""
    with FakeCopyMode(mode):
        return copy.deepcopy(model)


def fake_copies(model: nn.Module, inputs: Any) -> tuple[FakeTensorMode, nn.Module, Any]:
    """A fake mode, and fake copies of a model in train mode and of its inputs.

    What is on the meta device joins the rest, on the CPU if there is none.
    """
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # tokenizers give mappings of their own
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    known = [*tensors, *model.parameters(), *model.buffers()]
    modes = (tensor.fake_mode for tensor in known if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    device = next((t.device for t in known if not t.is_meta), torch.device("cpu"))

    def stand_in(tensor: Tensor) -> Tensor:
        return _fake_like(tensor, mode, device) if tensor.is_meta else mode.from_tensor(tensor)

    model = copied(model, mode).train()
    fake(model, mode, device)
    return mode, model, tree_map_only(Tensor, stand_in, inputs)


@contextmanager
def _tracing(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """For steps of a fake model; raises UsageError where its values would decide what it does."""
    try:
        with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    except RuntimeError as error:
        if isinstance(error, DataDependentOutputException):
            why = f"reads a value of a tensor ({error.func})"
        elif isinstance(error, DynamicOutputShapeException):
            why = f"makes a tensor whose size depends on values ({error.func})"
        elif isinstance(error, UnsupportedOperatorException):
            why = f"runs {error.func}, which does not say what it would give"
        elif ".numpy() is not supported" in str(error):
            why = "reads the values of a tensor (.numpy())"
        else:
            raise
        raise UsageError(
            f"cannot trace {_running(model, error)}, since it {why} and a trace has no values; "
            "trace the modules around it by themselves."
        ) from None


def _running(model: nn.Module, error: BaseException) -> str:
    """The innermost module of `model` in whose code an error came up: its name and class."""
    names = {module: name for name, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    selves = [model, *(frame.f_locals.get("self") for frame in frames)]
    module = next(m for m in reversed(selves) if isinstance(m, nn.Module) and m in names)
    name = names[module]
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _forward(model: nn.Module, inputs: Any, autocast: torch.dtype | None) -> Any:
    device = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)).device.type
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _trace(
    mode: FakeTensorMode,
    model: nn.Module,
    inputs: Any,
    autocast: torch.dtype | None,
    note: Callable[[int], object],
) -> None:
    """Tells `note` the bytes of each storage that a forward pass saves, when it is first saved."""

    def forward() -> None:
        _forward(model, inputs, autocast)

    with _tracing(model, mode):
        _hold_largest_draw(model, forward)
        _note_saved(model, forward, note)


def _note_saved(
    model: nn.Module, forward: Callable[[], Any], note: Callable[[int], object]
) -> None:
    resident = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.UntypedStorage] = {}  # alive, so that no other gets the same key

    def pack(tensor: Tensor) -> Tensor:
        key, storage = _storage(tensor), tensor.untyped_storage()
        if key not in resident and key not in held:
            held[key] = storage
            note(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()


def _hold_largest_draw(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Under a joint budget, fixes the draw that saves most, which a forward pass tells."""
    for blocks in draws(model):
        blocks.hold_all()
        _note_saved(model, forward, partial(_add_to_branch, blocks))
        blocks.hold_largest()


def _add_to_branch(blocks: Blocks, size: int) -> None:
    if blocks.inside is not None:
        blocks.sizes[blocks.inside] += size


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
