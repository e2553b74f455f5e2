import sys

import platformdirs
import pytest

from razorctl.system import folders


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
@pytest.mark.parametrize("own", [{}, {"XDG_CACHE_HOME": "/c", "XDG_CONFIG_HOME": "/d/e"}])
def test_without_platformdirs_the_folders_are_those_of_linux(own, monkeypatch):
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in own.items():
        monkeypatch.setenv(name, folder)
    with_it = folders.cache(), folders.config()
    assert with_it[0] == platformdirs.user_cache_path("razorctl")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert (folders.cache(), folders.config()) == with_it
