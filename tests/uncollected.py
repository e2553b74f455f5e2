"""Imported first by a process that then imports much, which leaves no garbage."""

import atexit
import gc
import os

gc.disable()


def _leave(pid: int = os.getpid()) -> None:
    """Ends this process without freeing all that it has imported, which takes seconds."""
    if os.getpid() == pid:  # not those that are forked
        os._exit(0)


atexit.register(_leave)
