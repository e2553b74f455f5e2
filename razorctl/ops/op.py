"""Ops of razorctl: Python functions that are registered with torch under a schema, and kernels.

The schema of an op comes from the signature of its body. Schemas have no structures, so a
`FewBitCopy` argument is several arguments in the schema. The body, the kernels and the op itself
take it as one argument.

A call skips PyTorch's dispatcher if the dispatcher would add nothing but time: for an op of
`torch.library.custom_op` it takes the host ten microseconds, as long as the rest of the call.
Everything that observes calls needs the dispatcher: compilers, autograd, modes such as those
that trace memory, tensor subclasses, and profilers.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _AutoDispatchBelowAutograd, _len_torch_dispatch_stack
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import peek_interpreter_stack

P = ParamSpec("P")
R = TypeVar("R")


class FewBitCopy(NamedTuple):
    """A few-bit copy of an activation [rows, columns], as `ops.quantize.quantize` returns it.

    Its values are scale * (code - zero_point / 8) + bias.

    Args:
        packed: uint8 codes, packed by `ops.packing.pack`.
        zero_point: int16 [tiles, columns].
        scale: [tiles, columns], of any floating dtype.
        bits: Bits of a code.
        tile_rows: Rows of a tile.
        bias: [columns], None for 0.
    """

    packed: Tensor
    zero_point: Tensor
    scale: Tensor
    bits: int
    tile_rows: int
    bias: Tensor | None = None


# Types of arguments that need only a kernel: no tensor subclass is among them.
PLAIN = frozenset((Tensor, nn.Parameter, FewBitCopy, torch.dtype, torch.device))
PLAIN |= {int, float, bool, str, list, type(None)}


@dataclass(frozen=True)
class Fused:
    """The cost of an op on a card with fused kernels, for planning.

    Args:
        launches: Kernels. The first moves each operand and result once, the others hardly anything.
        operations: Operations of an int8 product of the first two arguments.
        rows: Rows of that product in memory at a time if Triton does not multiply. Then one kernel
            writes each part as int32, and another reads it.
        again: Bytes moved beyond operands and results.
        made: Rows of both operands of that product, and its terms, if an extra kernel computes the
            operands from the arguments.
        reduces: Whether the output of the first kernel depends on sums, largest values or ends of
            tiles of its input.
        plain: Elements of int8 results that the function of the op is not applied to.
    """

    launches: int = 1
    operations: int = 0
    rows: int = 0
    again: int = 0
    made: tuple[int, int, int] | None = None
    reduces: bool = False
    plain: int = 0


class Op(Generic[P, R]):
    """An op; see `op`, which creates it.

    Attributes:
        body: The op in PyTorch operations.
        fused: See `op`.
        kernels: Kind of device -> the function for it.
        place: Index of the `FewBitCopy` among the arguments, which is always passed by position;
            None if there is none.
    """

    def __init__(
        self,
        body: Callable[P, R],
        empty: Callable[..., Any],
        fused: Fused | Callable[..., Fused] | None,
        mutates: Iterable[str],
    ) -> None:
        update_wrapper(self, body)
        self.name, self.body, self.kernels = body.__name__, body, dict[str, Callable[..., R]]()
        self.fused = fused
        parameters = list(inspect.signature(body).parameters.values())
        self._defaults = tuple(p.default for p in parameters)
        kinds = [p.annotation for p in parameters]
        self.place = kinds.index(FewBitCopy) if FewBitCopy in kinds else None
        name = f"razorctl::{self.name}"
        self.definition = torch.library.custom_op(name, self._of_flat(body), mutates_args=mutates)
        self.definition.register_fake(lambda *args: empty(*self.grouped(args)))
        self.overload = getattr(torch.ops.razorctl, self.name).default
        OPS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        every: tuple[Any, ...] = args
        if self.place is not None:
            every = *args, *every[self.place]
        if not torch.compiler.is_compiling() and not kwargs and alone(every):
            kernel = self.kernels.get(_device(first_tensor(args)))
            if kernel is not None:
                with _AutoDispatchBelowAutograd():  # no result is a view, as after dispatch
                    return kernel(*args)
        result: R = self.overload(*self.flat(args), **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def flat(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the op in the form of its schema."""
        place = self.place
        return args if place is None else (*args[:place], *args[place], *args[place + 1 :])

    def grouped(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of `flat`, with defaults for missing arguments."""
        place, args = self.place, flat
        if place is not None:
            end = place + len(FewBitCopy._fields)
            args = *flat[:place], FewBitCopy._make(flat[place:end]), *flat[end:]
        return args + self._defaults[len(args) :]

    def on_card(self, flat: tuple[Any, ...]) -> Fused | None:
        """The cost for arguments in the form of the schema; None without fused kernels."""
        return self.fused(*self.grouped(flat)) if callable(self.fused) else self.fused

    def register(self, device: str, kernel: Callable[..., R]) -> None:
        """Registers a kernel, with the arguments of the body, for a kind of device."""
        self.kernels[device] = kernel
        self.definition.register_kernel(device)(self._of_flat(kernel))

    def _of_flat(self, function: Callable[..., R]) -> Callable[..., R]:
        """Converts a function of the body's arguments to one of the schema's arguments."""
        if self.place is None:
            return function
        place, end = self.place, self.place + len(FewBitCopy._fields)

        def run(*flat: Any) -> R:  # `function` has the defaults of missing arguments
            return function(*flat[:place], FewBitCopy._make(flat[place:end]), *flat[end:])

        signature = inspect.signature(self.body)
        parameters = list(signature.parameters.values())
        parameters[place : place + 1] = [
            inspect.Parameter(name, parameters[place].kind, annotation=kind)
            for name, kind in FewBitCopy.__annotations__.items()
        ]
        vars(run)["__signature__"] = signature.replace(parameters=parameters)
        return run


OPS: dict[str, Op[..., Any]] = {}  # by their qualified names


def op(
    *,
    empty: Callable[..., Any],
    fused: Fused | Callable[..., Fused] | None = None,
    mutates: Iterable[str] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Creates an op from a body of PyTorch operations; its first argument is or has a tensor.

    Args:
        empty: Returns the results without values, for the same arguments.
        fused: The cost of fused kernels on a card, or a function of the arguments that returns it;
            None without fused kernels.
        mutates: Names of the arguments that the op changes in place.
    """
    return lambda body: Op(body, empty, fused, mutates)


def alone(args: tuple[Any, ...]) -> bool:
    """Whether a call with these arguments needs no dispatcher, since nothing observes it."""
    return not (
        torch.is_grad_enabled()
        or _len_torch_dispatch_stack()
        or _profiler_enabled()
        or peek_interpreter_stack() is not None
    ) and PLAIN.issuperset(map(type, args))


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The tensor that determines the device of an op with these arguments."""
    first = args[0]
    tensor: Tensor = first.packed if type(first) is FewBitCopy else first
    return tensor


def _device(x: Tensor) -> str:
    """The kind of device of x, faster than `x.device.type`."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
