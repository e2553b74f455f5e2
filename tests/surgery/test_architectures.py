"""`sparsify` on six cheap architectures of timm; the bench has one of each of its files."""

import pytest
import timm

from scripts.bench.architectures import CASES, COSINE, check

MODULES = [
    "byobnet",
    "edgenext",
    "mambaout",
    "maxxvit",
    "mobilenetv3",
    "nfnet",
]


# The derivative of hard swish jumps at 3 and -3, where codes may be on the other side.
JUMPS = {"mobilenetv3": 0.9994}


@pytest.mark.parametrize("module", MODULES)
def test_razor_on(module):
    if not timm.is_model(CASES[module].model):
        pytest.skip("a later timm has it")
    row = check(CASES[module])
    low = [f"the cosine is below {COSINE}"] if module in JUMPS else []
    assert row["faults"] == low, row
    assert row["cosine"] >= JUMPS.get(module, COSINE)
