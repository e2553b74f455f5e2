"""Bytes by module of any model, to the byte, without changing it."""

import copy

import pytest
import torch
from torch import nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer
from razorctl.training.kept_bytes import trace_kept_bytes


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_rows_sum_to_what_the_model_saves(autocast):
    model, x, recipe = net().eval(), torch.randn(32, 64), Recipe("backrazor", 0.5)
    full = saved_bytes(model, x, autocast=autocast)
    before = copy.deepcopy(model.state_dict())
    traced = trace_kept_bytes(model, x, recipe, autocast=autocast)
    assert not any(isinstance(module, RazorLayer) for module in model.modules())
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    sparsify(model, recipe)
    own = saved_bytes(model, x, autocast=autocast)
    assert traced.result()["totals"] == {"saved_bytes": own, "full_saved_bytes": full}
    assert trace_kept_bytes(model, x, autocast=autocast) == traced  # of the sparsified one, too
    with pytest.raises(UsageError, match="sparsified by another recipe"):
        trace_kept_bytes(model, x, Recipe("backrazor", 0.9))


def test_nothing_is_computed():
    with torch.device("meta"):
        model, x = nn.Linear(1 << 20, 1 << 20), torch.zeros(4, 1 << 20)
    (row,) = trace_kept_bytes(model, {"input": x}, Recipe("full")).rows
    assert (row.module, row.type, row.kind) == ("", "Linear", "linear")
    assert row.full_saved_bytes == row.saved_bytes == x.nbytes


def test_the_loss_counts_where_it_is_asked_for():
    model, x = net(), torch.randn(32, 64)

    def forward(model, inputs):
        return model(inputs).exp().sum()

    plain, more = (trace_kept_bytes(model, x, Recipe("full"), forward=f) for f in (None, forward))
    rest = {row.module: row.full_saved_bytes for row in more.rows}
    assert rest == {row.module: row.full_saved_bytes for row in plain.rows} | {"": x.nbytes}


@pytest.mark.parametrize(
    ("model", "inputs", "sentence"),
    [
        (net(), {"rows": 3}, "the inputs of Sequential have no tensor"),
        (nn.Sequential(nn.Embedding(9, 9)), torch.zeros(3, dtype=torch.long), "no layer of"),
    ],
)
def test_what_has_nothing_to_trace_is_refused(model, inputs, sentence):
    with pytest.raises(UsageError, match=sentence):
        trace_kept_bytes(model, inputs)
