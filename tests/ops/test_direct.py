"""When an op calls its kernel without PyTorch's dispatcher, and when not."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from razorctl.ops.int8 import int8_rows


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.fixture
def direct(monkeypatch) -> list[str]:
    """Notes each call of the CPU kernel of `int8_rows` without the dispatcher."""
    calls, kernel = [], int8_rows.kernels["cpu"]
    monkeypatch.setitem(int8_rows.kernels, "cpu", lambda x: calls.append("") or kernel(x))
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
        codes, _, _ = torch.vmap(int8_rows)(x)
    assert not direct
    assert torch.equal(codes[1], int8_rows(x[1])[0])


def test_a_compiler_sees_the_op():
    def rows(x):
        with torch.no_grad():
            return int8_rows(x)[0]

    seen = []
    torch._dynamo.reset()
    torch.compile(rows, backend=lambda graph, inputs: seen.append(graph) or graph)(torch.ones(2, 8))
    assert "razorctl.int8_rows" in seen[0].code
