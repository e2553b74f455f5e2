"""Checks and TOML reading, shared by the settings dataclasses Job, Recipe and Gpu."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from razorctl.errors import ArgumentTypeError, UsageError
from razorctl.system import documents


def check_types(settings: Any, values: Mapping[str, Any] | None = None) -> None:
    """Raises UsageError if a field's value is not of its annotated type; see `check_type`.

    Fields annotated with Mapping or tuple are not checked.
    settings: a dataclass, or its class if `values` has some of its fields.
    """
    values = vars(settings) if values is None else values
    for field in fields(settings):
        if field.name in values and get_origin(field.type) not in (Mapping, tuple):
            check_type(field.name.replace("_", " "), values[field.name], field.type)


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raises ArgumentTypeError if a value is not of an annotated type.

    An int is accepted as a float; a bool is not accepted as a number. For a Literal only the type
    is checked. A quoted annotation is not checked, since its class may not be imported.
    """
    if isinstance(annotation, str):
        return
    kinds = [
        str if get_origin(kind) is Literal else get_origin(kind) or kind
        for kind in types_in(annotation)
    ]
    classes = tuple(kind for kind in kinds if kind not in (int, float))  # a bool is an int
    if (
        type(value) in kinds
        or isinstance(value, classes)
        or (type(value) is int and float in kinds)
    ):
        return
    names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise ArgumentTypeError(f"{name} {value!r} is not of type {names}; give one that is.")


def types_in(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation allows; a Literal is one of them."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


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
