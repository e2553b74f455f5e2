"""Sharing in a program that torch.compile traces.

A copy is an attribute of its activation, which the tracer follows, and drops with the activation.
A change in place leaves the traced tensor the same object, so the version of the tracer's own
stand-in is noted with the copy: while tracing, by `comptime`, and handed to the program as a
constant. In another graph, where the stand-in is another, nothing is found.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

if TYPE_CHECKING:
    from razorctl.layers.sharing import Copy


class _Tracer:
    """What `_look` found last; tracing is one thread's."""

    unchanged = False


def offer(x: Tensor, layout: Hashable, copy: "Copy") -> None:
    """See `sharing.Memo.offer`."""
    x.razor_copy = layout, copy  # type: ignore[attr-defined]
    comptime(_note)


def find(x: Tensor, layout: Hashable) -> "Copy | None":
    """The copy of `x` in that layout, if there is one and x has not changed since."""
    comptime(_look)
    if not _unchanged():
        return None
    known, copy = x.razor_copy  # type: ignore[attr-defined]
    return copy if known == layout else None


def _note(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    fake.razor_version = fake._version


def _look(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    _Tracer.unchanged = getattr(fake, "razor_version", None) == fake._version


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _unchanged() -> bool:
    return _Tracer.unchanged
