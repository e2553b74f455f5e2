"""The schema of an op from its signature; and calls of a kernel without PyTorch's dispatcher."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from razorctl.ops import kernels
from razorctl.ops.activation import activation_grad
from razorctl.ops.int8 import int8_rows
from razorctl.ops.norm import norm_grad
from razorctl.ops.op import OPS, FewBitCopy
from razorctl.ops.quantize import dequantize, quantize
from tests.ops.calls import CALLS, Size, op_of
from tests.references import copied, opcheck


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("name", CALLS)
def test_an_op_passes_the_checks_of_torch(name):
    for args in CALLS[name](Size(18, 7, 5, 4)):
        if not (name == "topk_pack" and args[0].isnan().any()):  # which are never equal
            opcheck(op_of(name), args)


def test_every_op_has_calls():
    assert {op.name for op in OPS.values()} == {*CALLS, "attention_again_grad"}


@pytest.fixture
def direct(monkeypatch) -> list[str]:
    """An entry for each call of the CPU kernel of `int8_rows` without the dispatcher."""
    calls, kernel = [], int8_rows.kernels["cpu"]

    def recorded(x):
        calls.append("")
        return kernel(x)

    monkeypatch.setitem(int8_rows.kernels, "cpu", recorded)
    return calls


def test_a_kernel_is_called_directly_where_nothing_else_takes_part(direct):
    x = torch.randn(6, 8)
    with torch.no_grad():
        got = int8_rows(x.view(6, 8))
    assert direct
    assert not any(t._is_view() or t.requires_grad for t in got)
    for mine, theirs in zip(got, torch.ops.razorctl.int8_rows(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("context", "x"),
    [
        (torch.enable_grad, torch.ones(2, 8)),
        (Mode, torch.ones(2, 8)),
        (FakeTensorMode, None),
        (torch.autograd.profiler.profile, torch.ones(2, 8)),
        (nullcontext, torch.ones(2, 8).as_subclass(Own)),
        (nullcontext, torch.ones(2, 8, device="meta")),
    ],
    ids=["autograd", "mode", "fake", "profiler", "subclass", "no kernel"],
)
def test_else_through_the_dispatcher(direct, context, x):
    with torch.no_grad(), context():
        int8_rows(torch.ones(2, 8) if x is None else x)
    assert not direct


def test_so_do_calls_under_transforms(direct):
    x = torch.randn(3, 2, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="batching rule"):
        codes, *_ = torch.vmap(int8_rows)(x)
    assert not direct
    assert torch.equal(codes[1], int8_rows(x[1])[0])


def test_a_compiler_sees_the_op():
    def rows(x):
        with torch.no_grad():
            return int8_rows(x)[0]

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(rows, backend=backend)(torch.ones(2, 8))
    assert "razorctl.int8_rows" in graphs[0].code


def test_a_copy_is_several_arguments_in_the_schema_and_one_elsewhere():
    schema = [a.name for a in norm_grad.overload._schema.arguments]
    assert schema == ["dy", *FewBitCopy._fields, "weight", "rstd", "centers", "residual"]
    dy, copy = torch.randn(6, 64), copied(torch.randn(6, 64), 4, 6)
    args = dy, copy, None, torch.rand(6, 1), True
    assert norm_grad.grouped(norm_grad.flat(args)) == (*args, None)  # the default of the residual
    with torch.no_grad():
        got = norm_grad(*args)
    for mine, theirs in zip(got, norm_grad.overload(*norm_grad.flat(args)), strict=True):
        assert torch.equal(mine, theirs)


def test_no_kernel_forgets_the_bias_of_a_copy():
    dy, copy = torch.randn(6, 64), copied(torch.randn(6, 64), 4, 6)
    biased = copy._replace(bias=torch.randn(64))
    for op, others in ((norm_grad, (None, torch.rand(6, 1), True)), (activation_grad, ("gelu",))):
        got, want = op(dy, biased, *others), op.body(dy, biased, *others)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        registered = kernels.REGISTERED.get((op.name, "cuda"))
        assert registered is None or not registered.takes(dy, biased, *others)


def test_a_compiler_sees_an_op_that_takes_a_copy():
    def restored(x):
        with torch.no_grad():
            return dequantize(FewBitCopy(*quantize(x, 4, 2), 4, 2), 2, torch.float32)

    torch._dynamo.reset()
    x = torch.randn(2, 64)
    assert torch.equal(torch.compile(restored, backend="eager", fullgraph=True)(x), restored(x))
