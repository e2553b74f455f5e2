"""Every test runs in an empty directory, with caches of its own."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
