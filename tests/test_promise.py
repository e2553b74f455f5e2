"""The ratio of razor as a promise in bytes, and the data that it is kept with."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.allocation import RESERVE, _choices, allocate, largest
from razorctl.errors import UsageError
from razorctl.layers import RazorLayer
from razorctl.libraries import swaps
from razorctl.promise import sparsify_within
from razorctl.rules import RULES, Quantised

PRECISIONS = {"wide": None, "narrow": torch.bfloat16}


def small(tokens: int = 16) -> tuple[nn.Module, torch.Tensor]:
    """A model of narrow heads and few tokens, unlike those that were measured."""
    side = 4 * int(tokens**0.5)
    model = VisionTransformer(
        img_size=side, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )
    return model, torch.randn(2, 3, side, side)


@pytest.mark.parametrize("width", RESERVE)
class TestAllocations:
    def test_choices_are_a_frontier_of_known_rules(self, width):
        choices = _choices()[width]
        assert len(choices) > 20
        kinds = {swap.kind for swap in swaps().values()}
        for better, worse in itertools.pairwise(choices):
            assert better["error"] <= worse["error"]
            assert better["ratio"] < worse["ratio"]
        for choice in choices:
            assert set(choice["rules"]) <= kinds
            assert set(choice["rules"].values()) <= set(RULES)

    def test_more_bytes_never_do_more_harm(self, width):
        errors = []
        for ratio in (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, largest(width)):
            names = allocate(ratio)
            part = {
                kind: rule.split("/")[list(RESERVE).index(width)] for kind, rule in names.items()
            }
            errors += [c["error"] for c in _choices()[width] if c["rules"] == part]
        assert errors == sorted(errors)
        assert len(errors) >= 5


def test_a_ratio_beyond_all_is_refused_with_the_largest():
    with pytest.raises(UsageError, match=f"largest that can is {largest('wide'):g}"):
        Recipe("razor", 0.99)
    Recipe("razor", largest("wide"))


def test_a_ratio_beyond_16_bits_is_refused_where_they_come():
    ratio = (largest("narrow") + largest("wide")) / 2
    model, x = small()
    sparsify(model, Recipe("razor", ratio))
    model(x)
    with (
        pytest.raises(UsageError, match=f"16 bits; the largest that can is {largest('narrow'):g}"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x)


@pytest.mark.parametrize("width", PRECISIONS)
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_the_promise_is_kept(name, width, request):
    model, inputs = request.getfixturevalue(name)
    full = saved_bytes(model, inputs, autocast=PRECISIONS[width])

    @settings(max_examples=8, deadline=None, database=None)
    @given(ratio=st.floats(0.5, 0.95))
    def kept(ratio: float) -> None:
        if ratio > largest(width):
            with pytest.raises(UsageError, match="the largest that can is 0"):
                sparsify_within(model, Recipe("razor", ratio), inputs, autocast=PRECISIONS[width])
            return
        sparsify(model, Recipe("razor", ratio))
        try:
            saved = saved_bytes(model, inputs, autocast=PRECISIONS[width])
        finally:
            restore(model)
        assert saved <= (1 - ratio) * full

    kept()


class TestWithin:
    def test_spares_more_where_a_model_needs_it(self):
        model, x = small()
        full = saved_bytes(model, x)
        sparsify(model, Recipe("razor", 0.8))
        broken = saved_bytes(model, x)
        restore(model)
        assert broken > 0.2 * full
        names = sparsify_within(model, Recipe("razor", 0.8), x)
        assert saved_bytes(model, x) <= 0.2 * full
        restore(model)
        assert names == sparsify(model, Recipe("razor", 0.8))

    def test_leaves_a_promise_that_is_kept_alone(self):
        model, x = small(tokens=196)
        sparsify(model, Recipe("razor", 0.6))
        saved = saved_bytes(model, x)
        restore(model)
        sparsify_within(model, Recipe("razor", 0.6), x)
        assert saved_bytes(model, x) == saved

    def test_refuses_with_the_largest_that_can_be_kept(self):
        model, x = small()
        full = saved_bytes(model, x)
        with pytest.raises(UsageError, match="with this batch; the largest that can is") as error:
            sparsify_within(model, Recipe("razor", 0.91), x)
        assert not any(isinstance(module, RazorLayer) for module in model.modules())
        possible = float(str(error.value).split()[-1].rstrip("."))
        assert 0.5 < possible < 0.91
        sparsify_within(model, Recipe("razor", possible), x)
        assert saved_bytes(model, x) <= (1 - possible) * full

    def test_refuses_what_no_rule_keeps_in_16_bits(self):
        model, x = small()
        ratio = (largest("narrow") + largest("wide")) / 2
        with pytest.raises(UsageError, match="16 bits"):
            sparsify_within(model, Recipe("razor", ratio), x, autocast=torch.bfloat16)
        assert not any(isinstance(module, RazorLayer) for module in model.modules())

    @pytest.mark.parametrize("method", ["full", "backrazor", "int8"])
    def test_other_methods_promise_nothing(self, method):
        model, x = small()
        got = sparsify_within(model, Recipe(method, 0.9), x)
        restore(model)
        assert got == sparsify(model, Recipe(method, 0.9))


@pytest.mark.parametrize("rows", [1, 7, 127, 128, 130, 256, 800])
def test_blocks_are_equal_and_no_smaller_than_they_may_be(rows):
    rule, x = Quantised(8, rows=128), torch.randn(rows, 3)
    kept = rule.keep(x)
    blocks = len(kept[1])
    assert rows % blocks == 0
    assert blocks == 1 or rows // blocks >= 128
    assert (rule.restore(kept, x.shape) - x).abs().max() < 0.05
    if rows == 800:
        assert blocks == 5
