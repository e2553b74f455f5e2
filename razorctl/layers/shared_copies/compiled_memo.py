"""Sharing of copies in a program that torch.compile traces.

Copies are an attribute of their activation: the tracer follows attributes, and they are dropped
with the activation. After a change in place the traced tensor is still the same object, so the
version of the tracer's fake tensor is noted with them, and so is its node in the graph, since
the output of an operation that changes nothing may be the same fake tensor. `comptime` functions,
which run during tracing, note and compare both, and the program gets the answer as a constant.
Another graph has another fake tensor, so it finds nothing.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

if TYPE_CHECKING:
    from razorctl.rules.packed import Packed


class _Tracer:
    """The result of the last `_look`. One thread traces at a time."""

    unchanged = False
    offset = 0


def offer(x: Tensor, layout: Hashable, copy: "Packed") -> None:
    """See `sharing.Memo.offer`."""
    comptime(_look)
    others = x.razor_copies if _unchanged() else ()  # type: ignore[attr-defined]
    x.razor_copies = ((layout, copy), *others)  # type: ignore[attr-defined]
    comptime(_note)


def find(x: Tensor, layout: Hashable) -> "Packed | None":
    """The copy of `x` in that layout, if there is one and x has not changed since."""
    comptime(_look)
    if _unchanged():
        for layout_of_copy, copy in x.razor_copies:  # type: ignore[attr-defined]
            if layout_of_copy == layout:
                return copy  # type: ignore[no-any-return]
    return None


def _note(context: Any) -> None:
    context.get_local("x").as_fake().noted = _now(context)


def _look(context: Any) -> None:
    _Tracer.unchanged = getattr(context.get_local("x").as_fake(), "noted", None) == _now(context)


def _now(context: Any) -> tuple[Any, int]:
    """The node and the version of x, whose attributes belong to both."""
    x = context.get_local("x")
    return x.as_proxy().node, x.as_fake()._version


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unchanged() -> bool:
    return _Tracer.unchanged


def offset(x: Tensor) -> int:
    """The storage offset of `x`, which the tracer itself cannot ask for."""
    comptime(_look_at_offset)
    start: int = _offset()
    return start


def _look_at_offset(context: Any) -> None:
    _Tracer.offset = int(context.get_local("x").as_fake().storage_offset())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _offset() -> int:
    return _Tracer.offset
