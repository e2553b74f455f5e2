"""A model that is imported from the user's code by name, such as `mymodels:build`."""

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from razorctl.errors import RazorError, UsageError
from razorctl.registry import unknown

ROWS = 64  # of a batch
TOKENS = 128  # of a text, where nothing says how long it is


def load(
    name: str, batch_size: int | None = None, input_size: int | None = None
) -> tuple[Any, Any]:
    """The model and the inputs that `module:function` returns.

    The module is imported as Python does, with the current directory first, so its code runs. The
    function takes no argument, and returns a model and inputs, or only a model; it may also be a
    class, or the model itself. batch_size, input_size: of images or tokens if there are no inputs;
    None is what the model's library says. Raises UsageError for a name of anything else, and
    RazorError if the code fails.
    """
    place, _, attribute = name.partition(":")
    module = _module(place, name)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [each for each, value in vars(target).items() if callable(value)]
            raise unknown(f"function of {place}", part, names)
        target = getattr(target, part)
    result = target if isinstance(target, nn.Module) else _call(target, name)
    if isinstance(result, nn.Module):
        return result, _inputs(result, name, batch_size, input_size)
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], nn.Module):
        if (batch_size or input_size) is not None:
            what = "input size" if batch_size is None else "batch size"
            raise UsageError(f"{name} returns inputs, which have their {what}; leave it out.")
        return result[0], result[1]
    raise UsageError(
        f"{name} returned {_kind(result)}, which is no model; return an nn.Module and its inputs."
    )


def _module(place: str, name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        lacking = error.name or ""
        if place != lacking and not place.startswith(f"{lacking}."):
            raise UsageError(
                f"{place} needs {lacking}, which is not installed; install it."
            ) from error
        mend = "run this in the directory that has it"
        if place.endswith(".py"):
            mend = f"name it as Python imports it, {name.replace('.py:', ':')}"
        raise UsageError(f"there is no module {place}; {mend}.") from error
    except Exception as error:
        raise _failed(place, error) from error


def _call(function: Any, name: str) -> Any:
    if not callable(function):
        raise UsageError(f"{name} is {_kind(function)}, neither a function nor a model.")
    try:
        parameters = [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
    except ValueError:  # a built-in function
        parameters = []
    if parameters:
        raise UsageError(
            f"{name} needs {', '.join(parameters)}; name a function that needs no argument."
        )
    try:
        return function()
    except Exception as error:
        raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> RazorError:
    """The error for one that the user's code raised, with its place."""
    if isinstance(error, RazorError):
        return error
    why = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, SyntaxError):  # its message says where
        return RazorError(f"{name} failed: {type(error).__name__}: {why}")
    places = traceback.extract_tb(error.__traceback__)
    user_places = [at for at in places if at.filename.startswith(str(Path.cwd()))]
    at = (user_places or places)[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}"
    return RazorError(f"{name} failed in {where}: {type(error).__name__}: {why}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _inputs(model: nn.Module, name: str, batch_size: int | None, input_size: int | None) -> Any:
    """Inputs on the meta device, of the shape that the model's library says."""
    rows = batch_size or ROWS
    shape = _shape(model, input_size)
    if shape is None:
        raise UsageError(
            f"{name} gives a {type(model).__name__} without inputs; return both, the model and its "
            "inputs, or say with --input-size what its images have."
        )
    input_name = getattr(model, "main_input_name", None)  # of transformers
    dtype = torch.long if input_name == "input_ids" else None
    inputs = torch.zeros(rows, *shape, dtype=dtype, device="meta")
    return inputs if input_name is None else {input_name: inputs}


def _shape(model: nn.Module, input_size: int | None) -> tuple[int, ...] | None:
    """The shape of an image or of a text; None if nothing says it."""
    config = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "input_ids":
        return (input_size or min(TOKENS, getattr(config, "max_position_embeddings", TOKENS)),)
    pretrained = getattr(model, "pretrained_cfg", None)  # of timm
    channels, size = 3, None
    if isinstance(pretrained, dict) and pretrained.get("input_size"):
        channels, size = pretrained["input_size"][:2]
    elif isinstance(getattr(config, "image_size", None), int):
        channels, size = getattr(config, "num_channels", 3), config.image_size  # type: ignore[union-attr]
    side = input_size or size
    return None if side is None else (channels, side, side)
