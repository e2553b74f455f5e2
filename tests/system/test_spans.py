"""Spans in which layers pack: all of them, and only where someone watches."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from razorctl.system.spans import watched
from tests.cases import CASES


@pytest.fixture
def spans():
    """The watcher, and how often it was entered."""

    @contextmanager
    def span():
        span.entered += 1
        yield

    span.entered = 0
    return span


# Batch norms in evaluation: their statistics are fixed.
FIXED = [case for case in CASES if isinstance(CASES[case].build(), nn.modules.batchnorm._BatchNorm)]
# They keep nothing themselves.
NOTHING = ("mean pool", "adaptive mean pool", "mean pool of volumes")
NOTHING += ("adaptive mean pool of volumes", "drop path")
NOTHING += ("post-norm branches", "eva post-norm branches")


@pytest.mark.parametrize("case", CASES)
def test_every_layer_packs_in_a_span(case, spans):
    layer, shape = CASES[case].layer(), CASES[case].shapes[0]
    with watched(spans):
        layer.eval()(torch.randn(shape, requires_grad=True))
        before = spans.entered
        assert before == 0 or case in FIXED
        layer.train()(torch.randn(shape, requires_grad=True))
        assert spans.entered > before or case in NOTHING
