import pytest
import torch

from razorctl.ops.triton import columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 13), (0, 5), (33, 257)])
def test_equals_indexing(rows, width, dtype, interpreted):
    interpreted(columns)
    x = (100 * torch.randn(rows, width)).to(dtype)
    index = torch.randperm(width)[: width // 2 + 1].sort().values
    for layout in (x, x.T.contiguous().T, torch.cat([x, x], 1)[:, :width]):
        got = columns.gather_columns(layout, index)
        assert got.is_contiguous()
        assert torch.equal(got, x[:, index])
