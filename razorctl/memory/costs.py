"""The cost of operations on a GPU: the kernels that run, and their workspace memory.

An operation of PyTorch costs the kernels that CUDA runs for it, usually one. Each kernel reads its
operands and writes its results once. The cost of an op of razorctl is the sum over the PyTorch
operations in it: the op runs on the meta device, with the same operations as on a GPU.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from razorctl.memory.fake_mode import storage_key
from razorctl.memory.trace_cache import KernelWork
from razorctl.ops import kernels
from razorctl.ops.op import OPS, Fused

aten = torch.ops.aten
_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
_LIKE = {aten._int_mm: aten.mm}  # products that torch does not count -> a product that it does
# Operations that write their result and do not read their arguments.
_CREATE = {
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "zero_", "fill_", "_foreach_zero_"),
}
# Operations whose kernels reduce, at a lower bandwidth than copies. Forward norms and softmax are
# not among them: at the rate of copies their traffic fits timm's inference rates best.
_REDUCE = {
    *("_fused_rms_norm_backward", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "_foreach_norm"),
}
TILE = 128  # rows and columns of sums that one program of an int8 product computes, as counted
# Operation -> how many of its first arguments it copies if they are not contiguous.
_CONTIGUOUS = {
    aten.native_layer_norm: 1,
    aten.native_layer_norm_backward: 2,
    aten._softmax: 1,
    aten._softmax_backward_data: 2,
}
# Fused attention rounds the queries and the columns of a head up to multiples of these.
_QUERIES, _COLUMNS = 128, 32


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
            return _fused(work, dot, values, result)
        leaves, tree = tree_flatten((args, kwargs))
        blanks = (
            _Blank(tuple(leaf.shape), leaf.stride(), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        )
        return _inside(name, tuple(blanks), tree)
    return OpCost(Counter(_kernels(operation, args, kwargs, result)), _workspace(operation, args))


def caller(operation: Any) -> str | None:
    """The field of `Calls` that counts an operation; None for a trace's own."""
    return {"razorctl": "ops", "prim": None}.get(operation.namespace, "aten")


def _fused(work: Fused, dot: bool, args: Any, result: Any) -> OpCost:
    """The cost of an op of razorctl that fused kernels run."""
    if work.made is not None:
        return _made(work, dot, args, result)
    results = sum(map(_bytes, tensors((result,))))
    moved = sum(map(_bytes, tensors(args))) + results + work.again
    operations, launches = work.operations, Counter[KernelWork]()
    if not operations:
        launches[KernelWork("fp32", 0, moved, work.reduces, own=True)] += 1
        if (more := work.launches - 1) > 0:
            launches[KernelWork("fp32", 0, 0, own=True)] += more
        return OpCost(launches, 0)
    in_parts = _in_parts(operations, work.rows, args, moved)
    if not dot:
        return in_parts
    a, b, *_ = tensors(args)
    launches[KernelWork("int8", operations, moved, False, True, *_shared(a, b), results)] += 1
    return OpCost(launches, in_parts.workspace)  # as cuBLAS may turn out faster


def _made(work: Fused, dot: bool, args: Any, result: Any) -> OpCost:
    """The cost of an int8 product and of the kernel that computes its operands."""
    assert work.made is not None
    *both, terms = work.made
    with _disable_current_modes():
        operands = [torch.empty(rows, terms, dtype=torch.int8, device="meta") for rows in both]
        scales = [torch.empty(rows, device="meta") for rows in both]
    size = sum(map(_bytes, (*operands, *scales)))
    rest = _fused(replace(work, made=None), dot, (*operands, *scales), result)
    moved = sum(map(_bytes, tensors(args))) + size
    first = Counter({KernelWork("fp32", 0, moved, work.reduces, own=True): 1})
    return OpCost(first + Counter(rest.kernels), rest.workspace + size)


def _shared(a: Tensor, b: Tensor, rows: int | None = None) -> tuple[int, int]:
    """The terms of each sum in a b^T, and the programs that compute `rows` of the product."""
    sides = math.ceil((len(a) if rows is None else rows) / TILE), math.ceil(len(b) / TILE)
    return a.shape[1], math.prod(sides)


def _in_parts(operations: int, most: int, args: Any, moved: int) -> OpCost:
    """The cost of an int8 product that keeps at most `most` rows as int32 in memory at a time.

    cuBLAS computes each part and reads the whole second operand for it; a kernel scales the part.
    """
    a, b, *_ = tensors(args)
    others, row = moved - _bytes(a) - _bytes(b), len(b) * torch.int32.itemsize
    most, launches = min(most, len(a)), Counter[KernelWork]()
    for rows, count in (most, len(a) // most), (len(a) % most, 1):
        if rows:
            operand, product = _bytes(a) * rows // len(a), rows * row
            part = operations * rows // len(a)
            sizes = *_shared(a, b, rows), product
            launches[
                KernelWork("int8", part, operand + _bytes(b) + product, False, False, *sizes)
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
        self.kernels.update(_kernels(func, args, kwargs, result))
        for tensor in tensors((result,)):
            if storage_key(tensor) not in storages:
                storage = tensor.untyped_storage()
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def _kernels(operation: Any, args: Any, kwargs: Any, result: Any) -> list[KernelWork]:
    """The kernels that CUDA runs for an operation; none for a view or an empty tensor."""
    inputs, outputs = tensors((*args, *kwargs.values())), tensors((result,))
    if "empty" in operation.name() or operation is aten.detach_.default:
        return []
    if outputs and not any(tensor.numel() for tensor in outputs):
        return []
    storages = {storage_key(tensor) for tensor in inputs}
    if not operation._schema.is_mutable and all(storage_key(t) in storages for t in outputs):
        return []
    packet = operation.overloadpacket
    copies = [_pass(t, t) for t in _rearranged(packet, args)]
    if packet is aten.convolution:
        return copies + _convolution(args, result)
    if packet is aten.convolution_backward:
        return copies + _convolution_backward(args, result)
    if packet in _PASSES:
        return copies + _PASSES[packet](args, result)
    operations, precision = 0, "fp32"
    product = _LIKE.get(packet, packet)
    if product in flop_registry:
        operations = flop_registry[product](*args, **kwargs, out_val=result)
        precision = _PRECISIONS.get(inputs[0].dtype, "fp32")
    moved = [*_read(operation, args, kwargs), *_written(operation, args, kwargs, outputs)]
    kernel = KernelWork(precision, operations, sum(map(_bytes, moved)), packet.__name__ in _REDUCE)
    if precision == "int8" and len(inputs) > 1:
        a, b = inputs[:2]
        kernel = kernel._replace(terms=a.shape[-1], programs=_shared(a, b.t())[1])
    return [*copies, kernel]


def _pass(*tensors: Tensor | None, reduces: bool = False) -> KernelWork:
    """A kernel that reads or writes each of these tensors once."""
    moved = sum(_bytes(tensor) for tensor in tensors if tensor is not None)
    return KernelWork("fp32", 0, moved, reduces)


_reduction = partial(_pass, reduces=True)


def _statistics(args: Any, result: Any) -> list[KernelWork]:
    """Batch and group norm: one pass over the input for its moments, one to normalize it."""
    return [_reduction(args[0]), _pass(args[0], result[0])]


def _batch_norm(args: Any, result: Any) -> list[KernelWork]:
    training = args[5]
    return _statistics(args, result) if training else [_pass(args[0], result[0])]


def _statistics_backward(args: Any, result: Any) -> list[KernelWork]:
    """One pass over input and gradient for their sums; a second one for the input's gradient."""
    sums, dx = _reduction(*args[:2]), result[0]
    return [sums] if dx is None else [sums, _pass(*args[:2], dx)]


def _layer_norm_backward(args: Any, result: Any) -> list[KernelWork]:
    """One kernel for the gradient of the input, one for the gradients of weight and bias."""
    dx, *others = result
    kernels = [] if dx is None else [_reduction(*args[:2], dx)]
    if any(t is not None for t in others):
        kernels.append(_reduction(*args[:2], *others))
    return kernels


_PASSES: dict[Any, Callable[[Any, Any], list[KernelWork]]] = {
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit: _batch_norm,
    aten.native_batch_norm_backward: _statistics_backward,
    aten.native_group_norm: _statistics,
    aten.native_group_norm_backward: _statistics_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
    # An embedding reads the rows that are looked up, not the whole table.
    aten.embedding: lambda args, rows: [_pass(args[1], rows, rows)],
}


def _convolution(args: Any, result: Tensor) -> list[KernelWork]:
    """A convolution, with the copies that cuDNN makes for its tensor cores."""
    x, weight, bias = args[:3]
    kernel = _product(args, x, weight, result, (x, weight, bias, result))
    return [*_transposed(args, x, weight, (x, weight, result)), kernel]


def _convolution_backward(args: Any, result: Any) -> list[KernelWork]:
    """The gradients of input, weight and bias; the kernel of each reads the output's gradient."""
    dy, x, weight = args[:3]
    dx, dweight, dbias = result
    shape = args[1:3] + args[3:]  # as the convolution's arguments, with the bias's size as bias
    kernels: list[KernelWork] = []
    for operand, gradient in ((weight, dx), (x, dweight)):
        if gradient is not None:
            kernels += _transposed(shape, x, weight, (dy, operand, gradient))
            kernels.append(_product(shape, x, weight, dy, (dy, operand, gradient)))
    return kernels if dbias is None else [*kernels, _reduction(dy, dbias)]


def _product(
    args: Any, x: Tensor, weight: Tensor, y: Tensor, moved: tuple[Tensor | None, ...]
) -> KernelWork:
    """The product in a convolution or in a gradient of it; each takes as many operations."""
    transposed = args[6]
    operations = 2 * (x if transposed else y).numel() * weight[0].numel()
    precision = _PRECISIONS.get(x.dtype, "tf32")  # PyTorch allows cuDNN to use it by default
    if _depthwise(args, x):
        precision = "depthwise"  # these do not run on tensor cores
    return KernelWork(precision, operations, _pass(*moved).bytes)


def _transposed(
    args: Any, x: Tensor, weight: Tensor, tensors: tuple[Tensor, ...]
) -> list[KernelWork]:
    """The copies that cuDNN makes of channels-first tensors for half-precision tensor cores."""
    last = any(
        t.dim() == 4
        and t.is_contiguous(memory_format=torch.channels_last)
        and not t.is_contiguous()
        for t in (x, weight)
    )
    if last or x.dtype not in _PRECISIONS or _depthwise(args, x):
        return []
    return [_pass(t, t) for t in tensors]


def _depthwise(args: Any, x: Tensor) -> bool:
    groups: int = args[8]
    return 1 < groups == x.shape[1]


def _rearranged(packet: Any, args: Any) -> list[Tensor]:
    """The operands that an operation copies because they are not contiguous."""
    return [t for t in tensors(args[: _CONTIGUOUS.get(packet, 0)]) if not t.is_contiguous()]


def _read(operation: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that the operation reads."""
    packet = operation.overloadpacket
    if packet.__name__ in _CREATE:
        return []
    if packet is aten.copy_:
        args = args[1:]  # the first is only written
    return tensors((*args, *kwargs.values()))


def _written(operation: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Tensor]:
    """The results of an operation, and the arguments that it changes in place."""
    values = dict(zip((a.name for a in operation._schema.arguments), args, strict=False)) | kwargs
    changed = [
        values.get(argument.name)
        for argument in operation._schema.arguments
        # Fused optimizers write gradients only to undo a loss scale.
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and argument.name != "grads"
    ]
    in_place = tensors(changed)
    storages = {storage_key(tensor) for tensor in in_place}
    return [*in_place, *(tensor for tensor in outputs if storage_key(tensor) not in storages)]


def _bytes(tensor: Tensor) -> int:
    """Bytes of the elements in memory; an expanded tensor stores repeated elements once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in sizes if stride or not size)


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, including those in lists and tuples."""
    leaves: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            leaves.append(value)
        elif isinstance(value, list | tuple):
            leaves += tensors(value)
    return leaves


def _workspace(operation: Any, args: Any) -> int:
    """Bytes that PyTorch's CUDA kernels allocate for an operation beside operands and results.

    The backward pass of fused attention allocates the gradient of q in fp32 and one sum per row.
    Other operations allocate contiguous copies of operands.
    """
    if operation is not aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return sum(tensor.nbytes for tensor in _rearranged(operation.overloadpacket, args))
    q = args[1]
    batch, heads, queries, columns = q.shape
    rows = batch * heads * _up(queries, _QUERIES)
    return int(rows * (_up(columns, _COLUMNS) + 1) * torch.float32.itemsize)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
