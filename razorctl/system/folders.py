"""The user's folders, as the operating system defines them, and names of files."""

import os
from pathlib import Path

# Names that systems put beside a user's files; such a folder is not a class of images.
OF_SYSTEMS = frozenset(
    ("__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
) | {"__pycache__", "Thumbs.db", "ehthumbs.db", "desktop.ini"}


def cache() -> Path:
    """The folder for files that razorctl can create again."""
    return _of("user_cache_dir", "XDG_CACHE_HOME", "~/.cache")


def config() -> Path:
    """The folder for the user's presets."""
    return _of("user_config_dir", "XDG_CONFIG_HOME", "~/.config")


def exists(path: Path) -> bool:
    """Like `os.path.exists`; False for paths that are too long."""
    return os.path.exists(path)  # noqa: PTH110


def shown(name: str) -> bool:
    """Whether a name is a user's file or folder: neither hidden nor of a system."""
    return not name.startswith(".") and name not in OF_SYSTEMS


def spelled(name: str) -> str:
    """A name of the file system as text; bytes that are not UTF-8 become question marks."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _of(kind: str, variable: str, usual: str) -> Path:
    """The folder of platformdirs; if that is not installed, its folder on Linux."""
    try:
        import platformdirs
    except ModuleNotFoundError:  # a GPU machine with torch and little else
        return Path(os.path.expanduser(os.environ.get(variable) or usual)) / "razorctl"  # noqa: PTH111
    return Path(getattr(platformdirs, kind)("razorctl"))
