"""The memory that this machine still has."""

import pytest

from razorctl.system import host_memory

MEMINFO = "MemTotal: 20 kB\nMemAvailable:       7 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        (MEMINFO, "max\n", 7 * 1024),
        (MEMINFO, "100\n", 100),
        (None, "100\n", 100),
        ("MemTotal: 20 kB\n", None, None),
        (None, None, None),
    ],
)
def test_what_is_available(meminfo, limit, expected, tmp_path, monkeypatch):
    for name, text in (("MEMINFO", meminfo), ("CONTAINER", limit)):
        monkeypatch.setattr(host_memory, name, tmp_path / name)
        if text is not None:
            (tmp_path / name).write_text(text)
    assert host_memory.available() == expected
