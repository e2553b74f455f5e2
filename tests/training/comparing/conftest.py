"""Comparisons are made in an empty directory, without user settings."""

import os

import pytest

from razorctl.training.comparing import peaks


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def untraced(request, monkeypatch):
    """Peaks are not traced, which takes a second for each row, but where that is tested."""
    if request.path.name != "test_peaks.py":
        monkeypatch.setattr(peaks, "measured", lambda _: True)
