"""ProxylessNAS-Mobile (Cai et al., 2019), the network in Back Razor's appendix, of timm's blocks.

timm lacks this architecture, and no library has its weights. It can be planned and profiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.errors import MissingError
from razorctl.models.model import Size
from razorctl.models.timm.classification import TimmClassifier

if TYPE_CHECKING:
    from torch import nn

# A block is an inverted residual (ir) with repeats r, kernel k, stride s, expansion e, channels c.
STAGES = (
    ("ds_r1_k3_s1_e1_c16_noskip",),
    ("ir_r1_k5_s2_e3_c32", "ir_r1_k3_s1_e3_c32"),
    ("ir_r1_k7_s2_e3_c40", "ir_r1_k3_s1_e3_c40", "ir_r2_k5_s1_e3_c40"),
    ("ir_r1_k7_s2_e6_c80", "ir_r3_k5_s1_e3_c80"),
    ("ir_r1_k5_s1_e6_c96", "ir_r3_k5_s1_e3_c96"),
    ("ir_r1_k7_s2_e6_c192", "ir_r1_k7_s1_e6_c192", "ir_r2_k7_s1_e3_c192"),
    ("ir_r1_k7_s1_e6_c320",),
)
NAME = "proxylessnas"


@dataclass(frozen=True, kw_only=True)
class Proxyless(TimmClassifier):
    """ProxylessNAS-Mobile without pretrained weights."""

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        if pretrained:
            raise MissingError(
                f"no library has pretrained weights of {NAME}; plan and profile it, and train "
                "another model, such as mobilenetv2."
            )
        from timm.models.efficientnet import EfficientNet, decode_arch_def
        from torch import nn

        blocks = decode_arch_def([list(stage) for stage in STAGES])
        model: nn.Module = EfficientNet(
            block_args=blocks,
            num_classes=classes,
            num_features=1280,
            stem_size=32,
            fix_stem=True,
            act_layer=partial(nn.ReLU6, inplace=True),
        )
        return model

    def files(self, weights: bool) -> Sequence[Path]:
        return ()


PROXYLESS = Proxyless(
    name=NAME,
    summary="ProxylessNAS-Mobile, 224 px; to plan and profile, as no library has its weights",
    task="classification",
    defaults={"batch_size": 8, "sgd": {"learning_rate": 0.05}, "adamw": {"learning_rate": 1e-3}},
    timm_name=NAME,
)
