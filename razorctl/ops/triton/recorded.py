"""The launches of ops on a card, recorded without the card on tensors without data."""

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
    """The properties of a card that launches depend on.

    capability: compute capability, 75, 80, ... processors: multiprocessors.
    """

    capability: int
    processors: int = PROCESSORS

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        """The properties of a card in this machine."""
        return cls(capability(device), count_processors(device))


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Args:
        op: The name of the op.
        variant: The compiled variant.
        grid: The numbers of programs.
        arguments: Name of an argument of the kernel -> number, or shape of a tensor.
        trial: Whether only the first step launches it, to find the fastest of several ways.
    """

    op: str
    variant: Variant
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    trial: bool


@dataclass(frozen=True)
class _Pointer:
    """The properties of a tensor that Triton's binder uses. CUDA's allocator aligns storages."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


class Recording(TorchDispatchMode):
    """A mode in which ops on fake or meta tensors record the launches that they make on cards.

    Nothing is launched, and results are as without it. Where an op has several ways and `device`
    has not chosen one yet, all are recorded, as the card would time them all. Must be used inside
    `kernels.assumed` for these cards.

    device: the only card, if it is in this machine. launches: card -> its launches, in their order.
    """

    def __init__(self, *cards: Card, device: torch.device | None = None) -> None:
        super().__init__()
        for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__):
            import_module(f"razorctl.ops.triton.{name}")  # registers its kernels
        self.launches: dict[Card, list[Launch]] = {card: [] for card in cards}
        self._recorders = {card: Recorder(*card, device, self._note) for card in cards}
        self._backend = make_backend(GPUTarget("cuda", cards[0].capability, WARP))
        self._binders: dict[str, Any] = {}
        self._op, self._current = "", list[Launch]()
        # A step calls an op many times with equal shapes, with equal launches.
        self._recorded: dict[Any, dict[Card, list[Launch]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func._schema.name.removeprefix("razorctl::")  # others keep their namespace
        run = kernels.REGISTERED.get((op, "cuda"))
        if run is not None and kernels.wanted():
            arguments = OPS[func._schema.name].grouped((*args, *kwargs.values()))
            if recorder() is not None:  # the kernel of another op calls it
                run(*arguments)
            else:
                self._record(op, run, arguments)
        return func(*args, **kwargs)

    def _record(self, op: str, run: kernels.Registered, args: tuple[Any, ...]) -> None:
        """Adds the launches of an op."""
        key = op, *map(_kind, args)
        if key not in self._recorded:
            self._op, self._recorded[key] = op, {}
            for card, its_recorder in self._recorders.items():
                self._current = self._recorded[key][card] = []
                with self, recorded_by(its_recorder):
                    run(*args)
        for card, launches in self._recorded[key].items():
            self.launches[card] += launches

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
        types = {name: kind for name, kind in zip(bound, kinds, strict=True) if kind[0] != CONSTANT}
        variant = Variant(
            kernel,
            {name: kind for name, (kind, _) in types.items()},
            {name: value for name, value in bound.items() if name not in types},
            options.pop("num_warps"),
            options.pop("num_stages"),
            f"{self._op}: {kernel.__name__} {' '.join(kind for kind, _ in types.values())}",
            tuple(name for name, (_, multiple) in types.items() if multiple == ""),
            options.pop("maxnreg", None),
        )
        assert not options, options
        arguments = {
            name: tuple(a.shape) if isinstance(a, Tensor) else a
            for name, a in zip(kernel.arg_names, args, strict=False)
        }
        now = recorder()
        assert now is not None
        self._current.append(Launch(self._op, variant, grid, arguments, now.trial))


def _kind(value: Any) -> Any:
    """The properties of an argument that launches depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return tuple(map(_kind, value)) if isinstance(value, list | tuple) else value


def distinct(launches: Iterable[Launch]) -> list[Variant]:
    """The distinct variants of launches."""
    return list(
        {launch.variant.key: launch.variant for launch in reversed(list(launches))}.values()
    )
