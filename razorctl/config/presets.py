"""The TOML files of presets, shipped with razorctl or written by the user."""

from pathlib import Path

from razorctl.system import folders

_PACKAGE = Path(__file__).parents[1]
# The presets are inside the package in a wheel, and beside it in a checkout.
SHIPPED = next(p for p in (_PACKAGE / "presets", _PACKAGE.parent / "presets") if p.is_dir())


def files(kind: str) -> dict[str, Path]:
    """Preset name -> file, for the kind "gpus" or "recipes".

    A user's preset replaces a shipped one of the same name.
    """
    files: dict[str, Path] = {}
    for folder in (folders.config(), SHIPPED):
        for file in sorted((folder / kind).glob("*.toml")):
            files.setdefault(file.stem, file)
    return files
