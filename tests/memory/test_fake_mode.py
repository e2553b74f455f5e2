"""Operations of a trace return what the trace knows of them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from razorctl.config.recipe import Recipe
from razorctl.memory.fake import fakes
from razorctl.memory.fake_mode import TraceMode, storage_key
from razorctl.memory.saved import tracing
from razorctl.surgery.sparsify import sparsify
from tests.models import bert, vit


def facts(returned, arguments):
    """All that later operations see of what an operation returned."""
    leaves = tree_leaves(returned)
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    described = [type(returned) if isinstance(returned, list) else None]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(leaf)
            continue
        described += [leaf.dtype, leaf.device, leaf.shape, leaf.stride(), leaf.storage_offset()]
        described += [leaf.requires_grad, leaf.untyped_storage().nbytes()]
        described += [storage_key(leaf) == storage_key(x) for x in inputs]
        described += [leaf is x for x in inputs]
        described += [storage_key(leaf) == storage_key(other) for other in leaves]
    return described


@pytest.fixture
def checked(monkeypatch):
    """The names of the operations that were known, each compared with what it returns."""
    names, dispatch = [], TraceMode.dispatch

    def both(self, func, types, args=(), kwargs=None):
        known = self._key(func, args, kwargs or {}, []) in self._known
        returned = dispatch(self, func, types, args, kwargs)
        if known:
            names.append(func.name())
            anew = FakeTensorMode.dispatch(self, func, types, args, kwargs or {})
            assert facts(returned, (args, kwargs)) == facts(anew, (args, kwargs)), func
        return returned

    monkeypatch.setattr(TraceMode, "_known", {})
    monkeypatch.setattr(TraceMode, "dispatch", both)
    return names


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        pytest.param(vit, torch.rand(2, 3, 16, 16), id="vit"),
        pytest.param(bert, torch.ones(2, 16, dtype=torch.long), id="bert"),
    ],
)
def test_what_is_known_is_what_is_returned(make, inputs, checked):
    model = make()
    sparsify(model, Recipe(ratio=0.9))
    with (
        fakes(model, inputs) as (mode, batch),
        tracing(model, mode),
        torch.autocast("cpu", torch.bfloat16),
    ):
        output = model(batch)
        getattr(output, "logits", output).float().sum().backward()
    assert isinstance(mode, TraceMode)
    assert {"aten", "razorctl"} <= {name.partition("::")[0] for name in checked}
    assert len(checked) > 100


def test_an_operation_on_another_size_is_another():
    mode = TraceMode()
    with mode:
        for rows in (2, 3, 2):
            x = torch.empty(rows, 4)
            assert (x @ x.t()).shape == (rows, rows)
            assert x.view(-1).untyped_storage()._cdata == x.untyped_storage()._cdata
            y = torch.empty_like(x)
            assert x.mul_(x) is x
            assert x.mul_(y) is x
            assert torch.add(x, y, out=y) is y
            assert torch.add(x, y, out=x) is x
            assert torch.add(x, x, out=y) is y
            assert (x * 2).dtype == torch.float32
            assert (x.long() * 2).dtype == torch.int64
            assert (x.long() * 2.0).dtype == torch.float32
            assert x.resize_(rows + 1, 4).shape == (rows + 1, 4)


def test_an_operation_may_return_numbers():
    """Fused attention of a card does so; its results are not all tensors."""
    with TraceMode():
        q = torch.empty(1, 2, 8, 16)
        output, *others = torch.ops.aten._scaled_dot_product_flash_attention(q, q, q)
    assert output.shape == q.shape
    assert int in map(type, others)


NORMS = {
    "batch": lambda x, w: torch.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5),
    "group": lambda x, w: torch.native_group_norm(x, w, w, 4, 4, 4, 2, 1e-5),
    "layer": lambda x, w: torch.native_layer_norm(x, (4,), w, w, 1e-5),
}


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("kind", NORMS)
def test_statistics_of_a_norm_have_the_dtype_of_its_kernel(kind, parameters):
    x = torch.randn(4, 4, *[4] if kind == "layer" else [2, 2]).bfloat16()
    weight, mode = parameters and torch.ones(4, dtype=parameters), TraceMode()
    given = mode.from_tensor(x), parameters and mode.from_tensor(weight)
    norms = [NORMS[kind](x, w) for x, w in ((x, weight), given)]
    assert [t.dtype for t in norms[0]] == [t.dtype for t in norms[1]]
    assert isinstance(norms[1][1], FakeTensor)
