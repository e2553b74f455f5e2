"""Sharing of copies in a program that torch.compile traces.

Copies are an attribute of their activation. The tracer follows attributes, and they are freed with
the activation. After an in-place change the traced tensor is still the same object. So the version
of the tracer's fake tensor is noted with the copies, and so is its node in the graph, since an
operation that changes nothing may return the same fake tensor. `comptime` functions run during
tracing: they note and compare both, and the program gets the answer as a constant. In another graph
the fake tensor is another one, so nothing is found.
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
    """See `Memo.offer`."""
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
    """The node and the version of x; the attributes are valid for this pair only."""
    x = context.get_local("x")
    return x.as_proxy().node, x.as_fake()._version


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unchanged() -> bool:
    return _Tracer.unchanged


def offset(x: Tensor) -> int:
    """The storage offset of `x`, which traced code cannot ask for."""
    comptime(_look_at_offset)
    start: int = _offset()
    return start


def _look_at_offset(context: Any) -> None:
    _Tracer.offset = int(context.get_local("x").as_fake().storage_offset())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _offset() -> int:
    return _Tracer.offset
