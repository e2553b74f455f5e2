"""Blocks that run again in the backward pass, from packed inputs."""

import copy
import pickle
import weakref
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.functional import cosine_similarity

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.layers import own_forward
from razorctl.layers.base import RazorLayer
from razorctl.layers.shared_copies.memo import Memo
from razorctl.memory.saved import traced_bytes
from razorctl.memory.tracker import trace_step
from razorctl.rules.quantized import Quantized
from razorctl.surgery import reruns
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.surgery.rerun_choice import TracedBlocks
from razorctl.training.compiled import failure_reason
from tests.models import llama


class Block(nn.Module):
    """A block with dropout, a batch norm, keywords, and a tuple and a mapping as its outputs."""

    def __init__(self, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(p)

    def forward(self, x, *, scale=None, mask=None, names=("y",)):
        y = self.second(self.drop(torch.sin(self.first(x))))
        y = self.norm(y.flatten(0, -2)).view(x.shape)
        if scale is not None:
            y = y * scale
        if mask is not None:
            y = torch.where(mask, y, 0)
        return x + y, {names[0]: y.mean()}


def packed_values(x: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == reruns.HALF:
        return x.half().float()
    return Quantized(bits).pack(x.detach().flatten(0, -2)).values().view(x.shape)


def gradients(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(y, list(module.parameters()))])


@pytest.mark.parametrize(
    ("bits", "cast"), [(8, False), (8, True), (4, False), (reruns.HALF, False)]
)
def test_the_gradient_is_that_of_the_stock_block_at_the_values_of_the_copies(bits, cast):
    block, dy = Block(p=0.5).train(), torch.randn(4, 8, 16)
    x, scale = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    mask = torch.rand(4, 8, 16) > 0.3

    def run(module, *values):
        leaves = [value.clone().requires_grad_() for value in values]
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            x, scale = (leaf * 1 for leaf in leaves)
            y, more = module(x, scale=scale, mask=mask)
        torch.manual_seed(2)  # the second run draws what the first drew
        both = [y, more["y"]], [dy, torch.tensor(0.5)]
        return y, torch.autograd.grad(both[0], [*leaves, *module.parameters()], both[1])

    stock = copy.deepcopy(block)
    y, exact = run(copy.deepcopy(block), x, scale)
    _, expected = run(stock, packed_values(x, bits), packed_values(scale, bits))
    reruns.attach(block, "block", bits, Memo())
    again, got = run(block, x, scale)
    assert torch.equal(y, again)
    for one, other, true in zip(got, expected, exact, strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.equal(one, true)


def test_a_block_that_runs_twice_and_does_not_train():
    block, x = Block().train(), torch.randn(4, 8, 16, requires_grad=True)
    stock = copy.deepcopy(block)
    reruns.attach(block, "block", 8, Memo())

    def run(module):
        y, _ = module(x * 1)
        y, _ = module(y)
        return gradients(module, y.square().sum())

    assert cosine_similarity(run(stock), run(block), dim=0) > 0.999
    block.eval()
    torch.testing.assert_close(run(block), run(stock.eval()))


def test_the_graph_does_not_hold_what_a_block_gets():
    block, x = Block().train(), torch.randn(4, 8, 16, requires_grad=True) * 1
    reruns.attach(block, "block", 8, Memo())
    y, _ = block(x)
    freed = weakref.ref(x)
    del x
    assert freed() is None
    y.sum().backward()


class Transposing(nn.Module):
    """A block whose product keeps what the strides of its input choose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.sin(self.linear(x.transpose(0, 1))).transpose(0, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat((x, x), -1)[..., :16],
        lambda x: x[:1].expand(4, 8, 16),
    ],
    ids=["axes in another order", "a part", "expanded"],
)
def test_values_lie_in_memory_as_the_input_did(view):
    block, x = Transposing().train(), torch.randn(4, 8, 16, requires_grad=True)
    exact = gradients(block, block(view(x)).square().sum())
    reruns.attach(block, "block", 8, Memo())
    got = gradients(block, block(view(x)).square().sum())  # torch compares what both runs keep
    assert cosine_similarity(exact, got, dim=0) > 0.999


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_model_of_layers_that_are_not_known(kind):
    model, x = nn.Sequential(kind(16, 16, batch_first=True)), torch.randn(8, 32, 16)
    model.train()
    full, want = traced_bytes(model, x), model(x)[0]
    exact = gradients(model, want.square().sum())
    with pytest.raises(UsageError, match="no layer of Sequential can be pruned"):
        sparsify(model, Recipe(ratio=0.9))
    sparsify_within(model, Recipe(ratio=0.9), x)
    assert traced_bytes(model, x) <= 0.1 * full
    y = model(x)[0]
    assert torch.equal(y, want)
    assert cosine_similarity(exact, gradients(model, y.square().sum()), dim=0) > 0.999


class Product(nn.Module):
    """A product of two inputs, which is all that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 16)

    def forward(self, x):
        return self.layer(x, x)


def test_a_refusal_names_what_would_run_again():
    model = nn.Sequential(*[Product() for _ in range(3)]).train()
    with pytest.raises(UsageError, match=r"3 x \* would be recomputed, .* stored in 4 bits"):
        sparsify_within(model, Recipe(ratio=0.9), torch.randn(8, 64, 16))


@pytest.mark.parametrize("name", ["layer_idx", "layer_id"])
def test_a_cache_is_left_out_where_it_has_nothing_of_the_block(name):
    from transformers import DynamicCache

    cache, states = DynamicCache(), torch.randn(1, 2, 3, 4)
    cache.update(states, states, 0)
    first, second = nn.Module(), nn.Module()
    setattr(first, name, 0)
    setattr(second, name, 1)
    assert reruns.without_cache(first, cache) is cache
    assert reruns.without_cache(nn.Sequential(second), cache) is None


def test_a_cache_is_filled_and_read():
    torch.manual_seed(0)
    model, ids = llama().train(), torch.randint(1, 50, (4, 32))

    def step():
        cache = model(ids[:, :16], use_cache=True).past_key_values
        y = model(ids[:, 16:], past_key_values=cache).logits.square().mean()
        return y, gradients(model, y)

    want, exact = step()
    sparsify(model, Recipe(ratio=0.9))
    for number, block in enumerate(model.model.layers):
        reruns.attach(block, f"h.{number}", 8, Memo())
    y, got = step()
    torch.testing.assert_close(y, want, rtol=1e-6, atol=0)  # the head sums in another order
    assert cosine_similarity(got, exact, dim=0) > 0.99


class Within(nn.Module):
    """A block that changes what it gets in place."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.linear, self.both = nn.Linear(16, 16), both

    def forward(self, x, other):
        (x if self.both else x[:, :1]).add_(1)
        return self.linear(x) * other


def test_a_change_in_place():
    x = torch.randn(32, 16, requires_grad=True)
    block = Within(True)
    stock = copy.deepcopy(block)
    reruns.attach(block, "h.0", 8, Memo())
    y, exact = block(x * 1, torch.ones(())), stock(x * 1, torch.ones(()))
    exact, got = gradients(stock, exact.square().sum()), gradients(block, y.square().sum())
    assert cosine_similarity(exact, got, dim=0) > 0.999
    base = x * 1
    with pytest.raises(UsageError, match=r"h\.0 \(Within\) changes an argument in place"):
        block(base, base[:, :16])
    own_forward.take(block)
    reruns.attach(block, "h.0", None, Memo())
    with pytest.raises(UsageError, match=r"h\.0 \(Within\) changes an argument in place"):
        block(torch.randn(32, 16), torch.ones(()))


@pytest.mark.parametrize("what", ["mask", "weight"])
def test_a_change_before_the_backward_pass(what):
    block, x = Block().train(), torch.randn(4, 8, 16, requires_grad=True)
    mask = torch.ones(16, dtype=torch.bool)
    reruns.attach(block, "h.0", 8, Memo())
    y, _ = block(x * 1, mask=mask)
    (mask if what == "mask" else block.first.weight.detach()).zero_()
    with pytest.raises(UsageError, match=r"input of h\.0 \(Block\) was changed in place between"):
        y.sum().backward()


class PromptAttention(nn.Module):
    """Attention to a parameter of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, prompt):
        scores = self.q(x) @ self.k(prompt * 1).T
        return scores.softmax(-1) @ self.v(prompt)


def test_a_parameter_among_arguments_stays_one():
    block, prompt = PromptAttention().train(), nn.Parameter(torch.randn(32, 16))
    x = torch.randn(32, 16, requires_grad=True)

    def run():
        with torch.autograd.graph.save_on_cpu():
            return block(x * 1, prompt).square().sum()

    want = gradients(block, run())
    sparsify(block, Recipe(ratio=0.9))
    assert isinstance(block, RazorLayer)
    reruns.attach(block, "h.0", 8, Memo())
    assert cosine_similarity(want, gradients(block, run()), dim=0) > 0.99
    y = run()
    prompt.detach().zero_()
    with pytest.raises(UsageError, match=r"input of h\.0 \(PromptAttention\) was changed in place"):
        y.backward()


def test_arguments_that_view_each_other():
    block, x = Block().train(), torch.randn(4, 8, 16, requires_grad=True)
    stock = copy.deepcopy(block)
    reruns.attach(block, "h.0", 8, Memo())

    def run(module):
        base = x * 1
        y, _ = module(base, scale=base[:, :1])
        grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        return torch.cat([grad.flatten() for grad in grads])

    assert cosine_similarity(run(stock), run(block), dim=0) > 0.999


def test_a_transform_of_torch_func_takes_the_stock_block():
    block, x = Within(True).train(), torch.randn(3, 32, 16)
    weights = dict(block.named_parameters())

    def loss(weights, x):
        y = torch.func.functional_call(block, weights, (x * 1, torch.ones(())))
        return y.square().sum()

    transformed = torch.func.vmap(torch.func.grad(loss), (None, 0))
    want = transformed(weights, x)
    reruns.attach(block, "h.0", 8, Memo())
    got = transformed(weights, x)
    assert all(torch.equal(got[name], want[name]) for name in want)


class Sharing(nn.Module):
    """Blocks of which the first puts into a mapping what the others read there."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(SharingBlock() for _ in range(3))

    def forward(self, x):
        shared = UserDict()
        for block in self.blocks:
            x = block(x, self.key, shared=shared)
        return x


class SharingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, key, shared):
        if "keys" not in shared:
            shared["keys"] = (key(x),)
        return x + torch.sin(self.linear(x)) * shared["keys"][0]


def test_a_mapping_that_blocks_fill_for_others():
    model, x = Sharing().train(), torch.randn(4, 8, 16)
    exact, full = gradients(model, model(x).square().sum()), traced_bytes(model, x)
    foreseen = TracedBlocks(model, x, {"autocast": None, "forward": None})
    names, memo = [f"blocks.{number}" for number in range(3)], Memo()
    for name in names:
        reruns.attach(model.get_submodule(name), name, None, memo)
    assert torch.equal(gradients(model, model(x).square().sum()), exact)
    assert traced_bytes(model, x) == foreseen.kept(names) < full


@dataclass
class Opaque:
    """An argument that may hold anything."""

    x: torch.Tensor


class OfOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, opaque):
        y = nn.functional.dropout(torch.sin(self.first(opaque.x)))
        return Opaque(self.second(y))


class Stack(nn.Module):
    """Blocks of an unknown kind."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        wrap = isinstance(self.blocks[0], OfOpaque)
        x = Opaque(x) if wrap else x
        for block in self.blocks:
            x = block(x) if wrap else block(x)[0]
        return self.head((x.x if wrap else x).mean(1))


def test_an_unknown_argument_is_refused_with_the_block():
    model, refusal = (
        Stack(OfOpaque()),
        r"blocks\.\d \(OfOpaque\) gets an argument of type Opaque",
    )
    with pytest.raises(UsageError, match=refusal):
        sparsify_within(model, Recipe(ratio=0.9), torch.randn(8, 64, 16))
    assert not any(isinstance(module, RazorLayer) for module in model.modules())


def test_restore_deepcopy_and_pickle():
    model, x = Stack(Block()), torch.randn(8, 64, 16)
    keys, full = list(model.state_dict()), traced_bytes(model, x)
    names = sparsify_within(model, Recipe(ratio=0.9), x)
    assert names[:4] == tuple(f"blocks.{number}" for number in range(4))
    kept = saved_bytes(model, x)
    assert kept <= 0.1 * full
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.blocks[0].forward.owner is twin.blocks[0]
        assert saved_bytes(twin, x) == kept
    with pytest.raises(UsageError, match="sparsified already"):
        sparsify_within(model, Recipe(ratio=0.9), x)
    restore(model)
    assert "forward" not in vars(model.blocks[0])
    assert traced_bytes(model, x) == full


def test_fewer_bits_where_more_keep_too_much():
    model, x = Stack(Block()), torch.randn(8, 64, 16)
    full, kept = traced_bytes(model, x), {}
    for ratio in (0.8, 0.9, 0.95, 0.97):
        sparsify_within(model, Recipe(ratio=ratio), x)
        rule = model.blocks[0].forward.rule
        bits = None if rule is None else vars(rule).get("bits", reruns.HALF)
        kept[bits] = traced_bytes(model, x) / full
        assert traced_bytes(model, x) <= (1 - ratio) * full
        restore(model)
    assert list(kept) == sorted(kept, key=kept.get, reverse=True)
    assert list(kept) == [None, reruns.HALF, 8, 4]


def test_only_blocks_that_are_needed_run_again():
    model, x = Stack(Block()), torch.randn(8, 64, 16)
    full = traced_bytes(model, x)
    sparsify_within(model, Recipe(ratio=0.7), x)
    again = [block for block in model.blocks if reruns.attached(block)]
    assert 0 < len(again) < len(model.blocks)
    assert traced_bytes(model, x) <= 0.3 * full
    own_forward.take(again[0])
    assert traced_bytes(model, x) > 0.3 * full


class Routed(nn.Module):
    """A block whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        chosen = (x.mean(-1) > 0).nonzero(as_tuple=True)
        return (x.index_put(chosen, self.block(x[chosen])[0]),)


def test_a_model_that_reads_values_keeps_the_inputs_of_its_blocks():
    model, x = Stack(Routed()).train(), torch.randn(8, 64, 16)
    full = traced_bytes(model, x)
    exact = gradients(model, model(x).square().sum())
    sparsify_within(model, Recipe(ratio=0.75), x)
    again = [vars(module)["forward"] for module in model.modules() if reruns.attached(module)]
    assert again
    assert all(rerun.rule is None for rerun in again)
    assert traced_bytes(model, x) <= 0.25 * full
    assert cosine_similarity(gradients(model, model(x).square().sum()), exact, dim=0) > 0.99


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50, dropout_rate=0.1
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    ids = torch.randint(0, 50, (4, 48))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=32, num_hidden_layers=3, state_size=4, vocab_size=50)
    return MambaForCausalLM(config), {"input_ids": torch.randint(0, 50, (4, 24))}


def swin():
    import timm

    options = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    model = timm.create_model("swinv2_tiny_window8_256", window_size=4, **options)
    return model, {"x": torch.randn(4, 3, 32, 32)}


@pytest.mark.parametrize("make", [t5, swin])
def test_bytes_of_blocks_that_run_again_are_foreseen(make):
    model, x = make()
    stock = TracedBlocks(model.train(), x, {"autocast": None, "forward": None})
    for bits in (4, None):
        blocks = [n for n, m in model.named_modules() if type(m).__name__.endswith("Block")]
        memo = Memo()
        for name in blocks:
            reruns.attach(model.get_submodule(name), name, bits, memo)
        kept = traced_bytes(model, x)
        assert stock.kept(blocks, bits) == kept < stock.kept()
        restore(model)


def test_three_passes_find_the_blocks():
    model, x, passes = Stack(Block()), torch.randn(8, 64, 16), []
    sparsify_within(model, Recipe(), x, forward=lambda m, x: passes.append(m(x)))
    assert reruns.attached(model.blocks[0])
    assert len(passes) == 4  # stock bytes, output layers, the rules, and the blocks


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return (x + self.second(torch.sin(self.first(x))),)


def test_a_traced_step_counts_the_products_of_the_second_run():
    def step(model, batches, _):
        for x in batches:
            model(x).sum().backward()

    def products(model):
        traced = trace_step(model, x, None, step, lambda model, x: model(x), 1)
        return sum(work.operations * times for work, times in traced.kernels.items())

    model, x, memo = Stack(Sine()), torch.randn(8, 64, 16), Memo()
    once = products(model)
    for number, block in enumerate(model.blocks):
        reruns.attach(block, f"blocks.{number}", 8, memo)
    of_a_block = 2 * 8 * 64 * 16 * 32  # nothing needs the output of its last layer again
    assert products(model) == once + 4 * of_a_block


def test_compiled_blocks_run_eagerly_and_refuse_to_be_part_of_one_graph():
    model, x = Stack(Sine()), torch.randn(8, 64, 16)
    sparsify_within(model, Recipe(ratio=0.9), x)
    torch.compiler.reset()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(TorchDynamoException) as refused:
        whole(x)
    said = failure_reason(refused.value)
    assert said.startswith("blocks.0 is recomputed in the backward pass")
    assert said.endswith("without fullgraph, or choose a smaller ratio.")
    compiled = torch.compile(model, backend="eager")
    got, expected = (gradients(model, run(x).square().sum()) for run in (compiled, model))
    torch.testing.assert_close(got, expected)
    model.eval()
    torch.testing.assert_close(whole(x), model(x))


def test_activation_checkpointing_in_place_of_blocks_that_run_again_is_refused():
    model, x = mamba()
    refusal = r"only if blocks are recomputed .*\(3 x backbone\.layers\.\*\).* checkpointing out\."
    with pytest.raises(UsageError, match=refusal):
        sparsify_within(model, Recipe(ratio=0.9, activation_checkpointing=True), x)
    assert not any(isinstance(module, RazorLayer) for module in model.modules())
