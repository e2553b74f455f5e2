"""The compiled kernels in this process, and how tensors are handed to them."""

import ctypes
import logging
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from razorctl.ops.cpu import build
from razorctl.ops.kernels import wanted
from razorctl.ops.packing import GROUP, packed_bytes

log = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # enum dtype of common.h
_NAMES = ("gelu", "gelu-tanh", "silu", "quick-gelu", "hardswish", "relu", "relu6", "leaky-relu")
FUNCTIONS = {name: number for number, name in enumerate((None, *_NAMES))}  # enum function

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float


class Copy(ctypes.Structure):
    """struct copy of common.h, which keeps the tensors that it points to."""

    _fields_ = [
        *((name, _P) for name in ("packed", "zero_point", "scale", "bias")),
        *((name, _L) for name in ("rows", "columns", "tile_rows")),
        ("bits", _I),
    ]

    def __init__(
        self,
        packed: Tensor,
        zero_point: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        bits: int,
        rows: int,
        tile_rows: int,
    ) -> None:
        bias = None if bias is None else bias.detach().float().contiguous()
        self.tensors = packed.contiguous(), zero_point.contiguous(), scale.float().contiguous()
        at = (*(pointer(t) for t in self.tensors), pointer(bias))
        self.bias_tensor = bias
        super().__init__(*at, rows, scale.shape[1], tile_rows, bits)


class Codes(ctypes.Structure):
    """struct codes of gemm.c for a matrix of int8, which it keeps."""

    _fields_ = [("at", _P), *((name, _L) for name in ("rows", "row", "terms", "term"))]

    def __init__(self, codes: Tensor) -> None:
        self.tensor = codes if 1 in codes.stride() else codes.contiguous()
        (rows, terms), (row, term) = self.tensor.shape, self.tensor.stride()
        super().__init__(pointer(self.tensor), rows, row, terms, term)


_C, _M = ctypes.POINTER(Copy), ctypes.POINTER(Codes)
_SIGNATURES = {
    "quantize": (_P, _I, _L, _P, _P, _L, _L, _L, _I, _F, _F, _P, _L, *(_P,) * 4, _I),
    "dequantize": (_C, _I, _P, _I, _I),
    "quantize_images": (_P, _I, _L, _L, _L, _P, _P, _L, _L, _I, _F, _F, *(_P,) * 4, _I),
    "dequantize_images": (_C, _I, _L, _P, _I, _I),
    "activation_grad": (_C, _I, _P, _L, _P, _I, _I),
    "activation_grad_int8": (_C, _I, _P, _L, _I, _P, _P, _P, _I),
    "int8_rows": (_P, _I, _L, _L, _L, _P, _P, _P, _I),
    "int8_heads": (_P, _P, _P, _I, *(_L,) * 7, _P, _P, _P, _I),
    "int8_columns": (_P, _I, _L, _L, _L, _P, _P, _I),
    "balance": (_P, _P, _L, _L, _P, _P, _I),
    "has_int8_gemm": (),
    "int8_gemm": (_M, _M, _P, _P, _P, _P, _P, _I, _I),
    "int8_operand": (_C, _I, _F, _P, _P, _P, _P, _I),
    "scaled": (_P, _L, _L, _P, _P, _P, _P, _P, _I, _I),
    "norm_grad": (_C, _P, _I, _L, _P, _P, _I, _P, _I, _L, *(_P,) * 6, _I),
    "batch_norm_grad": (_C, _P, _I, _L, *(_P,) * 5, _I),
    "slope_bits": (_P, _I, _L, _F, _F, _P, _I),
    "slope_grad": (_P, _I, _L, _L, _L, _P, _F, _F, _P, _I),
    "max_pool": (_P, _I, _L, _P, _I, _P, _P, _P, _I),
    "max_pool_grad": (_P, _I, _L, _P, _P, _I, _P, _I),
    "topk_pack": (_P, _I, _L, _L, _P, _P, _I),
    "topk_unpack": (_P, _P, _L, _I, _P, _I),
}


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
        for name, types in _SIGNATURES.items():
            function = getattr(found, f"razorctl_{name}")
            function.argtypes, function.restype = types, c_int
    except (OSError, AttributeError) as error:
        why = str(error).replace(built.loadable, str(built.path))
        log.warning("the CPU runs ops as PyTorch operations, slower: %s", why)
        return None, f"PyTorch operations: {why}"
    return found, f"fused kernels, {built.why}"


def state() -> str:
    """What the CPU runs ops as, and why."""
    return _loaded()[1]


def call(name: str, *args: object) -> None:
    """Runs a kernel on as many threads as torch runs on. Raises MemoryError if it has none."""
    found = library()
    assert found is not None, "only arguments that `takes` allows reach a kernel"
    if getattr(found, f"razorctl_{name}")(*args, torch.get_num_threads()):
        raise MemoryError(f"no memory for the workspace of {name}")


def pointer(x: Tensor | None) -> int | None:
    """The address of the elements of a tensor."""
    return None if x is None else x.data_ptr()


def takes(*tensors: Tensor | None) -> bool:
    """Whether kernels can read these matrices: of DTYPES, with elements of a row side by side."""
    return library() is not None and all(
        x is None or (x.dtype in DTYPES and x.numel() > 0 and x.stride(-1) == 1 and not x.is_conj())
        for x in tensors
    )


def takes_copy(columns: int, *tensors: Tensor | None) -> bool:
    """`takes`, for ops that want the codes of a row of so many columns packed by themselves."""
    return columns % GROUP == 0 and takes(*tensors)


def empty_copy(
    x: Tensor, rows: int, columns: int, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What kernels fill with a copy as `ops.quantize.quantize` makes it, on the device of `x`."""
    packed = x.new_empty(packed_bytes(rows, columns, bits), dtype=torch.uint8)
    zero_point = x.new_empty(-(-rows // tile_rows), columns, dtype=torch.int16)
    return packed, zero_point, torch.empty_like(zero_point, dtype=torch.bfloat16)


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
