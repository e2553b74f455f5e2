import torch

from razorctl.ops.cast import cast
from tests.references import opcheck


def test_it_is_the_plain_cast(device):
    x = torch.randn(5, 7, device=device)
    assert torch.equal(cast(x, torch.bfloat16), x.bfloat16())


def test_registration():
    opcheck(cast, (torch.randn(5, 7).T, torch.float16))
