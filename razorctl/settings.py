"""What a frozen dataclass of settings, Job or Recipe, has in common with the others."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from razorctl.errors import UsageError


def check_types(settings: Any) -> None:
    """Raises UsageError if a field does not hold what it is annotated with.

    A whole number may stand for a float, but True for no number. Literals are left to the caller.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if get_origin(field.type) is Literal:
            continue
        kinds = get_args(field.type) or (field.type,)
        if type(value) in kinds or (type(value) is int and float in kinds):
            continue
        names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
        raise UsageError(
            f"{field.name.replace('_', ' ')} {value!r} is not of type {names}; give one that is."
        )
