"""GroupNorm that stores x_hat by a rule."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.base import Swaps
from razorctl.layers.kinds.channel_norm import ChannelNorm, images_as
from razorctl.rules.packed import Packed

aten = torch.ops.aten


class GroupNorm(ChannelNorm):
    """Base of razor GroupNorms."""

    num_groups: int
    num_channels: int

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        channels: int = module.num_channels  # type: ignore[assignment]
        return channels

    def takes(self, x: Tensor) -> bool:
        # timm's `_fast_norm` may call APEX. Stock raises an error for one value per group.
        plain = not getattr(self, "_fast_norm", False)
        return plain and super().takes(x) and x[0].numel() > self.num_groups

    def normalized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        groups = x.reshape(len(x), self.num_groups, -1)
        groups = groups.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(groups, 2, correction=0)
        return y, self._of_channels(mean, x), self._of_channels((var + self.eps).rsqrt_(), x)

    def _of_channels(self, of_groups: Tensor, x: Tensor) -> Tensor:
        """Values per group, [batch, groups], repeated for each channel of `x`."""
        values = of_groups.repeat_interleave(self.num_channels // self.num_groups, 1)
        return values.view(*x.shape[:2], *[1] * (x.dim() - 2))

    def gradients(
        self, dy: Tensor, packed: Packed, weight: Tensor | None, rstd: Tensor, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        batch, channels, *image = dy.shape
        # x_hat has mean 0 and deviation 1.
        zeros = dy.new_zeros(batch, self.num_groups)
        weight = None if weight is None else weight.to(dy.dtype)
        dx, dw, db = aten.native_group_norm_backward(
            dy,
            images_as(packed, dy),
            mean=zeros,
            rstd=zeros + 1,
            weight=weight,
            N=batch,
            C=channels,
            HxW=torch.Size(image).numel(),
            group=self.num_groups,
            output_mask=mask,
        )
        return dx * rstd if mask[0] else None, dw, db


SWAPS: Swaps = {nn.GroupNorm: GroupNorm}
