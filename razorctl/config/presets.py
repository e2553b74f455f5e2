"""Presets that ship with razorctl, and a user's own: TOML files by kind."""

from pathlib import Path

from platformdirs import user_config_dir

_PACKAGE = Path(__file__).parents[1]
# In the wheel the presets lie inside the package, in a checkout beside it.
SHIPPED = next(p for p in (_PACKAGE / "presets", _PACKAGE.parent / "presets") if p.is_dir())


def files(kind: str) -> dict[str, Path]:
    """Name -> file of the presets of a kind, "gpus" or "recipes"; the user's own win."""
    found: dict[str, Path] = {}
    for folder in (Path(user_config_dir("razorctl")), SHIPPED):
        for file in sorted((folder / kind).glob("*.toml")):
            found.setdefault(file.stem, file)
    return found
