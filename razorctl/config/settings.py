"""Checks and TOML reading that the settings dataclasses Job, Recipe and Gpu share."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from razorctl.errors import UsageError
from razorctl.system import documents


def check_types(settings: Any, values: Mapping[str, Any] | None = None) -> None:
    """Raises UsageError if a field's value is not of its annotated type.

    settings: a dataclass, or the class, of which `values` has some fields.


    An int is accepted for a float, but a bool is not accepted for a number. Of a Literal only the
    type is checked here; fields annotated with Mapping or tuple are not checked.
    """
    values = vars(settings) if values is None else values
    for field in (field for field in fields(settings) if field.name in values):
        value = values[field.name]
        origin = get_origin(field.type)
        if origin in (Mapping, tuple):
            continue
        kinds = (str,) if origin is Literal else get_args(field.type) or (field.type,)
        if type(value) in kinds or (type(value) is int and float in kinds):
            continue
        names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise UsageError(
            f"{field.name.replace('_', ' ')} {value!r} is not of type {names}; give one that is."
        )


def check_seed(seed: int) -> None:
    """Raises UsageError for a seed that some random generators do not accept."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed {seed} is outside [0, 2**32); give one such as 0.")


def read_toml(file: Path) -> dict[str, Any]:
    """The contents of a TOML file; raises UsageError if it cannot be read or is not TOML."""
    try:
        return documents.parse_toml(documents.read_bytes(file, documents.LARGEST_FOREIGN))
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror}); name another file.") from None
    except documents.UnlikeError as error:
        raise UsageError(f"{file} is not valid TOML ({error}); correct it.") from None
