"""Files of named tensors in the format of safetensors, written a tensor at a time.

The library writes only to a path, and a full disk raises an error of another class. Here the caller
opens the file, and the error is an OSError.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from razorctl.system import documents

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
ALIGN = 8  # bytes; spaces after the header align the data


def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors of any device to an open file; a tensor with several names is written once.

    The metadata map its other names to the written one, as `safetensors.torch.save_model` does.
    """
    names: dict[object, str] = {}
    metadata, header, end = {"format": "pt"}, dict[str, object](), 0
    for name, tensor in tensors.items():
        first = names.setdefault(_place(tensor, name), name)
        if first != name:
            metadata[name] = first
            continue
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = documents.text({"__metadata__": metadata} | header).encode()
    text += b" " * (-len(text) % ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, each under all its names."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        aliases = file.metadata() or {}
    return tensors | {name: tensors[to] for name, to in aliases.items() if to in tensors}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of `tensors` in a file, without its header."""
    return sum({_place(t, name): t.nbytes for name, t in tensors.items()}.values())


def _place(tensor: Tensor, name: str) -> object:
    """A key that names of the same tensor share; an empty tensor has no memory, and shares none."""
    if not tensor.numel():
        return name
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
