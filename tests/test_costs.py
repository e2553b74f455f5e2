"""What operations are said to cost, against what they take when they run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import razorctl.layers  # noqa: F401  (registers every op)
from razorctl.costs import Cost, cost
from razorctl.memory import allocated_on_cpu
from razorctl.ops import quantise, topk
from razorctl.traces import Kernel

ROWS = (32, 197)  # so that they are cut into several parts
WIDE = (*ROWS, 1024)
OWN = torch.ops.razorctl


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, dtype=torch.uint8)


def _packed(*shape: int, bits: int) -> torch.Tensor:
    return torch.zeros(quantise.packed_bytes(torch.Size(shape).numel(), bits), dtype=torch.uint8)


def _scales(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(shape), torch.ones(shape)


def _bitmap() -> torch.Tensor:
    return topk.pack_bits(torch.ones(torch.Size(WIDE).numel(), dtype=torch.bool))


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "topk_pack": lambda: (torch.randn(WIDE), 600_000),
    "topk_unpack": lambda: (torch.randn(torch.Size(WIDE).numel()), _bitmap(), list(WIDE)),
    "quantise": lambda: (torch.randn(WIDE), 2),
    "codes": lambda: (_packed(*WIDE, bits=6), list(WIDE), 6),
    "dequantise": lambda: (_codes(*WIDE), *_scales(32, 1024), torch.bfloat16),
    "to_buckets": lambda: (torch.randn(WIDE), "gelu", 4),
    "from_buckets": lambda: (_packed(*WIDE, bits=3), list(WIDE), "gelu", 3, torch.bfloat16),
    "to_int8": lambda: (torch.randn(ROWS[0] * ROWS[1], 1024), 0),
    "scaled_gemm": lambda: (
        torch.ones(ROWS[0] * ROWS[1], 64, dtype=torch.int8),
        torch.ones(1024, 64, dtype=torch.int8).t(),
        torch.ones(ROWS[0] * ROWS[1], 1),
        torch.ones(1, 1024),
        torch.bfloat16,
    ),
    "activation_grad": lambda: (torch.randn(WIDE), _codes(*WIDE), *_scales(32, 1024), "silu"),
    "activation_to_int8": lambda: (_codes(*WIDE), 4, *_scales(32, 1024), "gelu"),
    "gather_columns": lambda: (torch.randn(6304, 1024), torch.arange(50)),
    "draw": lambda: (torch.full((1024,), 0.5), torch.zeros(()), 512),
    "project": lambda: (torch.zeros(1024), 512.0, 0.01),
}


def _costs(run: Callable[..., Any], args: Any) -> tuple[list[Cost], Any]:
    """What the operations of a run on fake copies cost, as a trace asks; and its result."""
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


def test_every_op_is_here():
    own = {name.removeprefix("razorctl::") for name in OPDEFS if name.startswith("razorctl::")}
    assert own == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_an_op_takes_what_it_is_said_to_take(name, as_on_a_gpu):
    args = CALLS[name]()
    run = OPDEFS[f"razorctl::{name}"]._init_fn
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
    kernels = said.kernels
    operations = {kernel.precision: 0 for kernel in kernels}
    for kernel, count in kernels.items():
        operations[kernel.precision] += count * kernel.operations
    assert operations == {"int8": 2 * ROWS[0] * ROWS[1] * 64 * 1024, "fp32": 0}


def test_a_view_costs_nothing_and_a_product_its_operations():
    a, b = torch.zeros(4, 6), torch.zeros(6, 8, dtype=torch.float32)
    aten = torch.ops.aten
    assert cost(aten.t.default, (a,), {}, a.t()) == ({}, 0)
    product = Kernel("fp32", 2 * 4 * 6 * 8, 4 * (24 + 48 + 32))
    assert cost(aten.mm.default, (a, b), {}, a @ b) == ({product: 1}, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_takes_a_gradient_in_single_precision(dtype):
    q = torch.zeros(2, 3, 197, 72, dtype=dtype, requires_grad=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    costs, _ = _costs(lambda q: attend(q, q, q).sum().backward(), [q])
    assert max(said.workspace for said in costs) == 4 * 2 * 3 * 256 * (96 + 1)
