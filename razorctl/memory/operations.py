"""The kernels that CUDA runs for operations of PyTorch.

An operation takes one kernel unless it is named here. Each kernel reads its operands and writes its
results once.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from razorctl.memory.fake_mode import storage_key
from razorctl.memory.trace_cache import KernelWork

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
# Operation -> how many of its first arguments it copies if they are not contiguous.
_CONTIGUOUS = {
    aten.native_layer_norm: 1,
    aten.native_layer_norm_backward: 2,
    aten._softmax: 1,
    aten._softmax_backward_data: 2,
}
# Operations that only copy, of one tensor and of several.
_COPY, _JOIN = {"clone", "_to_copy", "copy_"}, {"cat", "stack"}
TILE = 128  # rows and columns of sums that one program of a product computes, as counted
QUERIES = 128  # fused attention rounds the queries and keys of a head up to a multiple
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward
_COUNTED = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)


def kernels_of(operation: Any, args: Any, kwargs: Any, result: Any) -> list[KernelWork]:
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
    copies = [_pass(t, t) for t in rearranged(packet, args)]
    if packet is aten.convolution:
        return copies + _convolution(args, result)
    if packet is aten.convolution_backward:
        return copies + _convolution_backward(args, result)
    if packet in _PASSES:
        return copies + _PASSES[packet](args, result)
    if packet in (_ATTENTION, ATTENTION_BACKWARD):
        return copies + _attention(packet, args, kwargs, result)
    operations, precision = 0, "fp32"
    product = _LIKE.get(packet, packet)
    if product in flop_registry:
        operations = flop_registry[product](*args, **kwargs, out_val=result)
        precision = _PRECISIONS.get(inputs[0].dtype, "fp32")
    moved = [*_read(operation, args, kwargs), *_written(operation, args, kwargs, outputs)]
    kernel = KernelWork(
        precision, operations, sum(map(bytes_of, moved)), packet.__name__ in _REDUCE
    )
    if operations:
        kernel = kernel._replace(programs=programs(*outputs[0].shape))
    if precision == "int8" and len(inputs) > 1:
        kernel = kernel._replace(terms=inputs[0].shape[-1])
    if packet is aten.native_layer_norm:
        kernel = kernel._replace(op="layer norm", elements=outputs[0].numel())
    if _strided(packet.__name__, args, outputs):
        kernel = kernel._replace(op="strided copy", elements=outputs[0].numel())
    return [*copies, kernel]


def _pass(*tensors: Tensor | None, reduces: bool = False) -> KernelWork:
    """A kernel that reads or writes each of these tensors once."""
    moved = sum(bytes_of(tensor) for tensor in tensors if tensor is not None)
    return KernelWork("fp32", 0, moved, reduces)


_reduction = partial(_pass, reduces=True)


def programs(*shape: int) -> int:
    """The programs that compute a product of this shape, or a batch of them."""
    *batch, rows, columns = shape
    return math.prod(batch) * math.ceil(rows / TILE) * math.ceil(columns / TILE)


def _strided(name: str, args: Any, outputs: list[Tensor]) -> bool:
    """Whether a copy has another order of dimensions in memory, or joins tensors with one."""
    if name in _JOIN:
        return not all(tensor.is_contiguous() for tensor in tensors(args))
    if name not in _COPY:
        return False
    source, copy = tensors(args)[-1], outputs[0]
    at = [axis for axis, size in enumerate(copy.shape) if size > 1]
    orders = (sorted(at, key=tensor.stride, reverse=True) for tensor in (source, copy))
    return source.shape == copy.shape and next(orders) != next(orders)


def _attention(packet: Any, args: Any, kwargs: Any, result: Any) -> list[KernelWork]:
    """Fused attention; its backward pass runs two passes more, and sums dq in single precision."""
    backward = packet is ATTENTION_BACKWARD
    q, k = args[1:3] if backward else args[:2]
    heads, (rows, columns) = math.prod(q.shape[:-2]), (q.shape[-2], k.shape[-2])
    scores = heads * math.prod(QUERIES * math.ceil(size / QUERIES) for size in (rows, columns))
    # Counted as if no score was left out: so kernels compute those beyond a tile's edge.
    counted = flop_registry[_COUNTED[backward]]  # torch 2.11 counts none of a CPU
    operations = counted(*args, **kwargs, out_val=result) * scores // (heads * rows * columns)
    kernel = _pass(*tensors(args), *tensors((result,)))._replace(
        precision=_PRECISIONS.get(q.dtype, "fp32"),
        operations=operations,
        op="attention gradient" if backward else "attention",
        elements=scores,
    )
    if not backward:
        return [kernel]
    sums, dy, out = q.numel() * torch.float32.itemsize, args[0], args[4]
    kernel = kernel._replace(bytes=kernel.bytes + 2 * sums - bytes_of(q) - bytes_of(out))
    return [_reduction(dy, out), kernel, KernelWork("fp32", 0, sums + bytes_of(q))]


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


def rearranged(packet: Any, args: Any) -> list[Tensor]:
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


def bytes_of(tensor: Tensor) -> int:
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
