"""Spans of a forward pass in which layers pack activations, for timing them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Span = Callable[[], AbstractContextManager[None]]

_watcher: Span | None = None
_NOTHING = nullcontext()


def packing() -> AbstractContextManager[None]:
    """The context in which a layer chooses and packs what it stores; it may be nested.

    Outside `watched` it does nothing, so that torch.compile does not break the graph.
    """
    return _NOTHING if _watcher is None else _watcher()


@contextmanager
def watched(by: Span) -> Iterator[None]:
    """Inside the block, every `packing` span of any model and thread runs in a context of `by`."""
    global _watcher
    before, _watcher = _watcher, by
    try:
        yield
    finally:
        _watcher = before
