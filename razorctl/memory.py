"""Traced and measured bytes: the only place that touches torch's private trackers."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.sampling import Blocks, draws


def saved_bytes(model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None) -> int:
    """Bytes that autograd would hold between the forward and backward pass of a training step.

    Counts unique storages; parameters and buffers are excluded, since they live on anyway. The
    pass runs on fake copies in train mode, so it allocates nothing, computes nothing and leaves
    model, samplers and random state alone. `inputs` (a tensor, a tuple of arguments or a mapping
    of keywords) and the model may be real or fake. `autocast` is the dtype of a mixed-precision
    step, None for none. Under a joint budget the largest blocks count as drawn.
    """
    sizes: list[int] = []
    _trace(*_fake(model, inputs), autocast, sizes.append)
    return sum(sizes)


def saved_by_module(
    model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None
) -> dict[str, int]:
    """`saved_bytes`, traced in the same way, by the module in whose forward pass they are saved.

    The keys are dotted names, "" for the model itself; modules that save nothing have none. A
    storage counts once, for the first to save it, and of nested modules for the innermost.
    """
    mode, model, inputs = _fake(model, inputs)
    running, sizes = [""], Counter[str]()

    def leave(*_: Any) -> None:  # a hook that returned the name would replace the output by it
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(leave)
    _trace(mode, model, inputs, autocast, lambda size: sizes.update({running[-1]: size}))
    return dict(sizes)


def peak_bytes(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
) -> int:
    """Highest bytes of tensors alive in a training step, traced on fake copies as `saved_bytes` is.

    Counts parameters, buffers, inputs, gradients, what the optimizer holds, saved activations and
    every tensor that comes and goes in between; not what kernels use inside themselves. `optimizer`
    builds one from parameters; with None the step ends with the backward pass. `accumulate` is for
    the last of several micro-batches: the gradients of the others are there from the start.
    """
    mode, model, inputs = _fake(model, inputs)
    updates = optimizer(p for p in model.parameters() if p.requires_grad) if optimizer else None

    def step() -> None:
        if not accumulate:
            model.zero_grad()
        leaves = tree_leaves(_forward(model, inputs, autocast))
        loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
        torch.autograd.backward(loss.float().sum())
        if updates is not None:
            updates.step()

    tracker = _Tracker()
    with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
        _hold_largest_draw(model, lambda: _forward(model, inputs, autocast))
        tracker.track_external(model, *(t for t in tree_leaves(inputs) if isinstance(t, Tensor)))
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()  # with the optimizer's state there from the start
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


@contextmanager
def snapshot(path: Path) -> Iterator[None]:
    """Records each allocation on CUDA inside it in a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class _Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """MemTracker that takes frozen parameters, on which it cannot put a hook."""

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        trainable = all(p.requires_grad for p in module.parameters())
        sizes: tuple[int, int] = super()._track_module_params_and_buffers(
            module, install_grad_hooks and trainable
        )
        return sizes


def _fake(model: nn.Module, inputs: Any) -> tuple[FakeTensorMode, nn.Module, Any]:
    """A fake mode, and fake copies of a model in train mode and of its inputs."""
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # tokenizers give mappings of their own
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    known = [*tensors, *model.parameters(), *model.buffers()]
    modes = (tensor.fake_mode for tensor in known if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    with FakeCopyMode(mode):
        model = copy.deepcopy(model).train()
    return mode, model, tree_map_only(Tensor, mode.from_tensor, inputs)


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

    with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
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
