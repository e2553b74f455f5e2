"""The user's own folders, where the operating system wants them; names of files as they come."""

import os
from pathlib import Path

# Names of what systems put beside the files of a user, in folders that may be of classes.
OF_SYSTEMS = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
) | {"__pycache__", "Thumbs.db", "ehthumbs.db", "desktop.ini"}


def cache() -> Path:
    """Where razorctl keeps what it can make again."""
    return _of("user_cache_dir", "XDG_CACHE_HOME", "~/.cache")


def config() -> Path:
    """Where users keep presets of their own."""
    return _of("user_config_dir", "XDG_CONFIG_HOME", "~/.config")


def exists(path: Path) -> bool:
    """Whether something is at a path, which may also be too long for one."""
    return os.path.exists(path)  # noqa: PTH110


def shown(name: str) -> bool:
    """Whether a file or a folder is a user's by its name: it is not hidden, and of no system."""
    return not name.startswith(".") and name not in OF_SYSTEMS


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
