"""GPU presets: what a card can hold and how fast it is, a TOML file a card."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from razorctl.registry import find

_PACKAGE = Path(__file__).parent
# In the wheel the presets lie inside the package, in a checkout beside it.
PRESETS = next(p for p in (_PACKAGE / "presets", _PACKAGE.parent / "presets") if p.is_dir())


@dataclass(frozen=True)
class Gpu:
    """A GPU as its preset describes it.

    memory_bytes: as the driver reports it. compute_capability: such as "8.9".
    bandwidth: bytes per second. rates: precision -> operations per second of dense matrix
    products with fp32 (int8: int32) accumulation; what the card has no unit for is not there.
    source: the vendor's document for these figures.
    """

    name: str
    memory_bytes: int
    compute_capability: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str


def _files() -> dict[str, Path]:
    return {file.stem: file for file in (PRESETS / "gpus").glob("*.toml")}


def names() -> tuple[str, ...]:
    """The GPUs that have a preset."""
    return tuple(sorted(_files()))


def load(name: str) -> Gpu:
    """The preset of that name; raises UsageError with the nearest one if there is none."""
    return Gpu(**tomllib.loads(find("GPU", name, _files()).read_text()))
