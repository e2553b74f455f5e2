"""Every command runs in an empty directory, without settings of the user's, on a small model."""

import os

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, traces, shallow):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
