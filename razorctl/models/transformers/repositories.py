"""Repositories on the hub that have a registered name, with their configs.

A config contains only what differs from the defaults of transformers.
"""

from typing import Any

from razorctl.config.tasks import LABELED, OF_ROWS, Task

ENCODER: tuple[Task, ...] = (*LABELED, "masked-lm")
DECODER: tuple[Task, ...] = ("causal-lm", *LABELED)
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
    "qwen2.5-0.5b": {
        "summary": "Qwen2.5, 494 M parameters",
        "repo": "Qwen/Qwen2.5-0.5B",
        "config": {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
        },
        "tasks": DECODER,
    },
    "llama-3.2-1b": {
        "summary": "Llama 3.2, 1.2 B parameters; its repository needs access rights",
        "repo": "meta-llama/Llama-3.2-1B",
        "config": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        "tasks": DECODER,
    },
    "segformer-b0": {
        "summary": "SegFormer-B0, 3.7 M parameters, 512 px, its encoder of ImageNet-1k",
        "repo": "nvidia/mit-b0",
        "config": {"model_type": "segformer"},
        "tasks": ("segmentation", *OF_ROWS),
        "modality": "image",
    },
}
