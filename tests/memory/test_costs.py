"""Predicted costs of operations, against what they take when they run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl import ops, registry
from razorctl.memory.costs import OpCost, cost
from razorctl.memory.trace_cache import KernelWork
from razorctl.ops import gemm, kernels, topk
from razorctl.ops.op import OPS, FewBitCopy
from razorctl.ops.packing import packed_bytes
from scripts.bench.passes import allocated_on_cpu

registry.modules(ops.__name__, ops.__path__)  # each registers its own
ROWS = (32, 197)  # so that they are cut into several parts
ALL = ROWS[0] * ROWS[1]
WIDE = (ALL, 1024)
OWN = torch.ops.razorctl


def _copy(bits: int, bias: bool = False) -> FewBitCopy:
    """A few-bit copy of WIDE."""
    packed = torch.zeros(packed_bytes(ALL, 1024, bits), dtype=torch.uint8)
    zero_point, scale = torch.zeros(32, 1024, dtype=torch.int16), torch.ones(32, 1024)
    return FewBitCopy(packed, zero_point, scale, bits, 197, torch.ones(1024) if bias else None)


def _images(bias: bool = False) -> FewBitCopy:
    """A few-bit copy of images [16, 200, 40, 40]."""
    packed = torch.zeros(packed_bytes(25_600, 200, 4), dtype=torch.uint8)
    zero_point, scale = torch.zeros(100, 200, dtype=torch.int16), torch.ones(100, 200)
    return FewBitCopy(packed, zero_point, scale, 4, 256, torch.ones(200) if bias else None)


def _bitmap() -> torch.Tensor:
    return topk.pack_bits(torch.ones(torch.Size(WIDE).numel(), dtype=torch.bool))


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "topk_pack": lambda: (torch.randn(WIDE), 600_000),
    "topk_unpack": lambda: (torch.randn(torch.Size(WIDE).numel()), _bitmap(), list(WIDE)),
    "quantize": lambda: (torch.randn(WIDE), 2, 197),
    "dequantize": lambda: (*_copy(6, bias=True), ALL, torch.bfloat16),
    "quantize_images": lambda: (torch.randn(16, 200, 40, 40), 4, 256),
    "dequantize_images": lambda: (
        *_images(bias=True),
        *(torch.float32, None, [16, 200, 40, 40]),
    ),
    "batch_norm_grad": lambda: (
        torch.randn(16, 200, 40, 40),
        *_images(),
        *(torch.ones(200), torch.ones(200)),
    ),
    "slope_bits": lambda: (torch.randn(ALL * 1024), 0.0, 6.0),
    "slope_grad": lambda: (torch.randn(ALL * 1024), _bitmap(), 1.0, 0.0),
    "max_pool": lambda: (torch.randn(8, 64, 41, 41), [3, 3, 2, 2, 0, 0, 1, 1], True),
    "max_pool_grad": lambda: (
        torch.randn(8, 64, 20, 20),
        torch.zeros(packed_bytes(512, 400, 4), dtype=torch.uint8),
        *([8, 64, 41, 41], [3, 3, 2, 2, 0, 0, 1, 1], True),
    ),
    "int8_rows": lambda: (torch.randn(ALL, 1024),),
    "int8_heads": lambda: tuple(torch.randn(3, 2, 4, ALL, 32)),
    "int8_columns": lambda: (torch.randn(ALL, 1024),),
    "scaled_gemm": lambda: (
        torch.ones(ALL, 64, dtype=torch.int8),
        torch.ones(1024, 64, dtype=torch.int8),
        torch.ones(ALL, 1),
        torch.ones(1024),
        torch.bfloat16,
    ),
    "activation_grad": lambda: (torch.randn(WIDE), *_copy(4), "silu"),
    "gated_grad": lambda: (*torch.randn(3, *WIDE), "silu"),
    "activation_quantize": lambda: (torch.randn(WIDE), "gelu", 4, 256),
    "residual_add": lambda: (torch.randn(WIDE), torch.randn(WIDE).bfloat16(), 1e-6, True),
    "norm_quantize": lambda: (
        *(torch.randn(WIDE), torch.ones(1024), torch.ones(1024)),
        *(1e-6, True, 4, 256, torch.float32),
    ),
    "normalize": lambda: (
        *(torch.randn(WIDE), torch.ones(1024), torch.ones(1024), 1e-6, True),
        torch.bfloat16,
    ),
    "norm_again": lambda: (
        *(*_copy(6), torch.randn(WIDE).bfloat16(), torch.ones(1024)),
        *torch.ones(4, ALL, 1),
    ),
    "norm_grad": lambda: (
        *(torch.randn(WIDE), *_copy(4)),
        *(torch.ones(1024), torch.ones(ALL, 1), True),
    ),
    "activation_grad_int8": lambda: (torch.randn(WIDE), *_copy(4), "silu"),
    "norm_grad_int8": lambda: (
        *(torch.randn(WIDE), *_copy(4), torch.ones(1024), torch.ones(ALL, 1), True),
        torch.randn(WIDE),
    ),
    "int8_operand": lambda: (*_copy(4), torch.ones(ALL, 1), "gelu"),
    "linear_again": lambda: (
        *(*_copy(4, bias=True), ALL, None),
        *(torch.randn(512, 1024), torch.ones(512), torch.bfloat16),
    ),
    "linear_copy_again": lambda: CALLS["linear_again"](),
    "linear_operands": lambda: (
        *(torch.ones(ALL, 64, dtype=torch.int8), torch.ones(ALL, 1), torch.ones(64)),
        *(*_copy(4), "gelu", torch.randn(64, 1024)),
    ),
    "linear_weight_grad": lambda: (
        torch.randn(ALL, 64),
        *_copy(4, bias=True),
        "silu",
    ),
    "linear_cross_entropy": lambda: (
        *(torch.randn(300, 64).bfloat16(), torch.randn(1024, 64), torch.randn(1024)),
        *(torch.randint(1024, (300,)), -100, 0.1, None, True, True, True),
    ),
    "pixel_cross_entropy": lambda: (
        *(torch.randn(3, 21, 40, 40).bfloat16(), torch.randint(21, (3, 320, 320))),
        *(False, None, None, 255, 0.1, None, True),
    ),
    # So few tokens that the scores are small, which it has on the meta device alone.
    "attention_again": lambda: (*torch.randn(3, 64, 2, 4, 64), None, True, None, False),
    "cast": lambda: (torch.randn(WIDE), torch.bfloat16),
    "gather_columns": lambda: (torch.randn(6304, 1024), torch.arange(50)),
    "draw": lambda: (torch.full((1024,), 0.5), torch.zeros(()), 512),
    "project": lambda: (torch.zeros(1024), 512.0, 0.01),
}


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


COMPILED = {"attention_again_grad"}  # in compiled programs alone, which no plan traces


def test_every_op_is_here():
    assert {op.name for op in OPS.values()} == set(CALLS) | COMPILED


@pytest.mark.parametrize("name", CALLS)
def test_an_op_takes_what_it_is_said_to_take(name, as_on_a_gpu):
    args = CALLS[name]()
    op = OPS[f"razorctl::{name}"]

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
    args = CALLS["scaled_gemm"]()
    (said,), _ = _costs(OWN.scaled_gemm, args)
    operations = {kernel.precision: 0 for kernel in said.kernels}
    for kernel, count in said.kernels.items():
        operations[kernel.precision] += count * kernel.operations
    assert operations == {"int8": 2 * ALL * 64 * 1024, "fp32": 0}


def test_an_int8_product_says_its_size_and_counts_the_memory_of_the_other_way():
    """On a card either Triton multiplies, or cuBLAS, which needs the int32 product."""
    a, b, *scales = CALLS["scaled_gemm"]()
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
        (said,), _ = _costs(getattr(OWN, name), CALLS[name]())
    assert all(kernel.own for kernel in said.kernels)
    assert any(kernel.reduces for kernel in said.kernels) == reduces


def test_a_norm_of_known_statistics_is_one_kernel_and_reads_its_input_once():
    x, *others = CALLS["norm_quantize"]()
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
    product = KernelWork("fp32", 2 * 4 * 6 * 8, 4 * (24 + 48 + 32))
    assert cost(aten.mm.default, (a, b), {}, a @ b) == ({product: 1}, 0)


def _half(*shape: int, last: bool = False) -> torch.Tensor:
    x = torch.zeros(shape, dtype=torch.float16)
    return x.to(memory_format=torch.channels_last) if last else x


ATEN = torch.ops.aten
CONV = [[1, 1], [1, 1], [1, 1], False, [0, 0]]  # stride, padding, dilation, transposed, its padding
# Of [2, 8, 6, 6] images, bytes in single precision.
X = 4 * 2 * 8 * 36
# An operation, its arguments and what its kernels move, in bytes.
KERNELS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]], list[int]]] = {
    "sums in place": (ATEN.add_.Tensor, lambda: (torch.zeros(8), torch.zeros(8)), [3 * 32]),
    "copies read their source alone": (
        ATEN.copy_.default,
        lambda: (torch.zeros(8), torch.zeros(8, dtype=torch.float16)),
        [32 + 16],
    ),
    "filling reads nothing": (ATEN.zero_.default, lambda: (torch.zeros(8),), [32]),
    "nor does what is like another": (ATEN.zeros_like.default, lambda: (torch.zeros(8),), [32]),
    "updates of lists are written": (
        ATEN._foreach_add_.List,
        lambda: ([torch.zeros(8), torch.zeros(4)], [torch.zeros(8), torch.zeros(4)]),
        [3 * 48],
    ),
    "an expanded operand is small": (
        ATEN.add.Tensor,
        lambda: (torch.zeros(4, 8), torch.zeros(8).expand(4, 8)),
        [2 * 128 + 32],
    ),
    "of a table the rows that are looked up": (
        ATEN.embedding.default,
        lambda: (torch.zeros(1000, 8), torch.zeros(3, dtype=torch.long)),
        [3 * 8 + 2 * 3 * 32],
    ),
    "batch norm in training": (
        ATEN.native_batch_norm.default,
        lambda: (torch.zeros(2, 8, 6, 6), None, None, None, None, True, 0.1, 1e-5),
        [X, 2 * X],
    ),
    "batch norm in evaluation": (
        ATEN.native_batch_norm.default,
        lambda: (
            *(torch.zeros(2, 8, 6, 6), None, None, torch.zeros(8), torch.zeros(8)),
            *(False, 0.1, 1e-5),
        ),
        [2 * X],
    ),
    "gradients of a layer norm": (
        ATEN.native_layer_norm_backward.default,
        lambda: (
            *(torch.zeros(4, 8), torch.zeros(4, 8), [8], torch.zeros(4, 1), torch.zeros(4, 1)),
            *(torch.zeros(8), torch.zeros(8), [True, True, True]),
        ),
        [2 * 128 + 2 * 32, 3 * 128],
    ),
    "the gradient of a frozen layer norm": (
        ATEN.native_layer_norm_backward.default,
        lambda: (
            *(torch.zeros(4, 8), torch.zeros(4, 8), [8], torch.zeros(4, 1), torch.zeros(4, 1)),
            *(torch.zeros(8), torch.zeros(8), [True, False, False]),
        ),
        [3 * 128],
    ),
    "a layer norm of columns copies them": (
        ATEN.native_layer_norm.default,
        lambda: (torch.zeros(8, 4).t(), [8], None, None, 1e-5),
        [2 * 128, 2 * 128 + 32],
    ),
    "convolution in half, channels first": (
        ATEN.convolution.default,
        lambda: (_half(2, 8, 6, 6), _half(8, 8, 3, 3), None, *CONV, 1),
        [X // 2 * 2, X // 2 * 2, 2 * 1152, X + 1152],
    ),
    "convolution in half, channels last": (
        ATEN.convolution.default,
        lambda: (_half(2, 8, 6, 6, last=True), _half(8, 8, 3, 3), None, *CONV, 1),
        [X + 1152],
    ),
    "convolution in single precision": (
        ATEN.convolution.default,
        lambda: (torch.zeros(2, 8, 6, 6), torch.zeros(8, 8, 3, 3), None, *CONV, 1),
        [2 * X + 2304],
    ),
    "gradients of a depthwise convolution": (
        ATEN.convolution_backward.default,
        lambda: (
            *(_half(2, 8, 6, 6), _half(2, 8, 6, 6), _half(8, 1, 3, 3), [8], *CONV, 8),
            [True, True, True],
        ),
        [X + 144, X + 144, X // 2 + 16],
    ),
}


def _kernels(name: str) -> OpCost:
    operation, arguments, _ = KERNELS[name]
    with FakeTensorMode() as mode:
        args = tree_map_only(torch.Tensor, mode.from_tensor, arguments())
        return cost(operation, args, {}, operation(*args))


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_that_kernels_move(name):
    said = _kernels(name)
    moved = [kernel.bytes for kernel, count in said.kernels.items() for _ in range(count)]
    assert sorted(moved) == sorted(KERNELS[name][2])


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        ("sums in place", 0),
        ("batch norm in training", 1),
        ("batch norm in evaluation", 0),
        ("gradients of a layer norm", 2),
        ("gradients of a depthwise convolution", 1),  # that of the bias
    ],
)
def test_how_many_kernels_reduce(name, reduce):
    kernels = _kernels(name).kernels
    assert sum(count for kernel, count in kernels.items() if kernel.reduces) == reduce


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
