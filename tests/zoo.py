"""Small models of the libraries, each with a batch, for tests over all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from timm.models import vision_transformer
from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import Tensor, nn

from tests.models import TEXT, bert, gpt2, torchvision_vit, vit

IDS = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(0))
TEXTS = {"input_ids": IDS, "labels": IDS}


def llama(
    kind: type = hf.LlamaForCausalLM, config: type = hf.LlamaConfig, **more: int
) -> nn.Module:
    """Two heads of queries to one of keys and values."""
    sizes = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **more}
    return kind(config(**sizes))  # type: ignore[no-any-return]


def t5() -> nn.Module:
    """With a cache of an encoder and a decoder."""
    sizes = {"d_model": 24, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes, vocab_size=50, dropout_rate=0.0, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config)


def distilbert() -> nn.Module:
    sizes = {"dim": 24, "hidden_dim": 48, "n_layers": 2, "n_heads": 3, "vocab_size": 50}
    return hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**sizes))


def dinov2() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    images = {"image_size": 16, "patch_size": 4}
    return hf.Dinov2ForImageClassification(hf.Dinov2Config(**sizes, **images, layerscale_value=0.5))


def adapted(build: Callable[[], nn.Module], dropout: float) -> nn.Module:
    """A model with adapters of PEFT that have an effect."""
    targets = {"r": 4, "lora_dropout": dropout, "init_lora_weights": False}
    config = LoraConfig(target_modules="all-linear", **targets)
    return get_peft_model(build(), config)  # type: ignore[no-any-return]


def beit() -> nn.Module:
    """With layer scale, relative positions and drop path, of transformers."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    images = {"image_size": 16, "patch_size": 4, "drop_path_rate": 0.4}
    more = {"intermediate_size": 96, "use_relative_position_bias": True}
    return hf.BeitForImageClassification(hf.BeitConfig(**sizes, **images, **more))


class Decoder(nn.Module):
    """Two post-norm layers of torch, whose memory is their input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(24, 2, 48, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, x + 1)


SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
SMALL |= {"num_classes": 5, "qkv_bias": True}
IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_attention_heads": 3}
IMAGE |= {"num_hidden_layers": 2, "intermediate_size": 48}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)


def encoder(norm_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        24, 2, 48, 0.1, nn.functional.gelu, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "vit": (vit, torch.randn(3, 3, 16, 16)),
    "scaled": (lambda: vit(init_values=0.5), torch.randn(3, 3, 16, 16)),
    "dinov2": (dinov2, {"pixel_values": torch.randn(3, 3, 16, 16), "labels": IDS[:, 0] % 2}),
    "drop path": (lambda: vit(init_values=0.5, drop_path_rate=0.4), torch.randn(5, 3, 16, 16)),
    "norms of heads": (lambda: vit(qk_norm=True), torch.randn(3, 3, 16, 16)),
    "bert": (bert, {"input_ids": IDS, "labels": IDS[:, 0] % 2}),
    "gpt2": (gpt2, TEXTS),
    "torchvision": (torchvision_vit, torch.randn(3, 3, 16, 16)),
    "encoder": (encoder, {"src": torch.randn(3, 9, 24), "mask": CAUSAL, "is_causal": True}),
    "post-norm encoder": (lambda: encoder(False), {"src": torch.randn(3, 9, 24)}),
    "post-norm decoder": (Decoder, torch.randn(3, 9, 24)),
    "post-norm branches": (
        lambda: vit(block_fn=vision_transformer.ResPostBlock, drop_path_rate=0.4),
        torch.randn(5, 3, 16, 16),
    ),
    "parallel": (
        lambda: vit(block_fn=vision_transformer.ParallelScalingBlock),
        torch.randn(3, 3, 16, 16),
    ),
    "beit": (lambda: Beit(**SMALL, use_rel_pos_bias=True), torch.randn(3, 3, 16, 16)),
    "hf beit": (beit, {"pixel_values": torch.randn(5, 3, 16, 16), "labels": IDS[0, :5] % 2}),
    "eva": (
        lambda: Eva(**SMALL, use_rot_pos_emb=True, init_values=0.5, swiglu_mlp=True),
        torch.randn(3, 3, 16, 16),
    ),
    "eva, apart": (
        lambda: Eva(**SMALL, use_rot_pos_emb=True, qkv_fused=False, scale_mlp=True),
        torch.randn(3, 3, 16, 16),
    ),
    "llama": (llama, TEXTS),
    "llama, adapted": (lambda: adapted(llama, 0.0), TEXTS),
    "gpt2, adapted": (lambda: adapted(gpt2, 0.0), TEXTS),
    "qwen3": (lambda: llama(hf.Qwen3ForCausalLM, hf.Qwen3Config, head_dim=8), TEXTS),
    "gemma2": (lambda: llama(hf.Gemma2ForCausalLM, hf.Gemma2Config, head_dim=8), TEXTS),
    "olmo2": (lambda: llama(hf.Olmo2ForCausalLM, hf.Olmo2Config), TEXTS),
    "distilbert": (distilbert, {"input_ids": IDS, "labels": IDS[:, 0] % 2}),
    "phi3": (lambda: llama(hf.Phi3ForCausalLM, hf.Phi3Config), TEXTS),
}
# Models whose code is that of one above, but for what tests of all models look at.
MORE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "deit": (
        lambda: timm.create_model(
            "deit_tiny_distilled_patch16_224", **{k: v for k, v in SMALL.items() if k != "qkv_bias"}
        ),
        torch.randn(3, 3, 16, 16),
    ),
    "hf vit": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)),
        {"pixel_values": torch.randn(3, 3, 16, 16), "labels": IDS[:, 0] % 2},
    ),
    "roberta": (
        lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, pad_token_id=0)),
        {"input_ids": IDS, "labels": IDS[:, 0] % 2},
    ),
    "masked bert": (lambda: hf.BertForMaskedLM(bert().config), TEXTS),
    "qwen2": (lambda: llama(hf.Qwen2ForCausalLM, hf.Qwen2Config, tie_word_embeddings=True), TEXTS),
    "mistral": (lambda: llama(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=4), TEXTS),
    "gemma": (lambda: llama(hf.GemmaForCausalLM, hf.GemmaConfig, head_dim=8), TEXTS),
    "gpt neox": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)), TEXTS),
}
every_model = pytest.mark.parametrize("name", MODELS)
ALL = MODELS | MORE


def small(name: str) -> tuple[nn.Module, Any]:
    """A model of ALL, whose norms have scales of their own, in training, and its batch."""
    build, inputs = ALL[name]
    torch.manual_seed(0)
    model = build().train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model, inputs


def step(
    model: nn.Module, inputs: Any, precision: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the loss, and the gradients of all parameters as one."""
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    with torch.autocast("cpu", precision, enabled=precision is not None):
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    y = out if isinstance(out, Tensor) else out.logits
    loss = y.float().square().sum() if isinstance(out, Tensor) else out.loss
    loss.backward()
    grads = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    return y.detach() + 0, loss.detach(), torch.cat(grads)


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a, b, 0).item()
