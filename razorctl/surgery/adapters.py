"""LoRA (Hu et al., 2021) through PEFT: adapters beside linear layers, and their merging."""

from collections.abc import Sequence
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from razorctl.errors import UsageError
from razorctl.layers.by_type import linear_types
from razorctl.layers.heads.token_logits import heads
from razorctl.memory.fake import fake, mode_of
from razorctl.surgery import freezing

MARK = "razor_trainable"


def find(model: nn.Module, targets: str | None = None) -> tuple[str, ...]:
    """The names of the linear layers of `model`: the layers to adapt, then its classifier or head.

    targets: as `Recipe.lora_targets`. Raises UsageError if no layer can be adapted, if a target
    matches none, or if the model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise UsageError(
            f"{type(model).__name__} has adapters already; merge them, or choose another method."
        )
    types, last = linear_types(), heads(model)
    layers = [(name, module) for name, module in model.named_modules() if type(module) in types]
    # The head of a language model may come first.
    linear = tuple(name for name, module in layers if module not in last)
    linear += tuple(name for name, module in layers if module in last)
    if len(linear) < 2:
        raise UsageError(
            f"{type(model).__name__} has no linear layer before its classifier to adapt; "
            "choose another method."
        )
    return linear if targets is None else (*_chosen(linear[:-1], targets), linear[-1])


def _chosen(names: Sequence[str], targets: str) -> list[str]:
    """The names that match one of the targets."""
    patterns = [pattern.strip() for pattern in targets.split(",")]
    by_pattern = {
        pattern: {n for n in names if fnmatchcase(f".{n}", f"*.{pattern}")} for pattern in patterns
    }
    for pattern, matching in by_pattern.items():
        if not matching:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise UsageError(
                f"lora target {pattern!r} matches no linear layer before the head; the layers are "
                f"{names[0]} and others that end in {', '.join(ends)}."
            )
    return [name for name in names if any(name in each for each in by_pattern.values())]


def attach(model: nn.Module, linear: tuple[str, ...], rank: int, alpha: float | None) -> None:
    """Adapts the layers that `find` returned; freezes everything else except a classifier.

    The head of a language model may be tied to its embeddings, so it is frozen too. rank, alpha: as
    in `Recipe`.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds
    from peft.tuners.lora import LoraLayer

    *adapted, classifier = linear
    trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    transposed = not any(isinstance(model.get_submodule(name), nn.Linear) for name in adapted)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=adapted,
        fan_in_fan_out=transposed,
    )
    mode, device = mode_of(model.parameters()), next(model.parameters()).device
    inject_adapter_in_model(config, model, low_cpu_mem_usage=mode is not None)
    if mode is not None:  # the adapters are on the meta device
        fake(model, mode, device)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):  # autocast casts, without a copy per adapter
            layer.cast_input_dtype_enabled = False
    last = model.get_submodule(classifier)
    last.requires_grad_(last not in heads(model))
    setattr(model, MARK, (trainable, freezing.hold_statistics(model)))


def save(model: nn.Module, folder: Path) -> None:
    """Writes the adapters of a model, and a trained classifier.

    `peft.PeftModel.from_pretrained` loads them onto the pretrained model.
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
    """Whether `attach` has adapted this module."""
    return hasattr(module, MARK)


def detach(module: nn.Module) -> None:
    """Merges the adapters of `attach`, if there are any, and unfreezes the rest."""
    if not attached(module):
        return
    from peft.tuners.lora import LoraLayer

    valued = mode_of(module.parameters()) is None  # fake weights have nothing to merge
    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            if valued:
                layer.merge()
            module.set_submodule(name, layer.get_base_layer())
    trainable, held = getattr(module, MARK)
    for name in trainable:
        module.get_parameter(name).requires_grad_(True)
    freezing.release_statistics(module, held)
    del module.peft_config
    delattr(module, MARK)
