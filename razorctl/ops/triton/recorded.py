"""The launches that ops would make on a card, recorded on tensors that need neither it nor data."""

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import razorctl.ops.triton
from razorctl.ops import kernels
from razorctl.ops.op import OPS
from razorctl.ops.triton.launch import (
    WARP,
    Kernel,
    Recorder,
    capability,
    count_processors,
    recorded_by,
    recorder,
)
from razorctl.ops.triton.variants import CONSTANT, Variant

PROCESSORS = 128  # of a card of which only the capability is known


class Card(NamedTuple):
    """What launches depend on: compute capability (75, 80, ...) and number of multiprocessors."""

    capability: int
    processors: int = PROCESSORS

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """The card that is there."""
        return cls(capability(device), count_processors(device))


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    op: what asked for it. variant: what it is compiled as. grid: of programs. arguments: by name,
    the numbers that the kernel gets, and the shapes of tensors. trial: whether only the first step
    launches it, to find the fastest of several ways.
    """

    op: str
    variant: Variant
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    trial: bool


@dataclass(frozen=True)
class _Pointer:
    """What Triton's binder looks at of a tensor. CUDA's allocator aligns storages."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


class Recording(TorchDispatchMode):
    """Inside it, ops on fake or meta tensors note what they would launch on cards.

    Their results are as without it, and nothing is launched. Where several ways lead to the same
    result and `device` has not chosen yet, which times them all, all of them are noted.
    `kernels.assumed` must say the same of the cards.

    device: where the only card is, if it is here. launches: for each card, in their order.
    """

    def __init__(self, *cards: Card, device: torch.device | None = None) -> None:
        super().__init__()
        for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__):
            import_module(f"razorctl.ops.triton.{name}")  # registers its kernels
        self.launches: dict[Card, list[Launch]] = {card: [] for card in cards}
        self._recorders = {card: Recorder(*card, device, self._note) for card in cards}
        self._backend = make_backend(GPUTarget("cuda", cards[0].capability, WARP))
        self._binders: dict[str, Any] = {}
        self._op, self._found = "", list[Launch]()
        # A step calls an op many times with equal shapes, each of which launches the same.
        self._known: dict[Any, dict[Card, list[Launch]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func._schema.name.removeprefix("razorctl::")  # others keep their namespace
        run = kernels.REGISTERED.get((op, "cuda"))
        if run is not None and kernels.wanted():
            given = OPS[func._schema.name].grouped((*args, *kwargs.values()))
            if recorder() is not None:  # the kernel of another op calls it
                run(*given)
            else:
                self._record(op, run, given)
        return func(*args, **kwargs)

    def _record(self, op: str, run: kernels.Registered, args: tuple[Any, ...]) -> None:
        """Notes what an op launches."""
        key = op, *map(_kind, args)
        if key not in self._known:
            self._op, self._known[key] = op, {}
            for card, own in self._recorders.items():
                self._found = self._known[key][card] = []
                with self, recorded_by(own):
                    run(*args)
        for card, found in self._known[key].items():
            self.launches[card] += found

    def _note(
        self, kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], settings: dict[str, Any]
    ) -> None:
        bind = self._binders.get(kernel.__name__)
        if bind is None:
            bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[kernel.__name__] = bind
        pointers = [
            _Pointer(a.dtype, int(a.storage_offset()) * a.itemsize) if isinstance(a, Tensor) else a
            for a in args
        ]
        bound, kinds, options = bind(*pointers, **settings)
        found = {name: kind for name, kind in zip(bound, kinds, strict=True) if kind[0] != CONSTANT}
        variant = Variant(
            kernel,
            {name: kind for name, (kind, _) in found.items()},
            {name: value for name, value in bound.items() if name not in found},
            options.pop("num_warps"),
            options.pop("num_stages"),
            f"{self._op}: {kernel.__name__} {' '.join(kind for kind, _ in found.values())}",
            tuple(name for name, (_, noted) in found.items() if noted == ""),
            options.pop("maxnreg", None),
        )
        assert not options, options
        arguments = {
            name: tuple(a.shape) if isinstance(a, Tensor) else a
            for name, a in zip(kernel.arg_names, args, strict=False)
        }
        now = recorder()
        assert now is not None
        self._found.append(Launch(self._op, variant, grid, arguments, now.trial))


def _kind(value: Any) -> Any:
    """What of an argument settles what is launched."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return tuple(map(_kind, value)) if isinstance(value, list | tuple) else value


def distinct(launches: Iterable[Launch]) -> list[Variant]:
    """What the launches compile to, each once."""
    return list(
        {launch.variant.key: launch.variant for launch in reversed(list(launches))}.values()
    )
