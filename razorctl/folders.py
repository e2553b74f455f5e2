"""The user's own folders, where the operating system wants them."""

import os
from pathlib import Path


def cache() -> Path:
    """Where razorctl keeps what it can make again."""
    return _of("user_cache_dir", "XDG_CACHE_HOME", "~/.cache")


def config() -> Path:
    """Where users keep presets of their own."""
    return _of("user_config_dir", "XDG_CONFIG_HOME", "~/.config")


def _of(kind: str, variable: str, usual: str) -> Path:
    """The folder that platformdirs names; where it is not installed, the one it names on Linux."""
    try:
        import platformdirs
    except ModuleNotFoundError:  # a GPU machine with torch and little else
        return Path(os.path.expanduser(os.environ.get(variable) or usual)) / "razorctl"  # noqa: PTH111
    return Path(getattr(platformdirs, kind)("razorctl"))
