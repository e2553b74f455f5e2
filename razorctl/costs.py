"""What operations cost on a GPU: the kernels that run, and the memory they take inside themselves.

An operation of PyTorch counts as one kernel. An op of razorctl is looked into: it runs on the meta
device, where it does what it would on a GPU, without values.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from razorctl.traces import Kernel

aten = torch.ops.aten
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
_LIKE = {aten._int_mm: aten.mm}  # products that torch does not count, and what counts alike
# Multiples that fused attention rounds the queries and the columns of a head up to.
_QUERIES, _COLUMNS = 128, 32


class Cost(NamedTuple):
    """kernels: how often each runs. workspace: most bytes at a time beside operands and results."""

    kernels: Mapping[Kernel, int]
    workspace: int


class _Blank(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def cost(operation: Any, args: Any, kwargs: Any, result: Any) -> Cost:
    """What a call of an operation costs, which returned `result`."""
    if operation.namespace == "razorctl":
        leaves, tree = tree_flatten((args, kwargs))
        blanks = (
            _Blank(tuple(leaf.shape), leaf.stride(), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        )
        return _inside(operation._schema.name, tuple(blanks), tree)
    kernel = _kernel(operation, args, kwargs, result)
    return Cost({} if kernel is None else {kernel: 1}, _workspace(operation, args))


@cache
def _inside(name: str, leaves: tuple[Any, ...], tree: Any) -> Cost:
    """Of an op of razorctl by that name."""
    with _disable_current_modes():
        blanks = (
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
            if isinstance(leaf, _Blank)
            else leaf
            for leaf in leaves
        )
        args, kwargs = tree_unflatten(blanks, tree)
        with _Watch() as watch:
            result = OPDEFS[name]._init_fn(*args, **kwargs)
        outputs = {_storage(t): t.untyped_storage().nbytes() for t in _tensors((result,))}
    return Cost(watch.kernels, watch.most - sum(outputs.values()))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and the bytes of the tensors that they make while these live.

    most: the highest number of bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[Kernel] = Counter()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {_storage(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        result = func(*args, **kwargs)
        kernel = _kernel(func, args, kwargs, result)
        if kernel is not None:
            self.kernels[kernel] += 1
        for tensor in _tensors((result,)):
            if _storage(tensor) not in known:
                storage = tensor.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def _kernel(operation: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
    """What an operation does; None if that is nothing, as of a view or an empty tensor."""
    inputs, outputs = _tensors((*args, *kwargs.values())), _tensors((result,))
    if "empty" in operation.name() or operation is aten.detach_.default:
        return None
    known = {_storage(tensor) for tensor in inputs}
    if not operation._schema.is_mutable and all(_storage(tensor) in known for tensor in outputs):
        return None
    operations, precision = 0, "fp32"
    product = _LIKE.get(operation.overloadpacket, operation.overloadpacket)
    if product in flop_registry:
        operations = flop_registry[product](*args, **kwargs, out_val=result)
        precision = _PRECISIONS.get(inputs[0].dtype, "fp32")
    return Kernel(precision, operations, sum(t.nbytes for t in (*inputs, *outputs)))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those among arguments or results, some of which are lists."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _workspace(operation: Any, args: Any) -> int:
    """Bytes that a kernel of PyTorch takes on CUDA for itself, where that depends on its operands.

    Fused attention has the gradient of q in single precision, and of each row a sum.
    """
    if operation is not aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    q = args[1]
    batch, heads, queries, columns = q.shape
    rows = batch * heads * _up(queries, _QUERIES)
    return int(rows * (_up(columns, _COLUMNS) + 1) * torch.float32.itemsize)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
