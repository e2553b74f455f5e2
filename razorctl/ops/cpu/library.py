"""The compiled kernels in this process, and calls of them with tensors."""

import ctypes
import logging
import re
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from razorctl.ops.kernels import wanted
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import GROUP
from razorctl.system import c_compiler

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum dtype of common.h


class Copy(ctypes.Structure):
    """struct copy of common.h, with references to the tensors that it points to."""

    _fields_ = [
        ("packed", c_void_p), ("zero_point", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
        ("rows", c_int64), ("columns", c_int64), ("tile_rows", c_int64), ("bits", c_int),
    ]  # fmt: skip

    def __init__(self, copy: FewBitCopy, rows: int) -> None:
        packed, zero_point = copy.packed.contiguous(), copy.zero_point.contiguous()
        scale = copy.scale.float().contiguous()
        bias = None if copy.bias is None else copy.bias.detach().float().contiguous()
        self.tensors = packed, zero_point, scale, bias
        super().__init__(
            packed=packed.data_ptr(), zero_point=zero_point.data_ptr(), scale=scale.data_ptr(),
            bias=None if bias is None else bias.data_ptr(), rows=rows, columns=scale.shape[1],
            tile_rows=copy.tile_rows, bits=copy.bits,
        )  # fmt: skip


class Codes(ctypes.Structure):
    """struct codes of gemm.c for an int8 matrix, with a reference to the matrix."""

    _fields_ = [
        ("at", c_void_p), ("rows", c_int64), ("row_stride", c_int64), ("terms", c_int64),
        ("term_stride", c_int64),
    ]  # fmt: skip

    def __init__(self, codes: Tensor) -> None:
        self.tensor = codes if 1 in codes.stride() else codes.contiguous()
        (rows, terms), (row, term) = self.tensor.shape, self.tensor.stride()
        super().__init__(self.tensor.data_ptr(), rows, row, terms, term)


# Types in C -> types of ctypes; other pointers are addresses.
TYPES: dict[str, Any] = {
    "int": c_int,
    "int64_t": c_int64,
    "float": c_float,
    "struct copy *": ctypes.POINTER(Copy),
    "struct codes *": ctypes.POINTER(Codes),
}
_KERNEL = re.compile(r"^int razorctl_(\w+)\(([^)]*)\)", re.MULTILINE)


def prototypes(source: str) -> dict[str, dict[str, Any]]:
    """Kernel that a C file defines -> its arguments, by name, with their types.

    Raises TypeError for a type that no argument may have.
    """
    return {name: _types(name, declared) for name, declared in _KERNEL.findall(source)}


def _types(name: str, declared: str) -> dict[str, Any]:
    """The arguments that C declares as "const float *x, int64_t rows", with their types."""
    types = {}
    for declaration in [] if declared.strip() == "void" else declared.split(","):
        words = re.sub(r"\bconst\b|\brestrict\b", "", declaration)
        *_, argument = re.findall(r"\w+", words)
        kind = " ".join(words.strip().removesuffix(argument).split())
        if kind not in TYPES and not kind.endswith("*"):
            raise TypeError(
                f"razorctl_{name} takes {kind!r}, but arguments are pointers or {', '.join(TYPES)}"
            )
        types[argument] = TYPES.get(kind, c_void_p)
    return types


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if ops run as PyTorch operations."""
    return _loaded()[0]


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if not wanted():
        return None, "PyTorch operations"
    built = c_compiler.built()
    if built.path is None:
        level = logging.WARNING if built.failed else logging.INFO
        log.log(level, "the CPU runs ops as PyTorch operations, slower: %s", built.why)
        return None, f"PyTorch operations: {built.why}"
    try:
        # torch has loaded its OpenMP runtime; the library uses the same one with its threads.
        kernels = ctypes.CDLL(built.loadable)
        for source in sorted(c_compiler.SOURCES.glob("*.c")):
            for name, types in prototypes(source.read_text("utf-8")).items():
                function = getattr(kernels, f"razorctl_{name}")
                function.argtypes, function.restype = tuple(types.values()), c_int
                function.arguments = tuple(types)[:-1]  # without threads
    except (OSError, AttributeError, TypeError) as error:
        why = str(error).replace(built.loadable, str(built.path))
        log.warning("the CPU runs ops as PyTorch operations, slower: %s", why)
        return None, f"PyTorch operations: {why}"
    return kernels, f"fused kernels, {built.why}"


def state() -> str:
    """How the CPU runs ops, and why, as text."""
    return _loaded()[1]


def call(name: str, /, **args: object) -> None:
    """Runs a kernel on torch's number of threads.

    args: by their names in C, without `threads`; tensors become addresses. Raises MemoryError if
    the kernel cannot allocate, and LookupError if no C file defines it or it has other arguments.
    """
    kernels = library()
    assert kernels is not None, "only arguments that `readable` allows reach a kernel"
    kernel = vars(kernels).get(f"razorctl_{name}")  # ctypes adds functions there at first use
    if kernel is None:
        raise LookupError(f"no file in {c_compiler.SOURCES} defines int razorctl_{name}(...)")
    values = [args[argument] for argument in kernel.arguments]
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
    if kernel(*values, torch.get_num_threads()):
        raise MemoryError(f"no memory for the workspace of {name}")


def readable(*tensors: Tensor | None) -> bool:
    """Whether kernels can read these matrices: in DTYPES, with contiguous rows."""
    return library() is not None and all(
        x is None or (x.dtype in DTYPES and x.numel() > 0 and x.stride(-1) == 1 and not x.is_conj())
        for x in tensors
    )


def readable_with_codes(columns: int, *tensors: Tensor | None) -> bool:
    """`readable`, for ops that need every row of codes to be packed by itself."""
    return columns % GROUP == 0 and readable(*tensors)


def single(x: Tensor | None) -> Tensor | None:
    """A tensor in single precision, contiguous."""
    return None if x is None else x.float().contiguous()


def line_for(packed: Tensor, rows: int, columns: int, bits: int) -> Tensor | None:
    """Memory for unpacked codes if all rows are packed as one line; None if each row is one.

    For codes of 8 bits this is `packed`.
    """
    if columns % GROUP == 0:
        return None
    if bits == 8:
        return packed
    count = rows * columns
    line = packed.new_empty(-(-count // GROUP) * GROUP)
    line[count:] = 0
    return line
