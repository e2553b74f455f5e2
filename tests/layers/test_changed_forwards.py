"""Classes whose forward is patched: razor classes that were written for another one leave it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from razorctl import Recipe, restore, sparsify
from razorctl.layers import by_type, known_forwards
from razorctl.layers.known_forwards import name_of, release
from razorctl.layers.recognition.razor_class import razor_for
from tests.cases import CASES
from tests.layers.test_every_layer import run
from tests.layers.test_known_forwards import other, registered

REGISTERED = registered()
every_one = pytest.mark.parametrize("kind", REGISTERED, ids=name_of)
BUILDS = {type(case.build()): case for case in CASES.values()}
WARNING = "another release or a patch has changed forwards"


def uses(kind: type[nn.Module]) -> tuple[Any, ...]:
    """The razor class and the connections of a class, and whether it may follow a norm."""
    razor = by_type.razor_of(kind)
    razor = razor if razor is not None and razor.rewrites else None
    return razor, by_type.connections_of(kind), kind in by_type.linear_first()


@every_one
def test_a_changed_forward_is_not_written_again(kind, monkeypatch):
    before = uses(kind)
    monkeypatch.setattr(kind, "forward", other(kind.forward))
    for was, now in zip(before, uses(kind), strict=True):
        assert now != was or not was
    assert known_forwards.changed([kind, nn.Module, kind]) == [f"{kind.__name__} ({release(kind)})"]


@pytest.mark.parametrize("kind", [kind for kind in REGISTERED if kind in BUILDS], ids=name_of)
def test_a_module_with_a_changed_forward_computes_that(kind, monkeypatch, caplog):
    case = BUILDS[kind]
    layer, x = case.build().train(), torch.randn(case.shapes[0])
    written = razor_for(layer)
    monkeypatch.setattr(kind, "forward", other(kind.forward))
    want = run(copy.deepcopy(layer), x)
    model = nn.ModuleList([layer, nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
    sparsify(model, Recipe("razor", ratio=0.5))
    said = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(said) == 1
    assert f"{kind.__name__} ({release(kind)})" in said[0]
    if written is not None and written.rewrites:
        assert not isinstance(layer, written)
    got = run(layer, x)
    assert torch.equal(got[0], want[0])
    assert torch.cosine_similarity(got[1].flatten(), want[1].flatten(), dim=0) > 0.97
    restore(model)
    assert type(layer) is kind


def test_a_forward_that_is_patched_later_runs_by_its_own_code(monkeypatch):
    """A razor class that runs the code of a forward does not run that of an earlier one."""

    class Activated(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    model = nn.Sequential(nn.Linear(8, 8), Activated(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    sparsify(model)
    model(x)
    restore(model)
    monkeypatch.setattr(Activated, "forward", lambda self, x: torch.relu(-x))
    want = model(x)
    sparsify(model)
    assert torch.equal(model(x), want)
