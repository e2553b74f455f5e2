"""Fixtures: commands run in an empty directory, on a small model, without user settings."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, traces, shallow):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("RAZORCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Path:
    """A folder with small models and data of every kind."""
    from tests.cli.kinds import build

    top = tmp_path_factory.mktemp("kinds")
    build(top)
    return top
