"""The user's own folders, where the operating system wants them; names of files as they come."""

import os
from pathlib import Path


def cache() -> Path:
    """Where razorctl keeps what it can make again."""
    return _of("user_cache_dir", "XDG_CACHE_HOME", "~/.cache")


def config() -> Path:
    """Where users keep presets of their own."""
    return _of("user_config_dir", "XDG_CONFIG_HOME", "~/.config")


def exists(path: Path) -> bool:
    """Whether something is at a path, which may also be too long for one."""
    return os.path.exists(path)  # noqa: PTH110


def spelled(name: str) -> str:
    """A name of the file system as text: what is not UTF-8 in it becomes question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _of(kind: str, variable: str, usual: str) -> Path:
    """The folder that platformdirs names; where it is not installed, the one it names on Linux."""
    try:
        import platformdirs
    except ModuleNotFoundError:  # a GPU machine with torch and little else
        return Path(os.path.expanduser(os.environ.get(variable) or usual)) / "razorctl"  # noqa: PTH111
    return Path(getattr(platformdirs, kind)("razorctl"))
