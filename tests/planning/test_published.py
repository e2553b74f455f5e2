"""Predicted times, against what timm published and what the cards cannot do."""

import pytest

from razorctl.planning import gpus
from razorctl.planning.times import on_card
from scripts.bench import planning


@pytest.mark.parametrize(
    "row",
    [row for row in planning.RATES if row.held],
    ids=lambda row: f"{row.gpu} {row.phase} {row.model}",
)
def test_predicted_rates_are_near_the_published(row):
    assert planning.predicted(row) == pytest.approx(row.rate, rel=planning.BARS[row.phase])


def test_a_t4_does_not_outrun_a_2080_ti():
    trace = planning.traced("vit_base_patch16_224", "train", 192, depth=1)
    t4, ti = (on_card(trace, gpus.load(name)).likely for name in ("t4", "rtx-2080-ti"))
    assert t4 > 1.5 * ti
