import pytest
import torch

from razorctl.ops.columns import gather_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 13), (0, 5), (33, 257)])
def test_equals_picking_one_by_one(rows, columns, dtype, device):
    x = torch.randn(rows, columns, device=device).to(dtype)
    index = torch.randperm(columns, device=device)[: columns // 2 + 1].sort().values
    got = gather_columns(x, index)
    assert got.is_contiguous()
    assert got.shape == (rows, len(index))
    for to, of in enumerate(index.tolist()):
        assert torch.equal(got[:, to], x[:, of])
