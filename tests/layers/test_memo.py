"""The memo under activation checkpointing: it shares nothing across the border of a region."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, sparsify
from razorctl.layers.base import RazorLayer

WIDTH = 32
either = pytest.mark.parametrize("reentrant", [False, True])


class Block(nn.Module):
    """Two layers of one input, and a norm that feeds the next block's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.left(x).sigmoid() * self.right(x))
        return y


class Nested(nn.Module):
    """A norm and layers that it feeds, in a region of their own and around that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), Block()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant: bool | None = None  # of the region

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = self.before(x).sigmoid() * region(self.inner, x, self.reentrant) + self.after(x)
        return y


def region(block: nn.Module, x: Tensor, reentrant: bool | None) -> Tensor:
    """The output of a block, which is checkpointed unless `reentrant` is None."""
    y: Tensor = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    return y


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        for block in self.blocks:
            x = region(block, x, reentrant)
        y: Tensor = self.head(x)
        return y


def sparse(*blocks: nn.Module) -> Net:
    """Razor at its default, by which norms keep other bits than linear layers do."""
    net = Net(*blocks)
    sparsify(net)
    return net


def gradients(net: nn.Module, *inputs: object) -> list[Tensor]:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    net(x, *inputs).square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.fixture
def shared(monkeypatch) -> list[bool]:
    """Of each input that a linear layer was to pack, whether it was packed already."""
    found, stock = list[bool](), RazorLayer.shared

    def noting(self, *args):
        result = stock(self, *args)
        found.append(result[1])
        return result

    monkeypatch.setattr(RazorLayer, "shared", noting)
    return found


def forget_at_borders(net: nn.Module) -> None:
    """Has `net` share, without checkpointing, no more than the regions that its blocks would be."""
    memo = next(m.memo for m in net.modules() if isinstance(m, RazorLayer))
    for block in net.modules():
        if isinstance(block, Block | Nested):
            block.register_forward_pre_hook(lambda *_: memo.clear())
            block.register_forward_hook(lambda *_: memo.clear())


@either
@pytest.mark.parametrize("blocks", [(Block, Block), (Nested, Block)], ids=["flat", "nested"])
def test_a_region_shares_within_itself_alone(blocks, reentrant, shared):
    net = sparse(*(block() for block in blocks))
    twin = copy.deepcopy(net)
    forget_at_borders(net)
    want, plain = gradients(net), shared.count(True)
    assert plain == len(blocks) + (Nested in blocks)
    shared.clear()
    for block in twin.modules():
        if isinstance(block, Nested):
            block.reentrant = False  # a reentrant one would keep nothing before the second pass
    for a, b in zip(gradients(twin, reentrant), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert shared.count(True) >= plain * (1 if reentrant else 2)  # in the second pass too


def test_a_region_that_breaks_a_compiled_graph_runs_eagerly():
    net = sparse(Block(), Block())
    twin = copy.deepcopy(net)
    forget_at_borders(net)
    for block in twin.blocks:
        block.left.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    torch.compiler.reset()
    got = gradients(torch.compile(twin, backend="eager"), False)
    for a, b in zip(got, gradients(net), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@either
def test_not_even_what_a_region_takes_from_around_it(reentrant, shared):
    class Captures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.outer(x)
            return y * checkpoint(lambda y: y + self.inner(x), y, use_reentrant=reentrant)

    gradients(sparse(Captures()))
    assert len(shared) == (2 if reentrant else 3)
    assert not any(shared)


def test_a_checkpointed_model_that_only_ran_forward_can_be_collected():
    net = sparse(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = weakref.ref(net.blocks[0].weight)
    y = net(torch.randn(4, WIDTH), False)
    del net, y
    gc.collect()
    assert weight() is None


def test_hooks_of_any_kind(shared):
    with saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.cpu):  # of which there is no weakref
        gradients(sparse(Block()))
    assert shared == [False, True]


@pytest.mark.parametrize("refill", ["numpy", "data"])
@pytest.mark.parametrize(
    ("kept", "second"), [(False, "both"), (True, "both"), (False, "right")]
)  # a layer of its own on a graph that is kept is as in one pass
def test_a_copy_is_of_one_forward_pass(refill, kept, second):
    """A tensor whose version does not change may have other values in the next pass."""
    net = sparse(Block())
    block, x = net.blocks[0], torch.randn(64, WIDTH)
    fresh = torch.randn(64, WIDTH)

    def run(x: Tensor) -> Tensor:
        return block.right(x) + (block.left(x) if second == "both" else 0)

    before = block.left(x) + (block.right(x) if second == "both" else 0)
    if not kept:
        del before
    if refill == "numpy":
        x.numpy()[:] = fresh.numpy()
    else:
        x.data = fresh.clone()
    run(x).square().sum().backward()
    found = [p.grad for p in block.parameters() if p.grad is not None]
    net.zero_grad()
    run(fresh).square().sum().backward()
    want = [p.grad for p in block.parameters() if p.grad is not None]
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_no_copy_outlives_the_backward_pass():
    """The tensor itself may be there for longer, as a batch that is used again."""
    net, x = sparse(Block()), torch.randn(12, WIDTH)
    net(x).sum().backward()
    memo = next(m.memo for m in net.modules() if isinstance(m, RazorLayer))
    assert not memo._copies._entries


@pytest.mark.parametrize("refill", ["numpy", "data"])
def test_so_is_an_int8_copy(refill):
    net, x, fresh = nn.Linear(512, 512), torch.randn(512, 512), torch.randn(512, 512)
    sparsify(net, Recipe("razor", 0.5, int8_forward=True))
    assert net.large(x)
    net(x)
    if refill == "numpy":
        x.numpy()[:] = fresh.numpy()
    else:
        x.data = fresh.clone()
    torch.testing.assert_close(net(x), net(fresh), rtol=0, atol=0)
