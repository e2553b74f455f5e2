"""Predictions against what steps take on a GPU, over the grid of the bench.

Each needs the card to itself: `pytest -n 0 tests/gpu`.
"""

import os

import pytest
import torch

from scripts.bench import planning

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs a card to itself: -n 0"),
]
LIBRARIES = 2**27  # bytes that cuBLAS may hold


@pytest.fixture(autouse=True)
def as_users_run():
    """Without the poison, for which fused attention takes another algorithm."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("point", planning.grid("cuda"), ids=lambda point: point.name)
def test_a_step_takes_what_is_predicted(point):
    row = planning.row(point, "cuda", planning.record.preset())
    predicted = row["predicted"]["peak_bytes"]
    allocated = row["measured"]["allocated_bytes"]
    assert row["over"] >= 0
    assert predicted <= 1.05 * allocated
    assert allocated <= predicted + LIBRARIES


def test_a_process_is_held_to_its_budget():
    from razorctl.system.devices import find, hold_to

    device = find("cuda")
    try:
        hold_to(2**28, device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**29, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
