"""Bytes that a forward pass saves for the backward pass, traced on fake copies."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from razorctl.errors import UsageError
from razorctl.memory.draws import hold_largest
from razorctl.memory.fake import fake_copies


def saved_bytes(model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None) -> int:
    """`byte_budget.saved_bytes`, without a look at a byte budget."""
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
        hold_largest(model, partial(_note_saved, model, forward))
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


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
