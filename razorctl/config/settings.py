"""What frozen dataclasses of settings, Job, Recipe or Gpu, and their files have in common."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from razorctl.errors import UsageError


def check_types(settings: Any) -> None:
    """Raises UsageError if a field does not hold what it is annotated with.

    A whole number may stand for a float, but True for no number. Literals, mappings and tuples
    are left to the caller.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if get_origin(field.type) in (Literal, Mapping, tuple):
            continue
        kinds = get_args(field.type) or (field.type,)
        if type(value) in kinds or (type(value) is int and float in kinds):
            continue
        names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise UsageError(
            f"{field.name.replace('_', ' ')} {value!r} is not of type {names}; give one that is."
        )


def check_seed(seed: int) -> None:
    """Raises UsageError for a seed that not every generator of numbers takes."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed {seed} is outside [0, 2**32); give a whole number from 0 up.")


def read_toml(file: Path) -> dict[str, Any]:
    """What a TOML file holds; raises UsageError if it cannot be read or is not TOML."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); name another file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML, mend it: {error}.") from None
