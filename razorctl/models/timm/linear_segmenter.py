"""The module of `segmentation`."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class LinearSegmenter(nn.Module):
    """A class per pixel from the last features of a backbone; logits are upsampled bilinearly.

    images [batch, 3, height, width] -> logits [batch, classes, height, width].
    backbone: a timm model with `features_only`. data_config: see `models.images`.
    """

    def __init__(self, backbone: nn.Module, classes: int, data_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone, self.data_config = backbone, dict(data_config)
        info: Any = backbone.feature_info
        self.classifier = nn.Conv2d(info.channels()[-1], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images)[-1]
        if getattr(self.backbone, "output_fmt", "NCHW") == "NHWC":
            features = features.movedim(-1, 1)
        logits = self.classifier(features)
        return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)
