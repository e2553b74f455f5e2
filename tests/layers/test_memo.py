"""Copies of an input: for which layers one serves, how long it lives, and under checkpointing."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, sparsify
from razorctl.layers.base import RazorLayer
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.shared_copies import memo
from razorctl.rules.prune import TopK

WIDTH = 32
either = pytest.mark.parametrize("reentrant", [False, True])


class Split(nn.Module):
    """Three layers of one input, and a classifier; with `change` it changes before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(33, 17) for _ in "qkv")
        self.head = nn.Linear(17, 3)

    def forward(self, x: Tensor, change: bool = False) -> Tensor:
        first = self.parts[0](x)
        if change:
            x.mul_(2)
        y: Tensor = self.head(first + self.parts[1](x) * self.parts[2](x))
        return y


# A recipe, and what makes the copy of an input by it.
COPIES = {
    "of a rule": (Recipe("backrazor", 0.5), (TopK, "pack"), "_copies"),
    "in int8": (Recipe("razor", 0.5, int8_forward=True), (memo, "int8_rows"), "_int8"),
}


@pytest.fixture(params=COPIES.values(), ids=COPIES)
def split(request, monkeypatch) -> tuple[nn.Module, list[Tensor], str]:
    """A sparsified model, the inputs of which copies were made, and where they are kept."""
    recipe, (owner, name), kept = request.param
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    copied, make = list[Tensor](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: copied.append(args[-1]) or make(*args))
    model = Split()
    sparsify(model, recipe)
    return model, copied, kept


def test_a_copy_is_made_once_for_all_layers_that_it_feeds(split):
    (model, copied, _), x = split, torch.randn(40, 33)
    parts = [part for part in model.parts if isinstance(part, RazorLayer)]
    for part in parts:
        part(x).sum().backward()
    first = len(copied)
    y = sum(part(x) for part in parts)
    assert [t.data_ptr() for t in copied[first:]] == [x.data_ptr()]
    y.sum().backward()
    sum(part(x) for part in parts)  # in another pass anew, with what a user may have put there
    assert len(copied) == first + 2


def test_what_has_changed_or_is_of_another_precision_has_a_copy_of_its_own(split):
    (model, copied, _), x = split, torch.randn(40, 33)
    first = model.parts[0](x)
    x.mul_(2)
    model.parts[1](x)
    assert len(copied) == 2
    with torch.autocast("cpu", torch.bfloat16):
        low = model.parts[0](x)
    assert len(copied) == 3
    assert [t.dtype for t in copied] == [torch.float32, torch.float32, torch.bfloat16]
    (first.sum() + low.sum()).backward()
    assert model.parts[0].weight.grad.dtype == torch.float32


def test_a_copy_is_dropped_with_its_input(split):
    model, copied, kept = split
    loss = model(torch.randn(40, 33)).sum()
    copied.clear()
    assert not getattr(model.parts[0].memo, kept)._entries
    loss.backward()
    assert not getattr(model.parts[0].memo, kept)._entries


@pytest.mark.parametrize("method", ["backrazor", "prebackrazor"])
def test_gradients_are_those_of_the_rule_of_the_first(method):
    model, x = Split(), torch.randn(6, 33)
    model.head = nn.Identity()
    sparsify(model, Recipe(method, 0.5))
    rule = copy.deepcopy(model.parts[0].rules.wide)
    model(x).sum().backward()
    stand_in = rule.pack(x).values()
    outputs = [part(x).detach() for part in model.parts]
    for part, dy in zip(model.parts, (torch.ones(6, 17), *outputs[:0:-1]), strict=True):
        torch.testing.assert_close(part.weight.grad, dy.T @ stand_in)


def test_the_same_tensor_is_drawn_anew_in_another_pass():
    layer, x = nn.Linear(33, 17), torch.randn(6, 33)
    sparsify(layer, Recipe("prebackrazor"))
    drawn = set()
    for _ in range(20):
        layer.zero_grad()
        layer(x).sum().backward()
        drawn.add(tuple(layer.weight.grad.any(0).tolist()))
    assert len(drawn) > 5


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


@pytest.mark.parametrize("method", ["backrazor", "full"])
def test_a_model_can_be_collected(method):
    model = nn.Sequential(nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 17))
    sparsify(model, Recipe(method, ratio=0.5, joint_budget=0.5))
    for _ in range(3):
        model(torch.randn(6, 33)).sum().backward()
    weight = weakref.ref(model[2].weight)
    del model
    gc.collect()
    assert weight() is None


def test_a_checkpointed_model_that_only_ran_forward_can_be_collected():
    net = sparse(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = weakref.ref(net.blocks[0].weight)
    y = net(torch.randn(4, WIDTH), False)
    del net, y
    gc.collect()
    assert weight() is None


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
