"""Tokens that are drawn for a continuation."""

from types import SimpleNamespace

import pytest
import torch

from razorctl.errors import DataError
from razorctl.training.predicting.continuations import _drawing, _prompts


def test_draws_have_the_distribution_of_the_temperature():
    logits, draws = torch.tensor([1.0, 0.0, -0.5, 2.0]), 4000
    drawn = _drawing([7], 1.5, seed=3)
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[drawn(logits[None]).argmax()] += 1
    expected = torch.softmax(logits / 1.5, 0)
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() < 4 * error).all()


@pytest.mark.parametrize(("row", "seed"), [(1, 0), (0, 1)])
def test_rows_and_seeds_draw_otherwise(row, seed):
    logits = torch.zeros(1, 50)
    first, again, other = (_drawing([r], 1.0, s)(logits) for r, s in ((0, 0), (0, 0), (row, seed)))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert (first != other).all()


def test_at_temperature_0_the_logits_stay():
    logits = torch.randn(2, 5)
    assert _drawing([0, 1], 0.0, 0)(logits) is logits


def test_a_prompt_without_tokens_is_refused():
    writer = SimpleNamespace(prompt=lambda row: [], longest=None)
    part = SimpleNamespace(
        data=[{"text": "-"}],
        places=[("a.txt", 0)],
        good=[0],
        place=lambda number: f"line {number + 1}",
    )
    with pytest.raises(DataError, match="line 1 has no tokens to continue"):
        list(_prompts(writer, part, 3))
