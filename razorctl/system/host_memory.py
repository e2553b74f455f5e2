"""The memory of this machine."""

import re
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup/memory.max")  # the limit of a container, or "max"


def available() -> int | None:
    """Bytes that programs can still allocate, and that a container allows; None if unknown."""
    sizes = []
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", MEMINFO.read_text("utf-8"))
        sizes += [1024 * int(match[1])] if match else []
    with suppress(OSError, ValueError):
        sizes.append(int(CONTAINER.read_text("utf-8")))
    return min(sizes, default=None)
