"""Traced and measured bytes: the only place that touches torch's private trackers."""

import copy
from collections.abc import Callable, Iterable, Mapping
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
    mode, model, inputs = _fake(model, inputs)

    def forward() -> None:
        _forward(model, inputs, autocast)

    with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
        _hold_largest_draw(model, forward)
        held = _held(model, forward)
    return sum(storage.nbytes() for storage in held.values())


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

    def _update_peak_stats(self, peak_state: Any) -> None:
        # The stock one keeps a peak of every module too, which takes two thirds of a trace.
        for device, now in self._curr_mem_snap.items():
            if now["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)


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


def _held(
    model: nn.Module, forward: Callable[[], Any], blocks: Blocks | None = None
) -> dict[int, torch.UntypedStorage]:
    """Storages that a forward pass saves; adds to the sizes of the branches that saved them."""
    resident = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        key, storage = _storage(tensor), tensor.untyped_storage()
        if key not in resident and key not in held:
            held[key] = storage
            if blocks is not None and blocks.inside is not None:
                blocks.sizes[blocks.inside] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return held


def _hold_largest_draw(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Under a joint budget, fixes the draw that saves most, which a forward pass tells."""
    for blocks in draws(model):
        blocks.hold_all()
        _held(model, forward, blocks)
        blocks.hold_largest()


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
