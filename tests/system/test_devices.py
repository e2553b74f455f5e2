import pytest
import torch

from razorctl.errors import UsageError
from razorctl.system import devices


def test_the_default_is_cuda_where_there_is_any():
    assert devices.find(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["warp", "cuda:99"])
def test_what_cannot_be_used_is_refused_with_the_mend(name):
    with pytest.raises(UsageError, match=rf"device '{name}' cannot be used \(.+\); try cpu\.$"):
        devices.find(name)


def test_names(device):
    known = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    assert devices.name(device) == known
