"""The launches that ops would make on a card, recorded on tensors that need neither it nor data."""

import pkgutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import razorctl.ops.triton
from razorctl.ops import kernels
from razorctl.ops.triton.launch import WARP, Kernel, Recorder, count_processors, recorded_by
from razorctl.ops.triton.variants import CONSTANT, Variant

PROCESSORS = 128  # of a card of which only the capability is known


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
    """Inside it, ops on fake or meta tensors note what they would launch on a card.

    Their results are as without it, and nothing is launched. Where several ways lead to the same
    result and `device` has not chosen yet, which times them all, all of them are noted.
    `kernels.assumed` must say the same of the card.

    capability: compute capability of the card: 75, 80, ... device: where it is, if it is here.
    processors: multiprocessors that it has, if it is not. launches: in their order.
    """

    def __init__(
        self, capability: int, device: torch.device | None = None, processors: int = PROCESSORS
    ) -> None:
        super().__init__()
        for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__):
            import_module(f"razorctl.ops.triton.{name}")  # registers its kernels
        self.launches: list[Launch] = []
        processors = processors if device is None else count_processors(device)
        self._recorder = Recorder(capability, processors, device, self._note)
        self._backend = make_backend(GPUTarget("cuda", capability, WARP))
        self._binders: dict[str, Any] = {}
        self._op = ""
        self._entered: list[ExitStack] = []

    def __enter__(self) -> "Recording":
        stack = ExitStack()
        stack.enter_context(recorded_by(self._recorder))
        self._entered.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = func._schema.name.removeprefix("razorctl::")  # others keep their namespace
        run = kernels.REGISTERED.get((op, "cuda"))
        if run is not None and kernels.wanted():
            before, self._op = self._op, op
            with self:
                run(*_all_arguments(func, args, kwargs))
            self._op = before
        return func(*args, **kwargs)

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
        self.launches.append(Launch(self._op, variant, grid, arguments, self._recorder.trial))


def _all_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operation, those left at their defaults among them."""
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(one.name, one.default_value) for one in rest)]


def distinct(launches: Iterable[Launch]) -> list[Variant]:
    """What the launches compile to, each once."""
    return list(
        {launch.variant.key: launch.variant for launch in reversed(list(launches))}.values()
    )
