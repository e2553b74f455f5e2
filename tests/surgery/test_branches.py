"""Residual branches that are not drawn: the stock forward, and a backward pass without them."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from timm.models import eva
from torch import Tensor, nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.layers.by_type import branches, branches_of
from razorctl.layers.own_forward import runs
from razorctl.memory.draws import joint_draws
from tests import zoo
from tests.kept import held_bytes
from tests.models import checkpoint, vit


@dataclass(frozen=True)
class Case:
    """A small model, its inputs, and for each block the modules that end its branches."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    ends: tuple[str, ...]


def timm_vit() -> nn.Module:
    return vit(depth=3, init_values=0.1)


IMAGE = torch.randn(5, 3, 16, 16)
OUTPUTS = ("attention.output.dropout", "output.dropout")
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
ENDS = {
    "hf vit": ("attention.o_proj", "mlp"),
    "bert": OUTPUTS,
    "roberta": OUTPUTS,
    "distilbert": ("attention.out_lin", "ffn"),
    "gpt2": ("attn.resid_dropout", "mlp"),
    "qwen2": ("self_attn.o_proj", "mlp"),
    "olmo2": NORMS,
    "gemma2": NORMS,
}
CASES = {"timm": Case(timm_vit, {"x": IMAGE}, ("drop_path1", "drop_path2"))}
CASES |= {name: Case(*zoo.ALL[name], ends) for name, ends in ENDS.items()}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def recipe(method: str = "full", budget: float = 0.5, **options) -> Recipe:
    return Recipe(method, 0.5, joint_budget=budget, joint="branches", **options)


def ends(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules that end the branches of a model, in the order of their numbers."""
    owners = [m for m in model.modules() if branches_of(type(m))]
    return [owner.get_submodule(name) for owner in owners for name in names]


def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return logits(model, inputs).square().sum()


def logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(1)  # of dropout
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def oracle(model: nn.Module, case: Case, drawn: dict[int, float], unbiased: bool) -> nn.Module:
    """A stock copy with gradients: detached where not drawn, scaled by 1 / p where drawn."""
    twin = copy.deepcopy(model)
    restore(twin)
    twin.zero_grad()
    for block, end in enumerate(ends(twin, case.ends)):
        scale = 1 / drawn[block] if unbiased and block in drawn else float(block in drawn)

        def replace(module, args, output, scale=scale):
            rest = output.detach()
            return rest + scale * (output - rest) if scale else rest

        end.register_forward_hook(replace)
    loss(twin, case.inputs).backward()
    return twin


def assert_same_gradients(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        torch.testing.assert_close(a.grad, b.grad)


def step_like_the_oracle(model: nn.Module, case: Case, unbiased: bool = False) -> set[int]:
    """The branches drawn in a step, whose output and gradients are checked."""
    model.zero_grad()
    value = loss(model, case.inputs)
    value.backward()
    drawn = joint_draws(model)[0].drawn
    stock = oracle(model, case, drawn, unbiased)
    assert torch.equal(value, loss(stock, case.inputs))
    assert_same_gradients(model, stock)
    return set(drawn)


@every_case
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_are_those_of_the_stock_model_with_some_branches_detached(case, unbiased):
    model = case.build()
    assert sparsify(model, recipe(unbiased=unbiased)) == ()
    (blocks,) = joint_draws(model)
    branches_drawn = len(ends(model, case.ends)) // 2
    assert (blocks.sampler.size, blocks.sampler.count) == (2 * branches_drawn, branches_drawn)
    drawn = [step_like_the_oracle(model, case, unbiased) for _ in range(5)]
    assert {len(blocks) for blocks in drawn} == {branches_drawn}
    assert len(set.union(*drawn)) > branches_drawn
    assert any(p.grad is None for p in model.parameters())


@every_case
def test_a_draw_learns_the_norm_of_output_times_gradient(case):
    model, outputs = case.build(), {}
    sparsify(model, recipe(unbiased=True))
    (blocks,) = joint_draws(model)
    for block, end in enumerate(ends(model, case.ends)):

        def note(module, args, output, block=block):
            if output.requires_grad:
                outputs[block] = output * 1  # whose gradient no scaling has seen yet
                outputs[block].retain_grad()
                return outputs[block]
            return None

        end.register_forward_hook(note)
    loss(model, case.inputs).backward()
    assert set(blocks.norms) == set(blocks.drawn) == set(outputs)
    for block, norm in blocks.norms.items():
        torch.testing.assert_close(norm, outputs[block].norm() * outputs[block].grad.norm())
    before = blocks.sampler.p.clone()
    loss(model, case.inputs)
    assert not torch.equal(blocks.sampler.p, before)


def block_of(kind: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A small block of a timm type, layer scale and all, and an input of it."""
    if "swin" in kind.__module__:
        return kind(16, (4, 4), 2, window_size=2, shift_size=1), torch.randn(2, 4, 4, 16)
    scale = {} if kind is eva.EvaBlockPostNorm else {"init_values": 0.1}
    return kind(16, 2, **scale), torch.randn(2, 5, 16)


TIMM = [kind for kind in branches() if kind.__module__.startswith("timm.")]


@pytest.mark.parametrize("kind", TIMM, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_block_of_timm(kind):
    block, x = block_of(kind)
    model = nn.Sequential(block)
    sparsify(model, recipe())
    case = Case(lambda: model, {"input": x}, ("drop_path1", "drop_path2"))
    drawn = [step_like_the_oracle(model, case) for _ in range(6)]
    assert {0, 1} == set.union(*drawn)
    assert {len(blocks) for blocks in drawn} == {1}


@pytest.mark.parametrize(
    ("name", "method"),
    [("timm", "full"), ("timm", "prebackrazor++"), ("hf vit", "full"), ("bert", "prebackrazor++")],
)
def test_traced_bytes_are_those_of_the_draw_that_saves_most(name, method):
    case = CASES[name]
    model, traced = case.build().train(), []
    for budget in (1.0, 0.5, 0.2):
        sparsify(model, recipe(method, budget))
        traced.append(saved_bytes(model, case.inputs))
        found = [
            held_bytes(model, logits, model, case.inputs) for _ in range(1 if budget == 1 else 30)
        ]
        assert max(found) == traced[-1]
        restore(model)
    assert traced[0] > traced[1] > traced[2]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["full", "prebackrazor-"])
@pytest.mark.parametrize("name", ["hf vit", "bert"])
def test_activation_checkpointing_replays_the_draw(name, method, reentrant):
    case = CASES[name]
    model = case.build()
    twin = copy.deepcopy(model)
    checkpoint(twin, reentrant)
    for m in (model, twin):
        sparsify(m.train(), recipe(method, unbiased=True))
    for _ in range(3):
        for m in (model, twin):
            m.zero_grad()
            loss(m, case.inputs).backward()
        assert joint_draws(model)[0].drawn == pytest.approx(joint_draws(twin)[0].drawn)
        assert_same_gradients(model, twin)
    assert saved_bytes(twin, case.inputs) < saved_bytes(model, case.inputs)


@pytest.mark.parametrize("method", ["checkpoint", "backrazor", "prebackrazor++"])
def test_over_any_method(method):
    model = timm_vit()
    swapped = sparsify(model, recipe(method, budget=0.3))
    assert bool(swapped)
    loss(model, {"x": IMAGE}).backward()
    drawn = joint_draws(model)[0].drawn
    for i, block in enumerate(model.blocks):
        assert (block.attn.qkv.weight.grad is None) == (2 * i not in drawn)
        assert (block.mlp.fc1.weight.grad is None) == (2 * i + 1 not in drawn)
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("method", ["full", "backrazor"])
def test_copies_draw_for_themselves_and_restore_leaves_no_trace(method):
    model = timm_vit()
    keys, before = list(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    sparsify(model, recipe(method))
    assert list(model.state_dict()) == keys
    with pytest.raises(UsageError, match="sparsified already"):
        sparsify(model, recipe(method))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss(twin, {"x": IMAGE}).backward()
        assert joint_draws(twin)[0].step == 1
        assert joint_draws(model)[0].step == 0
        assert any(p.grad is None for p in twin.parameters())
        assert all(p.grad is None for p in model.parameters())
        restore(twin)
        assert not any(map(runs, twin.modules()))
    assert any(map(runs, model.modules()))
    restore(model)
    assert not joint_draws(model)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
    loss(model, {"x": IMAGE}).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_cannot_be_drawn():
    frozen = timm_vit()
    frozen.blocks.requires_grad_(False)
    patched = timm_vit()
    for block in patched.blocks:
        for module in (block.attn, block.mlp):
            module.forward = partial(module.forward)
    for model in (frozen, patched):
        with pytest.raises(
            UsageError, match=r"no trainable residual branch .*set joint_budget to 1"
        ):
            sparsify(model, recipe())
        assert not model._forward_pre_hooks
        assert not any(map(runs, model.modules()))


def test_frozen_branches_are_not_drawn():
    model = timm_vit()
    model.requires_grad_(False)
    model.blocks[1].mlp.requires_grad_(True)
    sparsify(model, recipe(budget=0.1))
    loss(model, {"x": IMAGE}).backward()
    assert model.blocks[1].mlp.fc1.weight.grad.any()
    model.requires_grad_(False)
    model.head.requires_grad_(True)  # now nothing in the branch wants a gradient
    loss(model, {"x": IMAGE}).backward()


def test_evaluation_is_stock_and_draws_nothing():
    model = timm_vit().eval()
    want = torch.autograd.grad(loss(model, {"x": IMAGE}), model.patch_embed.proj.weight)
    sparsify(model, recipe())
    got = torch.autograd.grad(loss(model, {"x": IMAGE}), model.patch_embed.proj.weight)
    assert torch.equal(*want, *got)
    with torch.no_grad():
        loss(model.train(), {"x": IMAGE})
    assert joint_draws(model)[0].step == 0


def test_dropouts_in_eval_mode_do_not_matter():
    case = CASES["bert"]
    model = case.build()
    sparsify(model, recipe(unbiased=True))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()  # among them those that end the branches
    loss(model, case.inputs).backward()
    (blocks,) = joint_draws(model)
    assert set(blocks.norms) == set(blocks.drawn)
    assert any(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_grad_mode_survives_what_is_raised_in_an_undrawn_branch(error):
    model = timm_vit()
    sparsify(model, recipe(budget=0.1))

    def fail(*_):
        if not torch.is_grad_enabled():
            raise error

    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(fail)
    with pytest.raises(error):
        loss(model, {"x": IMAGE})
    assert torch.is_grad_enabled()


def test_two_passes_in_one_autocast_context():
    # Autocast keeps the low-precision weights that the undrawn branches made without grad.
    model = timm_vit()
    sparsify(model, recipe())
    (blocks,) = joint_draws(model)
    drawn = set()
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros(())
        for _ in range(8):
            total = total + loss(model, {"x": IMAGE})
            drawn |= set(blocks.drawn)
    total.backward()
    assert len(drawn) == 6
    assert all(p.grad is not None and p.grad.any() for p in model.blocks.parameters())
