"""The compiled kernels in this process, and how tensors are handed to them."""

import ctypes
import logging
import re
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from razorctl.ops.cpu import build
from razorctl.ops.kernels import wanted
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import GROUP

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum dtype of common.h


class Copy(ctypes.Structure):
    """struct copy of common.h for a copy of so many rows, which keeps what it points to."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "zero_point", "scale", "bias")),
        *((name, c_int64) for name in ("rows", "columns", "tile_rows")),
        ("bits", c_int),
    ]

    def __init__(self, copy: FewBitCopy, rows: int) -> None:
        packed, zero_point, scale, bits, tile_rows, bias = copy
        bias = None if bias is None else bias.detach().float().contiguous()
        packed, zero_point = packed.contiguous(), zero_point.contiguous()
        columns, scale = scale.shape[1], scale.float().contiguous()
        self.tensors = packed, zero_point, scale, bias
        at = packed.data_ptr(), zero_point.data_ptr(), scale.data_ptr()
        added = None if bias is None else bias.data_ptr()
        super().__init__(*at, added, rows, columns, tile_rows, bits)


class Codes(ctypes.Structure):
    """struct codes of gemm.c for a matrix of int8, which it keeps."""

    _fields_ = [
        ("at", c_void_p),
        *((name, c_int64) for name in ("rows", "row_stride", "terms", "term_stride")),
    ]

    def __init__(self, codes: Tensor) -> None:
        self.tensor = codes if 1 in codes.stride() else codes.contiguous()
        (rows, terms), (row, term) = self.tensor.shape, self.tensor.stride()
        super().__init__(self.tensor.data_ptr(), rows, row, terms, term)


# What arguments of kernels are handed over as, by their types in C; other pointers are addresses.
TYPES: dict[str, Any] = {
    "int": c_int,
    "int64_t": c_int64,
    "float": c_float,
    "struct copy *": ctypes.POINTER(Copy),
    "struct codes *": ctypes.POINTER(Codes),
}
_KERNEL = re.compile(r"^int razorctl_(\w+)\(([^)]*)\)", re.MULTILINE)


def prototypes(source: str) -> dict[str, tuple[Any, ...]]:
    """Kernel -> the types of its arguments, of those that a C file defines.

    Raises TypeError for a type that no argument may have.
    """
    return {name: _types(name, given) for name, given in _KERNEL.findall(source)}


def _types(name: str, given: str) -> tuple[Any, ...]:
    """The types of arguments as C declares them: "const float *x, int64_t rows"."""
    found = []
    for one in [] if given.strip() == "void" else given.split(","):
        kind = re.sub(r"\bconst\b|\brestrict\b|\w+\s*$", "", one)
        kind = " ".join(kind.split())
        if kind not in TYPES and not kind.endswith("*"):
            known = ", ".join(TYPES)
            raise TypeError(
                f"razorctl_{name} takes {kind!r}, but arguments are pointers or {known}"
            )
        found.append(TYPES.get(kind, c_void_p))
    return tuple(found)


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where ops run as PyTorch operations."""
    return _loaded()[0]


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if not wanted():
        return None, "PyTorch operations"
    built = build.built()
    if built.path is None:
        level = logging.WARNING if built.failed else logging.INFO
        log.log(level, "the CPU runs ops as PyTorch operations, slower: %s", built.why)
        return None, f"PyTorch operations: {built.why}"
    try:
        # torch has loaded its OpenMP runtime; the library takes the same, and so its threads.
        found = ctypes.CDLL(built.loadable)
        for source in sorted(build.SOURCES.glob("*.c")):
            for name, types in prototypes(source.read_text("utf-8")).items():
                function = getattr(found, f"razorctl_{name}")
                function.argtypes, function.restype = types, c_int
    except (OSError, AttributeError, TypeError) as error:
        why = str(error).replace(built.loadable, str(built.path))
        log.warning("the CPU runs ops as PyTorch operations, slower: %s", why)
        return None, f"PyTorch operations: {why}"
    return found, f"fused kernels, {built.why}"


def state() -> str:
    """What the CPU runs ops as, and why."""
    return _loaded()[1]


def call(name: str, *args: object) -> None:
    """Runs a kernel on as many threads as torch runs on; it gets the addresses of tensors.

    Raises MemoryError if it has no memory, and LookupError if no C file defines it.
    """
    found = library()
    assert found is not None, "only arguments that `readable` allows reach a kernel"
    kernel = vars(found).get(f"razorctl_{name}")  # where ctypes keeps those that have types
    if kernel is None:
        raise LookupError(f"no file in {build.SOURCES} defines int razorctl_{name}(...)")
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
    if kernel(*given, torch.get_num_threads()):
        raise MemoryError(f"no memory for the workspace of {name}")


def readable(*tensors: Tensor | None) -> bool:
    """Whether kernels can read these matrices: of DTYPES, with elements of a row side by side."""
    return library() is not None and all(
        x is None or (x.dtype in DTYPES and x.numel() > 0 and x.stride(-1) == 1 and not x.is_conj())
        for x in tensors
    )


def readable_with_codes(columns: int, *tensors: Tensor | None) -> bool:
    """`readable`, for ops that want the codes of a row of so many columns packed by themselves."""
    return columns % GROUP == 0 and readable(*tensors)


def single(x: Tensor | None) -> Tensor | None:
    """A tensor in single precision, its elements side by side."""
    return None if x is None else x.float().contiguous()


def line_for(packed: Tensor, rows: int, columns: int, bits: int) -> Tensor | None:
    """Where kernels keep codes that are packed as one line; None if each row is by itself.

    Codes of 8 bits are kept where they stay.
    """
    if columns % GROUP == 0 or bits == 8:
        return None if columns % GROUP == 0 else packed
    count = rows * columns
    line = packed.new_empty(-(-count // GROUP) * GROUP)
    line[count:] = 0
    return line
