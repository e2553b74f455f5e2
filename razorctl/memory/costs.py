"""The cost of operations on a GPU: the kernels that run, and their workspace memory.

An operation of PyTorch costs the kernels in `operations`. The cost of an op of razorctl is the sum
over the PyTorch operations in it: the op runs on the meta device, with the same operations as on a
GPU.
"""

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from razorctl.memory.fake_mode import storage_key
from razorctl.memory.operations import (
    ATTENTION_BACKWARD,
    QUERIES,
    bytes_of,
    kernels_of,
    programs,
    rearranged,
    tensors,
)
from razorctl.memory.trace_cache import KernelWork
from razorctl.ops import kernels
from razorctl.ops.op import OPS, Fused

_COLUMNS = 32  # fused attention rounds the columns of a head up to a multiple


class OpCost(NamedTuple):
    """The cost of an operation.

    kernels: how often each runs. workspace: the most bytes beside operands and results.
    """

    kernels: Mapping[KernelWork, int]
    workspace: int


class _Blank(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def cost(operation: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
    """The cost of a call of an operation that returned `result`."""
    if operation.namespace == "razorctl":
        name, dot = operation._schema.name, kernels.assumed_dot()
        values = *args, *kwargs.values()
        if dot is not None and (work := OPS[name].on_card(values)) is not None:
            return _fused(name, work, dot, values, result)
        leaves, tree = tree_flatten((args, kwargs))
        blanks = (
            _Blank(tuple(leaf.shape), leaf.stride(), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        )
        return _inside(name, tuple(blanks), tree)
    return OpCost(Counter(kernels_of(operation, args, kwargs, result)), _workspace(operation, args))


def caller(operation: Any) -> str | None:
    """The field of `Calls` that counts an operation; None for a trace's own."""
    return {"razorctl": "ops", "prim": None}.get(operation.namespace, "aten")


def _fused(name: str, work: Fused, dot: bool, args: Any, result: Any) -> OpCost:
    """The cost of an op of razorctl that fused kernels run."""
    if work.made is not None:
        return _made(name, work, dot, args, result)
    results = sum(map(bytes_of, tensors((result,))))
    moved = sum(map(bytes_of, tensors(args))) + results + work.again
    operations, launches = work.operations, Counter[KernelWork]()
    if not operations:
        first = KernelWork("fp32", 0, moved, work.reduces, own=True, plain=work.plain)
        launches[first._replace(op=_named(name, args), elements=_elements(args, result))] += 1
        if (more := work.launches - 1) > 0:
            launches[KernelWork("fp32", 0, 0, own=True)] += more
        return OpCost(launches, 0)
    in_parts = _in_parts(operations, work.rows, args, moved)
    if not dot:
        return in_parts
    a, b, *_ = tensors(args)
    launches[KernelWork("int8", operations, moved, False, True, *_shared(a, b), results)] += 1
    return OpCost(launches, in_parts.workspace)  # as cuBLAS may turn out faster


def _named(name: str, args: Any) -> str:
    """An op, with the function that it computes, if any, as it is named by its instructions."""
    function = next((value for value in args if isinstance(value, str)), None)
    return " ".join((name.removeprefix("razorctl::"), *filter(None, [function])))


def _elements(args: Any, result: Any) -> int:
    """The elements that a kernel computes: of its largest tensor, or of all of its int8 copies."""
    results = tensors((result,))
    copies = sum(tensor.numel() for tensor in results if tensor.dtype == torch.int8)
    return max(copies, *(tensor.numel() for tensor in (*results, *tensors(args))))


def _made(name: str, work: Fused, dot: bool, args: Any, result: Any) -> OpCost:
    """The cost of an int8 product and of the kernel that computes its operands."""
    assert work.made is not None
    *both, terms = work.made
    with _disable_current_modes():
        operands = [torch.empty(rows, terms, dtype=torch.int8, device="meta") for rows in both]
        scales = [torch.empty(rows, device="meta") for rows in both]
    size = sum(map(bytes_of, (*operands, *scales)))
    rest = _fused(name, replace(work, made=None), dot, (*operands, *scales), result)
    moved = sum(map(bytes_of, tensors(args))) + size
    first = KernelWork("fp32", 0, moved, work.reduces, own=True, op=_named(name, args))
    first = first._replace(elements=sum(both) * terms)
    return OpCost(Counter({first: 1}) + Counter(rest.kernels), rest.workspace + size)


def _shared(a: Tensor, b: Tensor, rows: int | None = None) -> tuple[int, int]:
    """The terms of each sum in a b^T, and the programs that compute `rows` of the product."""
    return a.shape[1], programs(len(a) if rows is None else rows, len(b))


def _in_parts(operations: int, most: int, args: Any, moved: int) -> OpCost:
    """The cost of an int8 product that keeps at most `most` rows as int32 in memory at a time.

    cuBLAS computes each part and reads the whole second operand for it; a kernel scales the part.
    """
    a, b, *_ = tensors(args)
    others, row = moved - bytes_of(a) - bytes_of(b), len(b) * torch.int32.itemsize
    most, launches = min(most, len(a)), Counter[KernelWork]()
    for rows, count in (most, len(a) // most), (len(a) % most, 1):
        if rows:
            operand, product = bytes_of(a) * rows // len(a), rows * row
            part = operations * rows // len(a)
            sizes = *_shared(a, b, rows), product
            launches[
                KernelWork("int8", part, operand + bytes_of(b) + product, False, False, *sizes)
            ] += count
            epilogue = product + others * rows // len(a)
            launches[KernelWork("fp32", 0, epilogue, own=True)] += count
    return OpCost(launches, most * row)


@cache
def _inside(name: str, leaves: tuple[Any, ...], tree: Any) -> OpCost:
    """The cost of an op of razorctl; `leaves` are its flattened arguments."""
    with _disable_current_modes():
        blanks = (
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, _Blank)
            else leaf
            for leaf in leaves
        )
        args, kwargs = tree_unflatten(blanks, tree)
        with _Watch() as watch:
            result = OPS[name].body(*OPS[name].grouped((*args, *kwargs.values())))
        outputs = {storage_key(t): t.untyped_storage().nbytes() for t in tensors((result,))}
    return OpCost(watch.kernels, watch.most - sum(outputs.values()))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and the bytes of the tensors that they create while these are alive.

    now, most: bytes at present, and the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[KernelWork] = Counter()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        storages = {storage_key(tensor) for tensor in tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        self.kernels.update(kernels_of(func, args, kwargs, result))
        for tensor in tensors((result,)):
            if storage_key(tensor) not in storages:
                storage = tensor.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def _workspace(operation: Any, args: Any) -> int:
    """Bytes that PyTorch's CUDA kernels allocate for an operation beside operands and results.

    The backward pass of fused attention allocates the gradient of q in fp32 and one sum per row.
    Other operations allocate contiguous copies of operands.
    """
    if operation.overloadpacket is not ATTENTION_BACKWARD:
        return sum(tensor.nbytes for tensor in rearranged(operation.overloadpacket, args))
    q = args[1]
    batch, heads, queries, columns = q.shape
    rows = batch * heads * QUERIES * math.ceil(queries / QUERIES)
    across = _COLUMNS * math.ceil(columns / _COLUMNS)
    return int(rows * (across + 1) * torch.float32.itemsize)
