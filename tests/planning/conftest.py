import pytest

from razorctl.config import presets


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The folder of the user's own presets, empty at first."""
    monkeypatch.setattr(presets, "user_config_dir", lambda app: str(tmp_path / app))
    folder = tmp_path / "razorctl" / "gpus"
    folder.mkdir(parents=True)
    return folder
