"""Spans of a forward pass in which layers pack, for whoever wants to time them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Span = Callable[[], AbstractContextManager[None]]

_watcher: Span | None = None


def packing() -> AbstractContextManager[None]:
    """What runs inside chooses and packs what is saved; such spans may be nested.

    Nothing happens unless someone watches, so that torch.compile traces it into a whole graph.
    """
    return nullcontext() if _watcher is None else _watcher()


@contextmanager
def watched(by: Span) -> Iterator[None]:
    """Inside it every `packing` span, of any model and thread, runs in one of `by`."""
    global _watcher
    before, _watcher = _watcher, by
    try:
        yield
    finally:
        _watcher = before
