"""Builds a small model of any class of transformers, and inputs that it takes."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
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
        " projection_dim embedding_size hidden_dim",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads"
        " num_encoder_attention_heads num_decoder_attention_heads num_attention_head",
    ),
    (2, "num_key_value_heads"),
    (
        WIDTH // HEADS,
        "head_dim d_kv attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim",
    ),
    (WIDTH // 2, "q_lora_rank kv_lora_rank"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
        " num_encoder_layers num_decoder_layers",
    ),
    (
        2 * WIDTH,
        "intermediate_size d_ff d_inner n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim"
        " decoder_intermediate_size encoder_intermediate_size mlp_dim ffn_hidden_size",
    ),
    (4, "num_experts num_local_experts n_routed_experts"),
    (2, "num_experts_per_tok"),
    (32, "moe_intermediate_size"),
    (128, "max_position_embeddings n_positions max_source_positions max_target_positions"),
    (VOCABULARY, "vocab_size"),
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
# Settings that only the class itself can know.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_key_value_heads": 2, "mamba_n_heads": 8},
    "codegen": {"rotary_dim": 16},
    "convnext": {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]},
    "convnextv2": {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]},
    "dinov3_convnext": {"hidden_sizes": [16, 32, 64, 64], "depths": [2, 2, 2, 2]},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 16},
    "hiera": {"embed_dim": 16, "num_heads": [1, 2, 4, 8], "depths": [1, 2, 2, 1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "hidden_size": WIDTH},
    "swin": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    "swinv2": {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
}


def settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a config that make its model small; those of configs inside are whole."""
    small: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            small[name] = SMALL[name]
    if "kv_lora_rank" in small:  # every head has its own keys
        small["num_key_value_heads"] = HEADS
    for token in SPECIAL:
        name = f"{token}_token_id"
        if isinstance(at := getattr(config, name, None), int) and at >= VOCABULARY:
            small[name] = 1
    for name, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            small[name] = type(inner)(**settings(inner)).to_dict()
    return small


def class_name(kind: str) -> str:
    """The class of a kind of model without a head."""
    names = MODEL_MAPPING_NAMES[kind]
    return names if isinstance(names, str) else names[0]


def build(kind: str) -> nn.Module:
    """A small model in train mode, of random weights, of which none begins at zero.

    Layer scales that begin near zero would let no gradient pass. Raises what the class raises, and
    ValueError if the model is large all the same.

    Args:
        kind: a key of transformers' table of models, such as "t5".
    """
    torch.manual_seed(0)
    usual = CONFIG_MAPPING[kind]()
    config = type(usual)(**settings(usual) | OWN.get(kind, {}))
    config.use_cache = False
    config.apply_spec_augment = False  # it draws by NumPy
    model: nn.Module = getattr(transformers, class_name(kind))(config)
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    for parameter in model.parameters():
        if parameter.numel() and parameter.detach().abs().max() <= 1e-4:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """Random inputs with which a model that `build` has made runs: as few as that takes.

    They are its main one with the tokens of a decoder, or all that are known and it has an argument
    for. Raises what the last try raises, and ValueError where none is known.
    """
    takes = inspect.signature(model.forward).parameters.keys()
    main: Any = model.main_input_name
    error: Exception = ValueError(f"inputs such as {main}")
    for known in _known(model):
        made = {name: x for name, x in known.items() if name in takes}
        for names in ((main, "decoder_input_ids"), tuple(made)):
            few = {name: made[name] for name in names if name in made}
            try:
                with torch.no_grad():
                    model(**few)
            except Exception as failed:
                error = failed if main in made else error
            else:
                return few
    raise error


def _known(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Random inputs by name, in the shapes that most classes take, and then in others."""
    generator = torch.Generator().manual_seed(1)
    config: Any = model.config
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) else (size or PIXELS,) * 2
    bins = getattr(config, "num_mel_bins", 80)
    frames = getattr(vision, "num_frames", None) or 4

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
