import pytest

from razorctl import gpus
from razorctl.errors import UsageError

PRECISIONS = {"fp32", "tf32", "fp16", "bf16", "int8", "fp8"}


@pytest.mark.parametrize("name", gpus.names())
def test_every_preset_is_plausible(name):
    gpu = gpus.load(name)
    assert gpu.name.startswith("NVIDIA ")
    assert gpu.source
    assert gpu.memory_bytes % 2**20 == 0
    assert 4 <= gpu.memory_bytes / 2**30 <= 300
    major, minor = map(int, gpu.compute_capability.split("."))
    assert (major, minor) >= (7, 0)
    assert 2e11 < gpu.bandwidth < 2e13
    assert {"fp32", "fp16"} <= set(gpu.rates) <= PRECISIONS
    assert all(1e12 < rate < 1e16 for rate in gpu.rates.values())
    assert ("bf16" in gpu.rates) == ("tf32" in gpu.rates) == (major >= 8)
    assert ("fp8" in gpu.rates) == ((major, minor) >= (8, 9))


def test_the_mission_cards_are_there():
    assert {"rtx-2080-ti", "rtx-4090", "a100-40gb", "a100-80gb"} <= set(gpus.names())


def test_unknown_gpu_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'rtx-4090'"):
        gpus.load("rtx4090")
