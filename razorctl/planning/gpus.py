"""GPU presets: the memory and the speed of a card, in one TOML file each."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from razorctl.config import presets
from razorctl.config.settings import check_types, read_toml
from razorctl.errors import UsageError
from razorctl.registry import find, unknown

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
ATTENTION = ("flash", "efficient", "math", "cudnn")
# Compute capability -> the shipped preset whose achieved shares serve cards without their own.
MEASURED = {
    "7.0": "v100-16gb",
    "7.5": "rtx-2080-ti",
    "8.0": "a100-80gb",
    "8.6": "rtx-3090",
    "8.9": "rtx-4090",
    "9.0": "h100-80gb",
    "12.0": "rtx-5090",
}
# Cards can run above the boost clock that their rates refer to; a higher share is a mistake.
_MOST = 1.5
# Share of the bandwidth of copies that PyTorch's norms reach. It ported its kernels from APEX. On
# an A100 they reached 0.65 forward and 0.69 backward (NVIDIA/apex pull request 1037: 896 and 953
# GB/s, both passes of the backward one counted).
REDUCES = 0.67
# A box says up to 7 % more than the driver: 16 GB of a T4 are 15,360 MiB, 24 GB of an L4 23,034.
_LABEL = 0.08
_SIZE = re.compile(r"-[0-9]+gb$")  # end of a preset's name, if cards differ only by memory
# PyTorch's builds for CUDA 12.8 and later have no code for chips before Volta, which NVIDIA calls
# GTX 9 and 10, P and M (pytorch/pytorch issue 157517).
OLDEST = (7, 0)
_TOO_OLD = re.compile(r"(9[5-8]0|10[1-8]0)(ti)?|titanxp?|(quadro)?[pm][1-9][0-9]+\w*")
SHORT, LONG = 1024, 4096  # terms of the measured int8 products


@dataclass(frozen=True)
class Achieved:
    """The shares of a card's peaks that published measurements reach.

    Raises UsageError for a share that is not above 0 and at most 1.5.

    Args:
        matrix: share of the rates of matrix products.
        fp32, int8: shares of the fp32 and int8 rates, if they differ from `matrix`; int8 is for
            products of 4,096 terms and more.
        int8_short: share of the int8 rate for products of 1,024 terms and fewer, if it differs.
            Between both, the share is linear in the logarithm of the terms.
        depthwise: share of the fp32 rate that depthwise convolutions reach.
        bandwidth: share of the bandwidth that copies reach.
        reduces: share of the bandwidth that reducing kernels such as norms reach; by default
            `REDUCES` times the share of copies.
        source: who measured the shares.
        borrowed: the card on which they were measured, if another one.
    """

    matrix: float
    bandwidth: float
    source: str
    fp32: float | None = None
    int8: float | None = None
    int8_short: float | None = None
    reduces: float | None = None
    depthwise: float | None = None
    borrowed: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for field in fields(self):
            share = getattr(self, field.name)
            if isinstance(share, int | float) and not 0 < share <= _MOST:
                raise UsageError(
                    f"achieved.{field.name} {share!r} is not a share of a peak; "
                    f"give a number above 0 and up to {_MOST:g}."
                )

    def of(self, work: str) -> float:
        """The share of the rate of a precision, or for "depthwise" of the fp32 rate."""
        share: float | None = getattr(self, work, None)
        return self.matrix if share is None else share

    def of_int8(self, terms: int) -> float:
        """The share of the int8 rate for a product whose sums have this many terms."""
        most = self.of("int8")
        least = most if self.int8_short is None else self.int8_short
        along = math.log(min(max(terms, SHORT), LONG) / SHORT) / math.log(LONG / SHORT)
        return least + (most - least) * along


@dataclass(frozen=True)
class Gpu:
    """A GPU as its preset describes it; raises UsageError for an invalid field.

    Args:
        name, memory_bytes: as the driver reports them.
        compute_capability: such as "8.9".
        bandwidth: bytes per second.
        attention: the kernels of PyTorch's SDPA that it can run, in the order PyTorch tries them.
        source: the vendor's document for these figures.
        rates: precision -> operations per second of dense matrix products with fp32 (int8: int32)
            accumulation. fp32 is always there; a precision without hardware support is not.
        multiprocessors: the number of streaming multiprocessors, over which a kernel's programs are
            spread; by default products are predicted as if they filled the card.
        clock: boost clock in hertz; by default it follows from the fp32 rate.
        bus: bytes per second to the card, and as many back; by default of PCIe 3.0 x16.
        achieved: the shares of these peaks that kernels reach, as an Achieved or a table of its
            fields. By default they are borrowed from the nearest generation that is not newer, and
            `achieved.source` names it.
    """

    name: str
    memory_bytes: int
    compute_capability: str
    bandwidth: float
    attention: tuple[str, ...]
    source: str
    rates: Mapping[str, float]
    achieved: Achieved = None  # type: ignore[assignment]
    multiprocessors: int | None = None
    clock: float | None = None
    bus: float = 15.75e9

    def __post_init__(self) -> None:
        if self.achieved is None:
            object.__setattr__(self, "achieved", _of_generation(str(self.compute_capability)))
        elif not isinstance(self.achieved, Achieved):
            object.__setattr__(self, "achieved", _achieved(self.achieved))
        check_types(self)
        _check_positive("memory_bytes", self.memory_bytes, "bytes")
        _check_positive("bandwidth", self.bandwidth, "bytes per second")
        _check_positive("bus", self.bus, "bytes per second")
        if self.multiprocessors is not None:
            _check_positive("multiprocessors", self.multiprocessors, "their number")
        if self.clock is not None:
            _check_positive("clock", self.clock, "hertz")
        if not re.fullmatch(r"[0-9]+\.[0-9]+", self.compute_capability):
            raise UsageError(
                f"compute_capability {self.compute_capability!r} is not major.minor; "
                'write it like "8.6".'
            )
        _check_names("attention", self.attention, list | tuple, ATTENTION, "math")
        _check_names("rates", self.rates, Mapping, PRECISIONS, "fp32")
        for precision, rate in self.rates.items():
            _check_positive(f"rates.{precision}", rate, "operations per second")
        object.__setattr__(self, "attention", tuple(self.attention))  # TOML has no tuples

    @property
    def multiplies_in_triton(self) -> bool:
        """Whether Triton's products run on its tensor cores."""
        return tuple(map(int, self.compute_capability.split("."))) >= (8, 0)

    def operations_per_second(self, work: str) -> float:
        """The rate that kernels reach in a precision, or for "depthwise" convolutions.

        A precision that the card lacks runs at the fp32 rate.
        """
        unit = work if work in self.rates else "fp32"
        return self.rates[unit] * self.achieved.of("depthwise" if work == "depthwise" else unit)

    def int8_per_second(self, terms: int) -> float:
        """The rate that int8 products with sums of `terms` terms reach."""
        if "int8" not in self.rates:
            return self.operations_per_second("int8")
        return self.rates["int8"] * self.achieved.of_int8(terms)

    @property
    def instructions_per_second(self) -> float:
        """The instructions that it issues, one per lane: 128 per multiprocessor and clock.

        A multiprocessor has 128 units for fp32, or 64 up to capability 8.0.
        """
        if self.clock is not None and self.multiprocessors is not None:
            return 128 * self.multiprocessors * self.clock
        few = tuple(map(int, self.compute_capability.split("."))) <= (8, 0)
        return self.rates["fp32"] / (1 if few else 2)

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth that copies reach, reads and writes together."""
        return self.bandwidth * self.achieved.bandwidth

    @property
    def reduced_per_second(self) -> float:
        """The bandwidth that reducing kernels of PyTorch reach."""
        share = self.achieved.reduces
        return REDUCES * self.bytes_per_second if share is None else self.bandwidth * share

    def filled(self, programs: int) -> float:
        """The share of the card's multiprocessors that this number of equal programs keeps busy."""
        if self.multiprocessors is None or not programs:
            return 1.0
        waves = math.ceil(programs / self.multiprocessors)
        return programs / (waves * self.multiprocessors)


def _achieved(table: Any) -> Achieved:
    """The Achieved of a preset's table; raises UsageError for a missing or unknown field."""
    if not isinstance(table, Mapping):
        raise UsageError(f"achieved {table!r} is not a table; give one, or leave it out.")
    names = [field.name for field in fields(Achieved)]
    for name in table:
        if name not in names:
            raise unknown("field in achieved", name, names)
    for name in _required(Achieved):
        if name not in table:
            raise UsageError(f"achieved lacks {name!r}; add it, or leave the table out.")
    return Achieved(**table)


def _of_generation(compute_capability: str) -> Achieved:
    """The shares of the newest measured generation up to a capability, else of the oldest."""
    version = {capability: tuple(map(int, capability.split("."))) for capability in MEASURED}
    match = re.fullmatch(r"([0-9]+)\.([0-9]+)", compute_capability)
    wanted = (int(match[1]), int(match[2])) if match else (0, 0)
    older = [capability for capability in MEASURED if version[capability] <= wanted]
    nearest = older[-1] if older else next(iter(MEASURED))
    gpu = read_preset(presets.SHIPPED / "gpus" / f"{MEASURED[nearest]}.toml")
    source = f"borrowed from {gpu.name}, capability {nearest}: {gpu.achieved.source}"
    return replace(gpu.achieved, source=source, borrowed=gpu.name)


def _required(settings: type) -> list[str]:
    """The fields of a dataclass without a default."""
    return [field.name for field in fields(settings) if field.default is MISSING]


def _check_positive(field: str, value: object, unit: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{field} {value!r} is not a positive, finite number; give {unit}.")


def _check_names(field: str, value: Any, kind: Any, known: Sequence[str], needed: str) -> None:
    """Raises UsageError unless `value` is a `kind` of known names, each once, and has `needed`."""
    if not isinstance(value, kind):
        form = "table" if kind is Mapping else "list"
        raise UsageError(f"{field} {value!r} is not a {form}; give a {form} with {needed!r} in it.")
    for name in map(str, value):
        if name not in known:
            raise unknown(f"name in {field}", name, known)
    if needed not in value:
        raise UsageError(f"{field} lacks {needed!r}, which every card runs; add it.")
    if len(set(value)) < len(value):
        raise UsageError(f"{field} {value!r} has a name twice; leave one out.")


def names() -> tuple[str, ...]:
    """The names of all GPU presets, shipped and the user's own."""
    return tuple(sorted(presets.files("gpus")))


def load(name: str) -> Gpu:
    """The preset with this name, or in this file if the name ends in .toml.

    A card is also known by its number, such as 4090, and by the driver's name for it. Raises
    UsageError for an unknown name (and suggests the nearest), for a name of several cards, and for
    a file that cannot be read or has a missing, unknown or invalid field.
    """
    if name.endswith(".toml"):
        return read_preset(Path(name))
    files = presets.files("gpus")
    if name in files:
        return read_preset(files[name])
    same = [each for each in files if _plain(name) in (_plain(each), _plain(_SIZE.sub("", each)))]
    same = same or [each for each in files if _plain(name) == _plain(read_preset(files[each]).name)]
    if not same and _TOO_OLD.fullmatch(_plain(name)):
        raise too_old(name)
    if len(same) > 1:
        raise UsageError(f"there is more than one GPU {name!r}; choose {' or '.join(same)}.")
    return read_preset(find("GPU", same[0] if same else name, files))


def too_old(name: str) -> UsageError:
    """The error for a card of a compute capability below OLDEST."""
    return UsageError(
        f"{name} is older than compute capability {OLDEST[0]}.{OLDEST[1]}, and PyTorch's builds "
        "for CUDA 12.8 and later do not run on it; choose another card."
    )


def _plain(name: str) -> str:
    """A card's name without brands and punctuation."""
    letters = re.sub(r"[^a-z0-9]", "", name.casefold())
    return re.sub(r"^(nvidia)?(geforce|tesla)?(rtx|gtx)?", "", letters)


def read_preset(file: Path) -> Gpu:
    """The preset in a file; see `load`."""
    table = read_toml(file)
    names = [field.name for field in fields(Gpu)]
    for name in table:
        if name not in names:
            raise unknown(f"field in {file}", name, names)
    if missing := [name for name in _required(Gpu) if name not in table]:
        raise UsageError(f"{file} lacks {', '.join(missing)}; add them as in the preset t4.")
    try:
        return Gpu(**table)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def memory_size(text: str) -> int:
    """Bytes of a size such as 11GB, 11 or 11264MiB; GB and GiB mean 2^30, as on a card's label.

    Raises UsageError for any other text.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([MG])(?:i?B)?)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is not a size of memory; write one like 11GB or 11264MiB.")
    return round(float(match[1]) * (2**20 if match[2] in ("M", "m") else 2**30))


def usable(size: int, memory_bytes: int) -> int | None:
    """The bytes of a card that a size means; None if the card has less.

    The size on a card's box means all of its memory, though a driver reports less.
    """
    return min(size, memory_bytes) if size <= (1 + _LABEL) * memory_bytes else None
