"""LoRA (Hu et al., 2021) through PEFT: adapters put beside linear layers, and merged into them."""

from copy import copy
from pathlib import Path
from typing import Any

from torch import nn

from razorctl.errors import UsageError
from razorctl.layers.head import heads
from razorctl.layers.registry import linear_types
from razorctl.memory.fake import fake, mode_of

RANK, ALPHA = 8, 16
MARK = "razor_trainable"


def find(model: nn.Module) -> tuple[str, ...]:
    """The linear layers of `model`, by name: those to be adapted, then its classifier or head.

    Raises UsageError if there are none to adapt, or if the model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise UsageError(
            f"{type(model).__name__} has adapters already; merge them, or choose another method."
        )
    known, own = linear_types(), heads(model)
    modules = [(name, module) for name, module in model.named_modules() if type(module) in known]
    modules.sort(key=lambda pair: pair[1] in own)  # keeps the order otherwise
    linear = tuple(name for name, _ in modules)
    if len(linear) < 2:
        raise UsageError(
            f"{type(model).__name__} has no linear layer before its classifier to adapt; "
            "choose another method."
        )
    return linear


def attach(model: nn.Module, linear: tuple[str, ...]) -> None:
    """Adapts what `find` found; freezes everything else except a classifier.

    The head of a language model, which may be tied to its embeddings, is frozen too.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds
    from peft.tuners.lora import LoraLayer

    *adapted, classifier = linear
    trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    transposed = not any(isinstance(model.get_submodule(name), nn.Linear) for name in adapted)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=adapted, fan_in_fan_out=transposed)
    mode, device = mode_of(model.parameters()), next(model.parameters()).device
    inject_adapter_in_model(config, model, low_cpu_mem_usage=mode is not None)
    if mode is not None:  # then they are on the meta device yet
        fake(model, mode, device)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):  # autocast does it, without a copy for each adapter
            layer.cast_input_dtype_enabled = False
    last = model.get_submodule(classifier)
    last.requires_grad_(last not in heads(model))
    setattr(model, MARK, trainable)


def save(model: nn.Module, folder: Path) -> None:
    """Writes the adapters and any classifier as `peft.PeftModel.from_pretrained` loads them.

    model: one to which they are attached. It loads them onto the pretrained model.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    configs: Any = model.peft_config
    config = copy(configs["default"])
    trained = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad and "lora_" not in name
    ]
    config.modules_to_save = trained or None
    config.save_pretrained(str(folder))
    weights = get_peft_model_state_dict(model)
    weights |= {
        f"{classifier}.{name}": parameter
        for classifier in trained
        for name, parameter in model.get_submodule(classifier).named_parameters()
    }
    prefixed = {f"base_model.model.{name}": w.contiguous() for name, w in weights.items()}
    save_file(prefixed, folder / "adapter_model.safetensors")


def attached(module: nn.Module) -> bool:
    """Whether `attach` was given this very module."""
    return hasattr(module, MARK)


def detach(module: nn.Module) -> None:
    """Merges the adapters that `attach` put in, if any, and makes trainable what it froze."""
    if not attached(module):
        return
    from peft.tuners.lora import LoraLayer

    valued = mode_of(module.parameters()) is None  # fake weights have nothing to merge
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            if valued:
                layer.merge()
            module.set_submodule(name, layer.get_base_layer())
    for name in getattr(module, MARK):
        module.get_parameter(name).requires_grad_(True)
    del module.peft_config
    delattr(module, MARK)
