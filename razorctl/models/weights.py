"""Stored weights and a model's config, compared by the headers of their files."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import documents
from razorctl.errors import DataError

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, tuple[int, ...]]
# A setting that may be a number of layers, and a number of a thousand or more in it.
LAYERS = re.compile(r'"(\w*(?:layer|block|depth)s?)": ?\[?[\d, ]*?(\d{4,})')


def shapes(folder: Path, files: str) -> Shapes:
    """The shapes of the weights in the files of a pattern, by their names."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob(files):
        with safe_open(file, "numpy") as opened:
            names: list[str] = opened.keys()
            found |= {name: (*opened.get_slice(name).get_shape(),) for name in names}
    return found


def check_layers(file: Path, config: Any) -> None:
    """Raises DataError if a config has so many layers, of more than the weights, as take no end."""
    for name, number in LAYERS.findall(documents.text(config)):
        if int(number) > (count := len(shapes(file.parent, "*.safetensors"))):
            raise DataError(f"{file} has {name} = {number}, and {count:,} weights; correct that.")


def compare(model: "nn.Module", stored: Shapes, prefix: str, fresh: tuple[str, ...]) -> None:
    """Raises ValueError if the weights of a model are not stored ones, or its layers fewer or more.

    Libraries rename weights as they load them, so a name may be missing.

    prefix: of the names of a body, which either may lack. fresh: first words of names of new ones.
    """
    from torch import nn

    there = {name.removeprefix(prefix): shape for name, shape in stored.items()}
    own = {name.removeprefix(prefix): (*t.shape,) for name, t in model.state_dict().items()}
    for name, shape in own.items():
        if there.get(name, shape) != shape and not name.startswith(fresh):
            raise ValueError(
                f"{name} is {[*there[name]]} in its weights, and {[*shape]} by its config"
            )
    if not own.keys() & there.keys():
        raise ValueError("none of its weights is of the model of its config")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = re.compile(re.escape(f"{name.removeprefix(prefix)}.") + r"(\d+)\.")
            has, wants = ({m[1] for n in ns if (m := inside.match(n))} for ns in (there, own))
            if has and has != wants:
                raise ValueError(f"{name} has {len(has)} layers, and {len(wants)} by its config")
