"""Predicted costs of operations, against what they take when they run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl import ops, registry
from razorctl.memory.costs import OpCost, cost
from razorctl.memory.trace_cache import KernelWork
from razorctl.ops import gemm, kernels
from scripts.bench.passes import allocated_on_cpu
from tests.ops.calls import CALLS, Size, op_of

registry.modules(ops.__name__, ops.__path__)  # each registers its own
ALL = 32 * 197  # so many rows that they are cut into several parts
OWN = torch.ops.razorctl
WIDE = Size(ALL, 1024, 197, 4)
# Where the memory is not that of an activation [rows, columns] with a copy of 4 bits.
SIZES = {
    "quantize": replace(WIDE, bits=2),
    "attention_again": replace(WIDE, rows=64),  # so few tokens that the scores are small
    "linear_cross_entropy": Size(300, 64, dtype=torch.bfloat16),
    "pixel_cross_entropy": Size(320, dtype=torch.bfloat16),
}


def arguments(name: str, of: int = 0) -> tuple[Any, ...]:
    """Arguments as in the schema, of one of the calls in tests/ops/calls.py."""
    args = next(islice(CALLS[name](SIZES.get(name, WIDE)), of, None))
    args = op_of(name).flat(args)
    return tuple(t.contiguous() if isinstance(t, torch.Tensor) else t for t in args)


GEMM = (
    *(torch.ones(ALL, 64, dtype=torch.int8), torch.ones(1024, 64, dtype=torch.int8)),
    *(torch.ones(ALL, 1), torch.ones(1024), torch.bfloat16),
)


def _costs(run: Callable[..., Any], args: Any) -> tuple[list[OpCost], Any]:
    """The costs of the operations of a run on fake copies, as a trace asks; and its result."""
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            found.append(cost(func, args, kwargs or {}, result))
            return result

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        with Watch():
            return found, run(*fake)


@pytest.mark.parametrize("name", CALLS)
def test_an_op_takes_what_it_is_said_to_take(name, as_on_a_gpu):
    args = arguments(name)
    op = op_of(name)

    def run(*args):
        return op.body(*op.grouped(args))

    (said,), result = _costs(getattr(OWN, name), args)
    results = sum(t.untyped_storage().nbytes() for t in tree_leaves(result))
    run(*args)  # what is cached between runs is none of its own
    taken = allocated_on_cpu(lambda: run(*args)) - results
    assert taken <= said.workspace + 4096
    assert said.workspace <= 1.02 * taken + 4096
    assert sum(said.kernels.values()) >= 1


def test_an_int8_product_counts_as_one():
    args = GEMM
    (said,), _ = _costs(OWN.scaled_gemm, args)
    operations = {kernel.precision: 0 for kernel in said.kernels}
    for kernel, count in said.kernels.items():
        operations[kernel.precision] += count * kernel.operations
    assert operations == {"int8": 2 * ALL * 64 * 1024, "fp32": 0}


def test_an_int8_product_says_its_size_and_counts_the_memory_of_the_other_way():
    """On a card either Triton multiplies, or cuBLAS, which needs the int32 product."""
    a, b, *scales = GEMM
    args = a.expand(3, *a.shape).flatten(0, 1), b, *scales
    rows = gemm.part_rows(1024)  # that exist at a time
    product = 4 * 1024 * rows
    with kernels.assumed(dot=True):
        (said,), result = _costs(OWN.scaled_gemm, args)
    (kernel,) = said.kernels
    assert (kernel.terms, kernel.programs) == (64, -(-3 * ALL // 128) * 8)
    assert kernel.written == result.nbytes
    assert rows < len(args[0])
    assert said.workspace == product
    with kernels.assumed(dot=False):
        (said,), _ = _costs(OWN.scaled_gemm, args)
    assert said.workspace == product
    assert not any(kernel.own for kernel in said.kernels if kernel.operations)


@pytest.mark.parametrize(
    ("name", "reduces"),
    [("int8_rows", True), ("quantize", True), ("norm_grad", True), ("dequantize", False)],
)
def test_kernels_of_razorctl_are_its_own_and_say_whether_they_reduce(name, reduces):
    with kernels.assumed(dot=True):
        (said,), _ = _costs(getattr(OWN, name), arguments(name))
    assert all(kernel.own for kernel in said.kernels)
    assert any(kernel.reduces for kernel in said.kernels) == reduces


def test_a_function_counts_for_the_elements_of_its_copy_alone():
    found = []
    for of in (0, 1):  # without and with a function
        with kernels.assumed(dot=True):
            (said,), result = _costs(OWN.linear_operands, arguments("linear_operands", of))
        kernel = max(said.kernels, key=lambda kernel: kernel.elements)
        codes = [tensor.numel() for tensor in result if tensor.dtype == torch.int8]
        found.append((kernel.elements - sum(codes), kernel.plain - codes[0] - codes[2]))
    assert found[1] == (0, 0)
    assert found[0][0] == 0
    assert found[0][1] < 0


def test_a_norm_of_known_statistics_is_one_kernel_and_reads_its_input_once():
    x, *others = arguments("norm_quantize")
    known = torch.zeros(ALL, 1), torch.ones(ALL, 1)
    rows = sum(t.nbytes for t in known)
    with kernels.assumed(dot=True):
        (without,), _ = _costs(OWN.norm_quantize, (x, *others))
        (said,), _ = _costs(OWN.norm_quantize, (x, *others, *known))
    assert sum(without.kernels.values()) == 2
    (kernel,) = said.kernels.elements()
    # The statistics are read, and 1 / std is not written.
    assert kernel.bytes == max(k.bytes for k in without.kernels) - x.nbytes + rows - rows // 2


def test_a_view_costs_nothing_and_a_product_its_operations():
    a, b = torch.zeros(4, 6), torch.zeros(6, 8, dtype=torch.float32)
    aten = torch.ops.aten
    assert cost(aten.t.default, (a,), {}, a.t()) == ({}, 0)
    product = KernelWork("fp32", 2 * 4 * 6 * 8, 4 * (24 + 48 + 32), programs=1)
    assert cost(aten.mm.default, (a, b), {}, a @ b) == ({product: 1}, 0)


ATEN = torch.ops.aten
CONV = [[1, 1], [1, 1], [1, 1], False, [0, 0]]  # stride, padding, dilation, transposed, its padding
# Of [2, 8, 6, 6] images, bytes in single precision.
X = 4 * 2 * 8 * 36
ROW, TABLE, EIGHT = torch.zeros(4, 8), torch.zeros(1000, 8), torch.zeros(8)
LISTS = [EIGHT, torch.zeros(4)], [EIGHT, torch.zeros(4)]
IMAGES, WEIGHT = torch.zeros(2, 8, 6, 6), torch.zeros(8, 8, 3, 3)
HALF, DEPTHWISE = IMAGES.half(), torch.zeros(8, 1, 3, 3).half()
LAST = HALF.to(memory_format=torch.channels_last)
OF_NORM = ROW, ROW, [8], torch.zeros(4, 1), torch.zeros(4, 1), EIGHT, EIGHT
LAYER_NORM, CONVOLUTION = ATEN.native_layer_norm, ATEN.convolution
STATISTICS = (None, None, EIGHT, EIGHT), (None, None, None, None)
# An operation, its arguments, what its kernels move, in bytes, and how many of them reduce.
KERNELS: dict[str, tuple[Any, tuple[Any, ...], list[int], int]] = {
    "sums in place": (ATEN.add_.Tensor, (EIGHT, EIGHT), [3 * 32], 0),
    "copies read their source alone": (ATEN.copy_.default, (EIGHT, EIGHT.half()), [32 + 16], 0),
    "filling reads nothing": (ATEN.zero_.default, (EIGHT,), [32], 0),
    "nor does what is like another": (ATEN.zeros_like.default, (EIGHT,), [32], 0),
    "updates of lists are written": (ATEN._foreach_add_.List, LISTS, [3 * 48], 0),
    "an expanded operand is small": (
        *(ATEN.add.Tensor, (ROW, EIGHT.expand(4, 8)), [2 * 128 + 32], 0),
    ),
    "of a table the rows that are looked up": (
        *(ATEN.embedding.default, (TABLE, torch.zeros(3).long()), [3 * 8 + 2 * 3 * 32], 0),
    ),
    "batch norm in training": (
        *(ATEN.native_batch_norm.default, (IMAGES, *STATISTICS[1], True, 0.1, 1e-5)),
        *([X, 2 * X], 1),
    ),
    "batch norm in evaluation": (
        *(ATEN.native_batch_norm.default, (IMAGES, *STATISTICS[0], False, 0.1, 1e-5)),
        *([2 * X], 0),
    ),
    "gradients of a layer norm": (
        *(ATEN.native_layer_norm_backward.default, (*OF_NORM, [True, True, True])),
        *([2 * 128 + 2 * 32, 3 * 128], 2),
    ),
    "the gradient of a frozen layer norm": (
        *(ATEN.native_layer_norm_backward.default, (*OF_NORM, [True, False, False])),
        *([3 * 128], 1),
    ),
    "a layer norm of columns copies them": (
        *(LAYER_NORM.default, (torch.zeros(8, 4).t(), [8], None, None, 1e-5)),
        *([2 * 128, 2 * 128 + 32], 0),
    ),
    "convolution in half, channels first": (
        *(CONVOLUTION.default, (HALF, WEIGHT.half(), None, *CONV, 1)),
        *([X // 2 * 2, X // 2 * 2, 2 * 1152, X + 1152], 0),
    ),
    "convolution in half, channels last": (
        *(CONVOLUTION.default, (LAST, WEIGHT.half(), None, *CONV, 1), [X + 1152], 0),
    ),
    "convolution in single precision": (
        *(CONVOLUTION.default, (IMAGES, WEIGHT, None, *CONV, 1), [2 * X + 2304], 0),
    ),
    "gradients of a depthwise convolution": (
        *(ATEN.convolution_backward.default, (HALF, HALF, DEPTHWISE, [8], *CONV, 8, [True] * 3)),
        *([X + 144, X + 144, X // 2 + 16], 1),  # that of the bias
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_that_kernels_move_and_how_many_reduce(name):
    operation, arguments, moved, reduce = KERNELS[name]
    with FakeTensorMode() as mode:
        args = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        kernels = cost(operation, args, {}, operation(*args)).kernels
    assert sorted(kernel.bytes for kernel in kernels.elements()) == sorted(moved)
    assert sum(count for kernel, count in kernels.items() if kernel.reduces) == reduce


@pytest.mark.parametrize(
    ("copy", "elements"),
    [
        (lambda x: x.clone(), 0),
        (lambda x: x.t().contiguous(), 60),
        (lambda x: x[:, :5].contiguous(), 0),
        (lambda x: torch.stack([x, x]), 0),
        (lambda x: torch.cat([x.t(), x.t()]), 120),
    ],
)
def test_a_copy_in_another_order_counts_its_elements(copy, elements):
    *_, said = _costs(copy, [torch.zeros(6, 10)])[0]
    assert [kernel.elements for kernel in said.kernels] == [elements]


def test_an_op_says_what_it_computes_and_how_much_of_it():
    with kernels.assumed(dot=True):
        for name, op in ("activation_grad_int8", "activation_grad_int8 silu"), ("norm_grad",) * 2:
            (said,), _ = _costs(getattr(OWN, name), arguments(name))
            first = max(said.kernels, key=lambda kernel: kernel.bytes)
            assert (first.op, first.elements) == (op, ALL * 1024)


def test_fused_adamw_writes_no_gradient():
    def update(*tensors):
        lists = [[tensor] for tensor in tensors]
        settings = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_(*lists[:4], [], lists[4], **settings, amsgrad=False, maximize=False)

    (said,), _ = _costs(update, [*(torch.zeros(8) for _ in range(4)), torch.zeros(())])
    assert [kernel.bytes for kernel in said.kernels] == [4 * 32 + 3 * 32 + 4]


@pytest.mark.parametrize(
    ("groups", "dtype", "precision"),
    [(1, torch.float16, "fp16"), (1, torch.float32, "tf32"), (8, torch.float16, "depthwise")],
)
def test_each_gradient_of_a_convolution_takes_its_operations(groups, dtype, precision):
    x = torch.zeros(2, 8, 6, 6, dtype=dtype, requires_grad=True)
    weight = torch.zeros(8, 8 // groups, 3, 3, dtype=dtype, requires_grad=True)
    convolve = torch.nn.functional.conv2d
    costs, _ = _costs(
        lambda x, w: convolve(x, w, padding=1, groups=groups).sum().backward(), [x, weight]
    )
    products = [k for said in costs for k in said.kernels.elements() if k.operations]
    assert [(k.precision, k.operations) for k in products] == [
        (precision, 2 * 2 * 8 * 36 * 9 * 8 // groups)
    ] * 3


def test_what_is_made_contiguous_inside_takes_memory():
    x = torch.zeros(8, 4).t()
    layer_norm = ATEN.native_layer_norm.default
    assert cost(layer_norm, (x, [8]), {}, layer_norm(x, [8], None, None, 1e-5)).workspace == 128
    x = x.contiguous()
    assert cost(layer_norm, (x, [8]), {}, layer_norm(x, [8], None, None, 1e-5)).workspace == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_takes_a_gradient_in_single_precision(dtype):
    q = torch.zeros(2, 3, 197, 72, dtype=dtype, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    costs, _ = _costs(lambda q: attend(q, q, q).sum().backward(), [q])
    assert max(said.workspace for said in costs) == 4 * 2 * 3 * 256 * (96 + 1)
