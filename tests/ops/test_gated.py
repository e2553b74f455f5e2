import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (70, 64)])
def test_gated_grad_is_that_of_autograd(rows, columns, function, device):
    dy, gate, up = 2 * torch.randn(3, rows, columns + 2, device=device)[..., :columns]
    gate.requires_grad_(), up.requires_grad_()
    y = FUNCTIONS[function].forward(gate) * up
    want = torch.autograd.grad(y, (gate, up), dy)
    with torch.no_grad():
        got = gated_grad(dy, gate.detach(), up.detach(), function)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
