import pytest

from razorctl.memory.trace_cache import Cache
from razorctl.system import folders
from tests.models import entry, registered


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The folder of the user's own presets, empty at first."""
    monkeypatch.setattr(folders, "config", lambda: tmp_path / "razorctl")
    folder = tmp_path / "razorctl" / "gpus"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def small():
    """vit-micro of two blocks, and beside it `vit`, `resnet`, `bert`, `gpt2` and `llama`."""
    llama = entry("llama", intermediate_size=512)
    gpt2 = entry("gpt2", bos_token_id=0, eos_token_id=0)
    with registered(*map(entry, ("vit", "resnet", "bert")), gpt2, llama, shallow=True):
        yield


@pytest.fixture
def cache(small, traces) -> Cache:
    """The traces of small models, for all tests of the session."""
    return Cache(traces)
