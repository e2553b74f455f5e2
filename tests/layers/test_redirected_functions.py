"""Functions that stock code calls are methods of a razor layer, by whatever name it calls them."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import functional

from razorctl.layers.attention.redirected_functions import redirected


class Attention:
    def attend(self, *args, **kwargs):
        return "attended", args, kwargs


def usual(self, x, *, scale=2):
    return F.gelu, F.scaled_dot_product_attention(x, x, x, scale=scale)


def unusual(self, x, *, scale=2):
    return F.gelu, functional.scaled_dot_product_attention(x, x, x, scale=scale)


@pytest.mark.parametrize("forward", [usual, unusual])
def test_attention_of_stock_code(forward):
    x = torch.ones(1)
    gelu, found = redirected(Attention(), forward, x, scale=3)
    assert gelu is F.gelu
    assert found == ("attended", (x, x, x), {"scale": 3})
