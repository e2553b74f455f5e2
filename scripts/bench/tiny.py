"""Builds a small model of any class of transformers, and inputs that it takes."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from record import reason
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY, PIXELS, ROWS = 64, 4, 4, 64, 120, 64, 4
LARGEST = 20_000_000  # parameters
# The value of a setting, by all the names that classes give it.
SETTINGS: tuple[tuple[int | float, str], ...] = (
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embed_dim encoder_hidden_size decoder_hidden_size"
        " projection_dim embedding_size hidden_dim output_channels",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads"
        " num_encoder_attention_heads num_decoder_attention_heads num_attention_head num_heads",
    ),
    (2, "num_key_value_heads"),
    (
        WIDTH // HEADS,
        "head_dim d_kv attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
    (WIDTH // 2, "q_lora_rank kv_lora_rank num_pos_feats"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
        " num_encoder_layers num_decoder_layers depth",
    ),
    (
        2 * WIDTH,
        "intermediate_size d_ff d_inner n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim"
        " decoder_intermediate_size encoder_intermediate_size mlp_dim ffn_hidden_size",
    ),
    (4, "num_experts num_local_experts n_routed_experts"),
    (2, "num_experts_per_tok"),
    (1, "n_group topk_group"),
    (32, "moe_intermediate_size"),
    (128, "max_position_embeddings n_positions max_source_positions max_target_positions"),
    (VOCABULARY, "vocab_size"),
    (2 * WIDTH, "mamba_d_ssm"),
    (8, "mamba_n_heads"),
    (16, "mamba_d_head mamba_d_state"),
    (32, "chunk_size mamba_chunk_size"),
    (PIXELS, "image_size"),
    (8, "patch_size"),
    (
        0.0,
        "hidden_dropout_prob attention_probs_dropout_prob attention_dropout dropout"
        " activation_dropout embd_pdrop resid_pdrop hidden_dropout classifier_dropout layerdrop"
        " encoder_layerdrop decoder_layerdrop",
    ),
)
SMALL = {name: value for value, names in SETTINGS for name in names.split()}
SPECIAL = ("pad", "bos", "eos", "sep", "cls", "decoder_start")  # tokens
# Lists of the channels of stages.
CHANNELS = ("hidden_sizes", "encoder_in_channels", "decoder_in_channels", "stage_out_channels")
# Inputs that are embeddings.
EMBEDDED = ("hidden_states", "inputs_embeds", "inputs", "input_values", "decoder_input_values")
# Settings that only the class itself can know.
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
CONVNEXT = {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]}
SWIN = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
DETR = {
    "backbone": None,
    "use_timm_backbone": False,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]} | RESNET,
}
SERIES = {"prediction_length": 8, "context_length": 32}
OWN: dict[str, dict[str, Any]] = {
    "autoformer": SERIES,
    "bamba": {"attn_layer_indices": [1], "num_key_value_heads": 2, "mamba_n_heads": 8},
    "bit": RESNET | {"num_groups": 8},
    "conditional_detr": DETR,
    "cpmant": {"init_std": 0.02, "dim_ff": 2 * WIDTH, "dim_head": WIDTH // HEADS},
    "dab-detr": DETR,
    "deformable_detr": DETR,
    "detr": DETR,
    "codegen": {"rotary_dim": 16},
    "convnext": CONVNEXT,
    "convnextv2": CONVNEXT,
    "dinov3_convnext": CONVNEXT,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.5},
    "esm": {"pad_token_id": 1, "mask_token_id": 2, "vocab_size": VOCABULARY},
    "esmc": {"num_key_value_heads": HEADS},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 16},
    "hiera": {"embed_dim": 16, "num_heads": [1, 2, 4, 8], "depths": [1, 2, 2, 1]},
    "hunyuan_v1_dense": {"head_dim": WIDTH // HEADS},
    "hunyuan_v1_moe": {"head_dim": WIDTH // HEADS},
    "informer": SERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "levit": {"patch_size": 16},
    "lilt": {"hidden_size": 96},
    "luke": {"entity_vocab_size": VOCABULARY},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "hidden_size": WIDTH},
    "mimi": {"upsample_groups": WIDTH, "num_filters": 4, "num_quantizers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "resnet": RESNET,
    "swin": SWIN,
    "swinv2": SWIN,
    "table-transformer": DETR,
    "time_series_transformer": SERIES,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}


class SizeError(ValueError):
    """A model that stays large in small settings."""


class InputsError(ValueError):
    """A model that runs with none of the inputs that are known."""


def settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a config that make its model small; those of configs inside are whole."""
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            small[name] = SMALL[name]
        if isinstance(value, list | tuple) and value:
            if name == "image_size":
                small[name] = [PIXELS] * len(value)
            elif name == "depths":
                small[name] = [min(depth, 2) for depth in value]
            elif name in CHANNELS and max(value) >= 2048:
                small[name] = [size // 32 for size in value]
    if "kv_lora_rank" in small:  # every head has its own keys
        small["num_key_value_heads"] = HEADS
    for token in SPECIAL:
        name = f"{token}_token_id"
        if isinstance(at := getattr(config, name, None), int) and at >= VOCABULARY:
            small[name] = 1
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            small[name] = type(inner)(**settings(inner)).to_dict()
    return small | OWN.get(config.model_type, {})


def class_name(kind: str) -> str:
    """The class of a kind of model without a head."""
    names = MODEL_MAPPING_NAMES[kind]
    return names if isinstance(names, str) else names[0]


def build(kind: str) -> nn.Module:
    """A small model in train mode, of random weights, of which none begins at zero.

    Layer scales that begin near zero would let no gradient pass. Raises what the class raises, and
    SizeError if the model is large all the same.

    Args:
        kind: a key of transformers' table of models, such as "t5".
    """
    usual = CONFIG_MAPPING[kind]()
    config = type(usual)(**settings(usual))
    config.use_cache = False
    config.apply_spec_augment = False  # it draws by NumPy
    make = getattr(transformers, class_name(kind))
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # some read values
        _check_size(make(copy.deepcopy(config)))
    torch.manual_seed(0)
    model: nn.Module = make(config)
    _check_size(model)
    for parameter in model.parameters():
        if parameter.numel() and parameter.detach().abs().max() <= 1e-4:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def _check_size(model: nn.Module) -> None:
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise SizeError(f"{count / 1e6:.0f} million parameters")


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """Random inputs with which a model that `build` has made runs: as few as that takes.

    They are its main one with the tokens of a decoder, or all that are known and it has an argument
    for. Raises InputsError with the error of the first try.
    """
    takes = inspect.signature(model.forward).parameters.keys()
    main: Any = model.main_input_name
    errors: list[Exception] = []
    for known in _known(model):
        made = {name: x for name, x in known.items() if name in takes}
        for names in ((main, "decoder_input_ids"), tuple(made)):
            few = {name: made[name] for name in names if name in made}
            try:
                with torch.no_grad():
                    model(**few)
            except Exception as failed:
                errors.append(failed)
            else:
                return few
    raise InputsError(f"{main}, {reason(errors[0])}") from errors[0]


def _known(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Random inputs by name, in the shapes that most classes take, and then in others."""
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size or PIXELS,) * 2
    bins = _setting(config, "num_mel_bins feature_projection_input_dim feature_size", 80)
    frames = getattr(vision, "num_frames", None) or 4
    patch = channels * _setting(vision, "patch_size", 8) ** 2
    patches = patch * _setting(vision, "temporal_patch_size", 1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def tokens(most: int, *more: int) -> Tensor:
        return torch.randint(3, most, (ROWS, TOKENS, *more), generator=generator)

    text = {name: tokens(VOCABULARY - 20) for name in ("input_ids", "decoder_input_ids")}
    text |= {"bbox": tokens(100, 4).sort(-1).values}
    images, audio = (ROWS, channels, height, width), (ROWS, 8000)
    yield {
        **text,
        "pixel_values": draw(*images),
        "input_values": draw(*audio),
        "input_features": draw(ROWS, bins, 256),
    }
    yield {
        **text,
        "pixel_values": draw(2, frames, *images[1:]),
        "input_values": draw(ROWS, 1, 8000),
        "input_features": draw(ROWS, 256, bins),
    }
    yield {  # images as rows of patches
        "pixel_values": draw(ROWS, 64, patch),
        "pixel_attention_mask": torch.ones(ROWS, 64, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[8, 8]] * ROWS),
        "hidden_states": draw(ROWS * 64, patches),
        "grid_thw": torch.tensor([[1, 8, 8]] * ROWS),
    }
    embedded = {name: draw(ROWS, TOKENS, WIDTH) for name in EMBEDDED}
    yield {**embedded, "decoder_input_ids": text["decoder_input_ids"]}
    yield {
        **text,
        "pixel_values": draw(ROWS, frames, *images[1:]),
        "visual_feats": draw(ROWS, 36, _setting(config, "visual_feat_dim", WIDTH)),
        "visual_pos": draw(ROWS, 36, 4),
    }
    length = _setting(config, "context_length", TOKENS)
    ahead = _setting(config, "prediction_length", 8)
    past = length + max(getattr(config, "lags_sequence", None) or [0])
    features = _setting(config, "num_time_features", 0)
    for variables in ((), (_setting(config, "num_input_channels", 1),)):
        yield {
            "past_values": draw(ROWS, past, *variables),
            "past_time_features": draw(ROWS, past, features),
            "past_observed_mask": torch.ones(ROWS, past, *variables),
            "future_values": draw(ROWS, ahead, *variables),
            "future_time_features": draw(ROWS, ahead, features),
        }


def _setting(config: Any, names: str, default: int) -> int:
    """The first of some settings that a config or one inside it has."""
    inner = [c for c in vars(config).values() if isinstance(c, PreTrainedConfig)]
    for name in names.split():
        for owner in (config, *inner):
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return default
