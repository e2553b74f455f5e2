"""Repositories on the hub that have a registered name, with their configs.

A config contains only what differs from the defaults of transformers.
"""

from collections.abc import Mapping
from typing import Any

from razorctl.config.tasks import LABELED, OF_ROWS, Task

ENCODER: tuple[Task, ...] = (*LABELED, "masked-lm", "embedding")
TOWERS: tuple[Task, ...] = (*OF_ROWS, "embedding")
DECODER: tuple[Task, ...] = ("causal-lm", *LABELED, "embedding")


def qwen(
    name: str,
    size: str,
    columns: int,
    layers: int,
    heads: int,
    key_heads: int,
    inner: int,
    vocab_size: int = 151936,
    tied: bool = True,
) -> dict[str, Any]:
    """The entry of a Qwen2.5.

    inner: columns inside its MLPs. tied: whether input and output share an embedding.
    """
    config = {
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": columns,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": inner,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
    }
    summary = f"Qwen2.5, {size} parameters"
    return {"summary": summary, "repo": f"Qwen/Qwen2.5-{name}", "config": config, "tasks": DECODER}


def llama(
    name: str,
    title: str,
    columns: int,
    layers: int,
    heads: int,
    inner: int,
    factor: float = 32.0,
    tied: bool = True,
) -> dict[str, Any]:
    """The entry of a Llama 3; see `qwen`. factor: by which rotary positions are stretched."""
    config = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": columns,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": inner,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": tied,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }
    summary = f"{title} parameters; its repository needs access rights"
    return {"summary": summary, "repo": f"meta-llama/{name}", "config": config, "tasks": DECODER}


BASIC = {"hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}  # of small ResNets


def rt_detr(
    name: str, title: str, backbone: Mapping[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    """The entry of an RT-DETR; backbone: what differs from a ResNet-50."""
    resnet = {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]}
    return {
        "summary": f"{title}, 640 px",
        "repo": f"PekingU/{name}",
        "config": {
            "model_type": "rt_detr",
            "backbone_config": {**resnet, **(backbone or {})},
            **config,
        },
        "tasks": ("detection",),
        "modality": "image",
        "side": 640,
    }


REPOSITORIES: dict[str, dict[str, Any]] = {
    "bert-base": {
        "summary": "BERT-base, uncased, 110 M parameters",
        "repo": "google-bert/bert-base-uncased",
        "config": {"model_type": "bert"},
        "tasks": ENCODER,
    },
    "distilbert": {
        "summary": "DistilBERT, uncased, 66 M parameters",
        "repo": "distilbert/distilbert-base-uncased",
        "config": {"model_type": "distilbert"},
        "tasks": ENCODER,
    },
    "roberta-base": {
        "summary": "RoBERTa-base, 125 M parameters",
        "repo": "FacebookAI/roberta-base",
        "config": {
            "model_type": "roberta",
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
        "tasks": ENCODER,
    },
    "gpt2": {
        "summary": "GPT-2, 124 M parameters",
        "repo": "openai-community/gpt2",
        "config": {"model_type": "gpt2"},
        "tasks": DECODER,
    },
    "smollm2-135m": {
        "summary": "SmolLM2, 135 M parameters",
        "repo": "HuggingFaceTB/SmolLM2-135M",
        "config": {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "tasks": DECODER,
    },
    "qwen2.5-0.5b": qwen("0.5B", "494 M", 896, 24, 14, 2, 4864),
    "llama-3.2-1b": llama("Llama-3.2-1B", "Llama 3.2, 1.2 B", 2048, 16, 32, 8192),
    "qwen2.5-1.5b": qwen("1.5B", "1.5 B", 1536, 28, 12, 2, 8960),
    "qwen2.5-3b": qwen("3B", "3.1 B", 2048, 36, 16, 2, 11008),
    "qwen2.5-7b": qwen("7B", "7.6 B", 3584, 28, 28, 4, 18944, vocab_size=152064, tied=False),
    "llama-3.2-3b": llama("Llama-3.2-3B", "Llama 3.2, 3.2 B", 3072, 28, 24, 8192),
    "llama-3.1-8b": llama(
        "Llama-3.1-8B", "Llama 3.1, 8.0 B", 4096, 32, 32, 14336, factor=8.0, tied=False
    ),
    "smollm3-3b": {
        "summary": "SmolLM3, 3.1 B parameters",
        "repo": "HuggingFaceTB/SmolLM3-3B-Base",
        "config": {
            "model_type": "smollm3",
            "max_position_embeddings": 65536,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
        },
        "tasks": DECODER,
    },
    "rt-detr-r18": rt_detr(
        "rtdetr_r18vd",
        "RT-DETR, ResNet-18, 20 M parameters",
        {**BASIC, "depths": [2, 2, 2, 2]},
        encoder_in_channels=[128, 256, 512],
        hidden_expansion=0.5,
        decoder_layers=3,
    ),
    "rt-detr-r50": rt_detr("rtdetr_r50vd", "RT-DETR, ResNet-50, 43 M parameters"),
    "d-fine-s": {
        "summary": "D-FINE, small, 10 M parameters, 640 px",
        "repo": "ustc-community/dfine-small-coco",
        "config": {
            "model_type": "d_fine",
            "backbone_config": {
                "model_type": "hgnet_v2",
                "hidden_sizes": [128, 256, 512, 1024],
                "stem_channels": [3, 16, 16],
                "stage_in_channels": [16, 64, 256, 512],
                "stage_mid_channels": [16, 32, 64, 128],
                "stage_out_channels": [64, 256, 512, 1024],
                "stage_num_blocks": [1, 1, 2, 1],
                "stage_downsample": [False, True, True, True],
                "stage_light_block": [False, False, True, True],
                "stage_kernel_size": [3, 3, 5, 5],
                "stage_numb_of_layers": [3, 3, 3, 3],
                "use_learnable_affine_block": True,
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "encoder_in_channels": [256, 512, 1024],
            "decoder_layers": 3,
            "decoder_n_points": [3, 6, 3],
            "hidden_expansion": 0.5,
            "depth_mult": 0.34,
        },
        "tasks": ("detection",),
        "modality": "image",
        "side": 640,
    },
    "yolos-tiny": {
        "summary": "YOLOS-tiny, 6.5 M parameters, a plain ViT, 512 px",
        "repo": "hustvl/yolos-tiny",
        "config": {
            "model_type": "yolos",
            "hidden_size": 192,
            "intermediate_size": 768,
            "num_attention_heads": 3,
            "image_size": [800, 1333],
            "use_mid_position_embeddings": False,
        },
        "tasks": ("detection",),
        "modality": "image",
        "side": 512,
    },
    "segformer-b0": {
        "summary": "SegFormer-B0, 3.7 M parameters, 512 px, its encoder of ImageNet-1k",
        "repo": "nvidia/mit-b0",
        "config": {"model_type": "segformer"},
        "tasks": ("segmentation", *OF_ROWS),
        "modality": "image",
    },
    "clip-vit-b32": {
        "summary": "CLIP, ViT-B/32, 151 M parameters, 224 px",
        "repo": "openai/clip-vit-base-patch32",
        "config": {"model_type": "clip", "text_config": {"bos_token_id": 0, "eos_token_id": 2}},
        "tasks": TOWERS,
        "modality": "image",
    },
    "siglip-b16": {
        "summary": "SigLIP, ViT-B/16, 203 M parameters, 224 px",
        "repo": "google/siglip-base-patch16-224",
        # transformers' defaults are tokens of CLIP, beyond its vocabulary.
        "config": {
            "model_type": "siglip",
            "text_config": {"bos_token_id": None, "eos_token_id": None},
        },
        "tasks": TOWERS,
        "modality": "image",
    },
}
