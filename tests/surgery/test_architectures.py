"""`sparsify` on twelve cheap architectures of timm; the bench has one of each of its files."""

import pytest

from scripts.bench.architectures import CASES, check

MODULES = [
    "byobnet",
    "convnext",
    "edgenext",
    "efficientnet",
    "eva",
    "mambaout",
    "maxxvit",
    "mobilenetv3",
    "nfnet",
    "resnet",
    "starnet",
    "vision_transformer_relpos",
]


@pytest.mark.parametrize("module", MODULES)
def test_razor_on(module):
    row = check(CASES[module])
    assert row["faults"] == [], row
