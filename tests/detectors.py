"""Small detection models of every kind, in folders as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForObjectDetection

STRETCHED = {"do_normalize": False, "size": {"height": 64, "width": 64}}
LETTERBOX = {"do_normalize": True, "size": {"shortest_edge": 64, "longest_edge": 64}}
SIZES = {"layer_type": "basic", "embedding_size": 16, "depths": [1] * 4}
SIZES |= {"hidden_sizes": [16, 32, 32, 32]}
LEVELS = {"out_features": ["stage2", "stage3", "stage4"]}
LAYERS = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_layers": 2}
LAYERS |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 12}
PLAIN = {"model_type": "resnet", **SIZES}
OF_DETR = {**LAYERS, "encoder_layers": 1, "backbone": None, "use_timm_backbone": False}
OF_RT_DETR: dict[str, Any] = {
    **LAYERS,
    "encoder_in_channels": [32] * 3,
    "encoder_hidden_dim": 32,
    "decoder_in_channels": [32] * 3,
    "hidden_expansion": 0.5,
    "backbone_config": {"model_type": "rt_detr_resnet", **SIZES, **LEVELS},
}
HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 32, 32],
    "stage_mid_channels": [8] * 4,
    "stage_out_channels": [16, 32, 32, 32],
    "hidden_sizes": [16, 32, 32, 32],
    "stage_num_blocks": [1] * 4,
    "stage_downsample": [False, True, True, True],
    "stage_light_block": [False, False, True, True],
    "stage_kernel_size": [3, 3, 5, 5],
    "stage_numb_of_layers": [1] * 4,
    **LEVELS,
}
# Type of model -> its config.
KINDS: dict[str, dict[str, Any]] = {
    "detr": {**OF_DETR, "auxiliary_loss": True, "backbone_config": PLAIN},
    "deformable_detr": {
        **OF_DETR,
        "num_feature_levels": 3,
        "auxiliary_loss": True,
        "backbone_config": {**PLAIN, **LEVELS},
    },
    "rt_detr": OF_RT_DETR,
    "rt_detr_v2": OF_RT_DETR,
    "d_fine": {
        **OF_RT_DETR,
        "depth_mult": 0.34,
        "decoder_n_points": [2, 2, 2],
        "backbone_config": HGNET,
    },
    "yolos": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": [64, 96],
        "num_detection_tokens": 12,
        "use_mid_position_embeddings": False,
    },
}


# Settings of an RT-DETR with 0.6 of its operations: no denoising, one decoder layer.
PLAIN_RT_DETR: dict[str, Any] = {"num_denoising": 0, "decoder_layers": 1}


def detector(kind: str, folder: Path, classes: int = 3, **changes: Any) -> Path:
    """Writes a model with weights that are not symmetric, as of a trained one, into a folder.

    changes: of its config.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**KINDS[kind], **changes}, num_labels=classes)
    model = AutoModelForObjectDetection.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    processor = STRETCHED if "rt_detr" in kind or kind == "d_fine" else LETTERBOX
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
