"""The normalized input of the norm after a residual connection, recomputed from a few-bit copy.

x -- norm -- y -- ... -- f      the copy is of x_hat = (x - mean) rstd, or of x itself
x + gamma f -- norm             is normalized by the statistics of the forward pass

Backward, for x_hat and f [rows, columns]: z = x_hat / rstd + mean + gamma f, and a copy in 8 bits
of z_hat = (z - sum_mean) sum_rstd. Neither z nor z_hat exists as a whole.
"""

from torch import Tensor

from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.quantize import dequantize, empty_copy, quantize

BITS = 8  # for int8 GEMMs


@op(
    empty=lambda copy, f, *_: empty_copy(f, f.shape[0], f.shape[1], BITS, copy.tile_rows),
    fused=Fused(reduces=True),
)
def norm_again(
    copy: FewBitCopy,
    f: Tensor,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    sum_mean: Tensor | None,
    sum_rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The copy of z_hat that `quantize` returns, with tiles of as many rows as the copy of x_hat.

    Args:
        copy: The copy of x_hat, or of x without rstd.
        f: [rows, columns].
        gamma: [columns], None for 1.
        mean: Of x, [rows, 1], None for 0.
        rstd: 1 / std of x, [rows, 1], None for 1.
        sum_mean: Of z, [rows, 1], None for 0.
        sum_rstd: 1 / std of z, [rows, 1].
    """
    x = dequantize.body(copy, len(f), sum_rstd.dtype)
    x = x if rstd is None else x.div_(rstd)
    x = x if mean is None else x.add_(mean)
    x.add_(f) if gamma is None else x.addcmul_(f.to(x.dtype), gamma.to(x.dtype))
    return quantize.body(x, BITS, copy.tile_rows, sum_mean, sum_rstd)
