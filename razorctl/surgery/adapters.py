"""LoRA (Hu et al., 2021) through PEFT: adapters put beside linear layers, and merged into them."""

from torch import nn

from razorctl.errors import UsageError

RANK, ALPHA = 8, 16
MARK = "razor_trainable"


def find(model: nn.Module) -> tuple[str, ...]:
    """The linear layers of `model`, by name: those to be adapted, then its classifier.

    Raises UsageError if there are none to adapt, or if the model has adapters already.
    """
    if hasattr(model, "peft_config"):
        raise UsageError(
            f"{type(model).__name__} has adapters already; merge them, or choose another method."
        )
    linear = tuple(name for name, module in model.named_modules() if type(module) is nn.Linear)
    if len(linear) < 2:
        raise UsageError(
            f"{type(model).__name__} has no linear layer before its classifier to adapt; "
            "choose another method."
        )
    return linear


def attach(model: nn.Module, linear: tuple[str, ...]) -> None:
    """Adapts what `find` found; freezes everything else except the classifier."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    *adapted, classifier = linear
    trainable = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=adapted)
    inject_adapter_in_model(config, model)
    model.get_submodule(classifier).requires_grad_(True)
    setattr(model, MARK, trainable)


def attached(module: nn.Module) -> bool:
    """Whether `attach` was given this very module."""
    return hasattr(module, MARK)


def detach(module: nn.Module) -> None:
    """Merges the adapters that `attach` put in, if any, and makes trainable what it froze."""
    if not attached(module):
        return
    from peft.tuners.lora import LoraLayer

    for name, layer in list(module.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            module.set_submodule(name, layer.get_base_layer())
    for name in getattr(module, MARK):
        module.get_parameter(name).requires_grad_(True)
    del module.peft_config
    delattr(module, MARK)
