"""What an op of razorctl is: a Python function that torch knows by a schema, and its kernels.

All of an op is read from the signature of its body. A `FewBitCopy` among the arguments is several
arguments in the schema, since schemas have no structures; the body, the kernels and the op itself
take it as one.

A call goes to the kernel without PyTorch's dispatcher where that would add nothing: it takes the
host ten microseconds a call of an op of `torch.library.custom_op`, as long as all else that the
call takes. It is needed where anything but the kernel wants to know of a call: compilers, autograd,
modes such as those that trace memory, subclasses of tensors, and profilers.
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
    """A few-bit copy of an activation [rows, columns], as `ops.quantize.quantize` makes it.

    It stands for scale * (code - zero_point / 8) + bias. packed: the codes, of `bits` bits, as
    `ops.packing.pack` packs them, uint8. zero_point, scale: of each column in each tile of
    `tile_rows` rows, [tiles, columns], int16 and any floating dtype. bias: [columns], None for 0.
    """

    packed: Tensor
    zero_point: Tensor
    scale: Tensor
    bits: int
    tile_rows: int
    bias: Tensor | None = None


# Types of arguments that nothing but a kernel takes part in.
PLAIN = frozenset(
    (
        *(Tensor, nn.Parameter, FewBitCopy, int, float, bool, str, list),
        *(torch.dtype, torch.device, type(None)),
    )
)


@dataclass(frozen=True)
class Fused:
    """What an op takes on a card where fused kernels run it; planning counts it so.

    launches: kernels. The first moves each operand and result once, and the others hardly anything.
    operations: of an int8 product of the first two arguments. rows: so many of that product are
    made at a time where it is not Triton that multiplies; then each part is written as int32 by one
    kernel and read by another. again: bytes moved beyond operands and results. reduces: whether
    what the first kernel writes waits for sums, largest values or the ends of tiles of what it
    reads.
    """

    launches: int = 1
    operations: int = 0
    rows: int = 0
    again: int = 0
    reduces: bool = False


class Op(Generic[P, R]):
    """An op; made by `op`.

    body: it, made of PyTorch operations. fused: as `op` takes it. kernels: kind of device -> what
    runs there. place: of the `FewBitCopy` among the arguments, which is always given by position;
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
                with _AutoDispatchBelowAutograd():  # so that no result is a view, as after dispatch
                    return kernel(*args)
        result: R = self.overload(*self.flat(args), **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def flat(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of the op as its schema has them."""
        place = self.place
        return args if place is None else (*args[:place], *args[place], *args[place + 1 :])

    def grouped(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of `flat`, with the defaults of arguments that are missing."""
        place, args = self.place, flat
        if place is not None:
            end = place + len(FewBitCopy._fields)
            args = *flat[:place], FewBitCopy._make(flat[place:end]), *flat[end:]
        return args + self._defaults[len(args) :]

    def on_card(self, flat: tuple[Any, ...]) -> Fused | None:
        """What it takes there for arguments as in its schema; None if no fused kernel runs it."""
        return self.fused(*self.grouped(flat)) if callable(self.fused) else self.fused

    def register(self, device: str, kernel: Callable[..., R]) -> None:
        """Makes `kernel`, which takes the arguments of the body, what runs on a kind of device."""
        self.kernels[device] = kernel
        self.definition.register_kernel(device)(self._of_flat(kernel))

    def _of_flat(self, function: Callable[..., R]) -> Callable[..., R]:
        """A function of the body's arguments as one of those that the schema has."""
        if self.place is None:
            return function
        place, end = self.place, self.place + len(FewBitCopy._fields)

        def run(*flat: Any) -> R:  # the function has the defaults of what is missing
            return function(*flat[:place], FewBitCopy._make(flat[place:end]), *flat[end:])

        signature = inspect.signature(self.body)
        found = list(signature.parameters.values())
        found[place : place + 1] = [
            inspect.Parameter(name, found[place].kind, annotation=kind)
            for name, kind in FewBitCopy.__annotations__.items()
        ]
        vars(run)["__signature__"] = signature.replace(parameters=found)
        return run


OPS: dict[str, Op[..., Any]] = {}  # by their qualified names


def op(
    *,
    empty: Callable[..., Any],
    fused: Fused | Callable[..., Fused] | None = None,
    mutates: Iterable[str] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Makes a body of PyTorch operations, whose first argument has tensors, an op of its name.

    empty: returns the results without values, for the same arguments. fused: what the op takes
    where fused kernels run it on a card, or a function of the arguments that says so; None if there
    are none. mutates: the arguments that it changes in place.
    """
    return lambda body: Op(body, empty, fused, mutates)


def alone(args: tuple[Any, ...]) -> bool:
    """Whether nothing but a kernel would take part in a call with these arguments now."""
    return not (
        torch.is_grad_enabled()
        or _len_torch_dispatch_stack()
        or _profiler_enabled()
        or peek_interpreter_stack() is not None
    ) and PLAIN.issuperset(map(type, args))


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """The tensor on whose device an op with these arguments runs."""
    first = args[0]
    found: Tensor = first.packed if type(first) is FewBitCopy else first
    return found


def _device(x: Tensor) -> str:
    """The kind of device of x; this is faster than `x.device.type`."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
