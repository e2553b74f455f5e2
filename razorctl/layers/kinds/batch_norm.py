"""BatchNorm that stores x_hat by a rule; running statistics are updated as in stock.

In eval mode its statistics are fixed. While other layers train, dx is then exact without x, and
x_hat is stored only for the gradient of the weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.layers.base import Swaps
from razorctl.layers.kinds.channel_norm import ChannelNorm, images_as
from razorctl.ops.batch_norm import batch_norm_grad
from razorctl.ops.images import as_they_lie, memory_format
from razorctl.rules.packed import Packed, PackedCodes

aten = torch.ops.aten


class BatchNorm(ChannelNorm):
    """Base of razor BatchNorms."""

    num_features: int
    momentum: float | None
    track_running_stats: bool
    running_mean: Any  # Tensor or None
    running_var: Any
    num_batches_tracked: Any
    _check_input_dim: Callable[[Tensor], None]

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        channels: int = module.num_features  # type: ignore[assignment]
        return channels

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        """Whether running statistics are used instead of the batch's."""
        return not self.training and self.running_mean is not None

    @property
    def saving(self) -> bool:
        """Whether this pass stores for backward: in eval mode too, with fixed statistics."""
        return self.may_save and (self.training or self.fixed)

    def takes(self, x: Tensor) -> bool:
        # Stock raises an error for one value per channel.
        return super().takes(x) and (self.fixed or x.numel() > x.shape[1])

    def normalized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._check_input_dim(x)
        mean, var, by = self.running_mean, self.running_var, self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            by = 1.0 / float(self.num_batches_tracked) if by is None else by
        if self.training and not self.track_running_stats:
            mean = var = None
        # The function behind F.batch_norm, which also returns the statistics of the batch.
        y, of_batch, rstd, *_ = torch._batch_norm_impl_index(
            x,
            self.weight,
            self.bias,
            mean,
            var,
            training=not self.fixed,
            momentum=by or 0.0,
            eps=self.eps,
            cudnn_enabled=torch.backends.cudnn.enabled,
        )
        if self.fixed:
            dtype = torch.promote_types(x.dtype, torch.float32)
            of_batch, rstd = mean.to(dtype), torch.rsqrt(var.to(dtype) + self.eps)
        shape = 1, -1, *[1] * (x.dim() - 2)
        return y, of_batch.view(shape), rstd.view(shape)

    def gradients(
        self, dy: Tensor, packed: Packed, weight: Tensor | None, rstd: Tensor, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        lie = as_they_lie(dy.device, dy.shape, memory_format(dy))
        if lie and mask[0] and isinstance(packed, PackedCodes):
            return batch_norm_grad(dy, packed.copy, weight, rstd.view(-1))
        # x_hat has mean 0 and deviation 1, so 1 / std of x is multiplied into the weight.
        rstd = rstd.view(-1)
        scale = rstd if weight is None else rstd * weight
        zeros = torch.zeros_like(rstd)
        dx, dw, db = aten.native_batch_norm_backward(
            dy,
            images_as(packed, dy),
            scale,
            running_mean=None,
            running_var=None,
            save_mean=zeros,
            save_invstd=zeros + 1,
            train=True,
            eps=0.0,
            output_mask=mask,
        )
        return dx, dw, db


SWAPS: Swaps = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNorm)
