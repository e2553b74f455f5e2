"""Bytes that a forward pass stores for backward, traced on fake copies."""

import random
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from razorctl.errors import UsageError, ValuesError
from razorctl.layers.base import stock_type
from razorctl.layers.fsdp import refuse_sharded
from razorctl.layers.heads.outputs import unseen
from razorctl.memory.draws import hold_largest
from razorctl.memory.fake import copies, fakes, mode_of, tensors_of, whole_rows, without_caches
from razorctl.memory.fake_mode import storage_key

Forward = Callable[[nn.Module, Any], Any]  # runs a model on inputs
T = TypeVar("T")


def traced_bytes(
    model: nn.Module,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> int:
    """The bytes of `byte_budget.saved_bytes`, without comparing them with a byte budget."""

    parts = traced_bytes_by_module(model, inputs, autocast=autocast, forward=forward)
    return sum(parts.values())


def on_copies(
    trace: Callable[[nn.Module, Any], T], model: nn.Module, inputs: Any, real: bool = True
) -> T:
    """The result of `trace` while a model is a fake copy of itself, with fake copies of inputs.

    If that fails, for example because the model reads values, and all tensors are real, `trace`
    runs again on a real copy, and raises what a real step would. A real model with an LSTM is
    traced on a real copy at once. real: whether real copies are allowed.
    """
    refuse_sharded(model)
    real = real and not any(t.is_meta or mode_of([t]) for t in tensors_of(model, inputs))
    # Fake tensors lack the workspace that an LSTM kernel saves, which is most of its bytes.
    lstm = any(isinstance(module, nn.LSTM) for module in model.modules())
    with _disable_current_modes():  # a trace must not run under the caller's modes
        if not (real and lstm):
            try:
                with fakes(model, inputs) as (_, batch):
                    return trace(model, batch)
            except (ValuesError, RuntimeError, AssertionError):
                if not real:
                    raise
        with copies(model, inputs, {}) as batch:
            return trace(model, batch)


def traced_bytes_by_module(
    model: nn.Module,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> dict[str, int]:
    """Module name -> bytes that its forward pass stores, traced as in `traced_bytes`.

    The names are dotted, "" for the model itself; modules that store nothing are left out. A
    storage counts once, for the innermost module that is running when it is first saved.
    """

    def trace(model: nn.Module, inputs: Any) -> dict[str, int]:
        return bytes_by_module(storages_by_module(model, inputs, autocast, forward))

    return on_copies(trace, model, inputs)


def storages_by_module(
    twin: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None
) -> "list[KeptStorage]":
    """The storages that a copy of a model saves; their places are the names of its modules.

    A place is the innermost running module. The arguments are as in `traced_bytes`.
    """
    running, hooks = [""], list[RemovableHandle]()

    def leave(*_: Any) -> None:  # returns None, since a hook's result would replace the output
        running.pop()

    for name, module in twin.named_modules():
        enter = partial(lambda name, *_: running.append(name), name)
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        return _trace(twin, inputs, autocast, forward, lambda: running[-1])
    finally:
        for hook in hooks:
            hook.remove()


def bytes_by_module(storages: "Iterable[KeptStorage]") -> dict[str, int]:
    """Module name -> bytes of the storages that are first saved there."""
    sizes = Counter[str]()
    for storage in storages:
        sizes[storage.places[0]] += storage.size
    return dict(sizes)


@contextmanager
def tracing(model: nn.Module, mode: FakeTensorMode | None) -> Iterator[None]:
    """Runs the block in the fake mode, if there is one, and compiled code eagerly.

    Raises ValuesError if the model needs tensor values, and UsageError if it needs more than one
    example.
    """
    devices = [] if mode else list({p.device for p in model.parameters() if p.is_cuda})
    drawn, allows = random.getstate(), mode is not None and mode.allow_non_fake_inputs
    if mode:  # code may hold real tensors that are in no copy of a model or of inputs
        mode.allow_non_fake_inputs = True
    try:
        fakes, rows = mode or nullcontext(), whole_rows(model) if mode else nullcontext()
        caches, draws = without_caches(model), torch.random.fork_rng(devices)
        with fakes, rows, caches, _uncompiled(), draws, torch.enable_grad():
            yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):  # of torch's batch norms
            raise
        raise UsageError(
            f"{_running(model, error)} cannot be trained on a batch of one example, which has no "
            "variance; choose a larger batch."
        ) from None
    except RuntimeError as error:
        if isinstance(error, DataDependentOutputException):
            why = f"reads a value of a tensor ({error.func})"
        elif isinstance(error, DynamicOutputShapeException):
            why = f"makes a tensor whose size depends on values ({error.func})"
        elif isinstance(error, UnsupportedOperatorException):
            why = f"runs {error.func}, which has no fake implementation"
        elif "its data is not allocated yet" in str(error):
            why = "writes to places that depend on values"
        elif ".numpy() is not supported" in str(error):
            why = "reads the values of a tensor (.numpy())"
        elif "Expected inputs of BF16 type" in str(error):
            why = "multiplies all experts at once, which torch 2.11 traces in bfloat16 alone,"
        elif "_apply(): Couldn't swap" in str(error):
            why = "converts the weights of a module"
        else:
            raise
        raise ValuesError(
            f"cannot trace {_running(model, error)}, since it {why} and a trace has no values; "
            "trace the other modules on their own."
        ) from None
    finally:
        random.setstate(drawn)
        if mode:
            mode.allow_non_fake_inputs = allows


def _uncompiled() -> AbstractContextManager[Any]:
    """Runs compiled code eagerly: traces would use up the limit of recompilations.

    The compiler takes long to import, so this does not import it.
    """
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def _running(model: nn.Module, error: BaseException) -> str:
    """The name and class of the innermost module of `model` whose code raised an error."""
    names = {module: name for name, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    selves = [model, *(frame.f_locals.get("self") for frame in frames)]
    module = next(m for m in reversed(selves) if isinstance(m, nn.Module) and m in names)
    name = names[module]
    kind = stock_type(module).__name__
    return f"{name} ({kind})" if name else kind


def run_forward(
    model: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None = None
) -> Any:
    """Runs a forward pass under autocast to a dtype; None disables autocast."""
    device = next(t.device.type for t in tensors_of(model, inputs))
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        if forward is not None:
            return forward(model, inputs)
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _trace(
    model: nn.Module,
    inputs: Any,
    autocast: torch.dtype | None,
    forward: Forward | None,
    place: Callable[[], Any],
) -> "list[KeptStorage]":
    """The storages that a forward pass saves; see `kept_storages`.

    A joint budget's draw is first fixed to the one with the most bytes. A model whose output
    layers are not known yet is counted as it will be after its first step.
    """

    def run() -> Any:
        return run_forward(model, inputs, autocast, forward)

    with tracing(model, mode_of(tensors_of(model, inputs))):
        notes = unseen(model)
        hold_largest(model, partial(kept_storages, model, run))
        if unseen(model):
            run()
        for note in notes:
            note.version = None
        return kept_storages(model, run, place)


class _Kept:
    """A tensor that autograd saves; a weak reference to this object tells how long."""

    def __init__(self, tensor: Tensor) -> None:
        # An output would hold the graph that saves it.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()


class KeptStorage(NamedTuple):
    """A storage that autograd saves.

    key: unique while it is alive. places: where it was saved, in the order of the forward pass.
    """

    key: int
    size: int
    places: tuple[Any, ...]


def kept_storages(
    model: nn.Module, forward: Callable[[], Any], place: Callable[[], Any]
) -> list[KeptStorage]:
    """The storages that autograd holds after `forward`, without parameters.

    A graph that `forward` has dropped holds nothing. place: called when a storage is saved.
    """
    resident = resident_keys(model)
    # The storages are kept alive, so that no key is used twice.
    storages = dict[int, tuple[torch.UntypedStorage, int, list[tuple[Any, weakref.ref[_Kept]]]]]()

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        for part in _parts(tensor):
            key, storage = storage_key(part), part.untyped_storage()
            if key not in resident:
                if key not in storages:
                    storages[key] = storage, storage.nbytes(), []
                storages[key][-1].append((place(), weakref.ref(kept)))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, attrgetter("tensor")):
        result = forward()
    kept = list[KeptStorage]()
    for key, (_, size, keepers) in storages.items():
        if places := tuple(where for where, keeper in keepers if keeper() is not None):
            kept.append(KeptStorage(key, size, places))
    del result  # its graph was needed until here
    return kept


def resident_keys(model: nn.Module) -> set[int]:
    """The keys of the storages of a model's parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    keys, mode = (storage_key(part) for t in tensors for part in _parts(t)), mode_of(tensors)
    return {*keys, *getattr(mode, "originals", ())}


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that have storages: the tensor, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
