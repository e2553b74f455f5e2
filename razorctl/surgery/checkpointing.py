"""A model's own activation checkpointing, switched on and off."""

import logging
from operator import call

from torch import nn

from razorctl.errors import UsageError
from razorctl.layers.base import stock_type

log = logging.getLogger(__name__)

# The methods that switch it on and off, of transformers (new and old names) and timm.
SWITCHES = (
    ("activation_checkpointing_enable", "activation_checkpointing_disable"),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
    ("set_grad_checkpointing", "set_grad_checkpointing"),
)
FLAGS = ("gradient_checkpointing", "grad_checkpointing")
MARK = "razor_checkpointing"
# Where a transformers model stores the hooks that make its embeddings' output require a gradient.
# Its checkpointing adds them, and does not remove them when it is switched off.
HOOKS = "_require_grads_hooks"


def find(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules of `model` that can checkpoint, by name; "" is the model itself.

    Raises UsageError if there are none.
    """
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in outermost)
        able = getattr(module, "supports_gradient_checkpointing", True)
        if able and not inside and any(hasattr(module, on) for on, _ in SWITCHES):
            outermost[name] = module
    if not (outermost and all(map(_works, outermost.values()))):
        raise UsageError(
            f"{type(model).__name__} has no activation checkpointing of its own; wrap its blocks "
            "in torch.utils.checkpoint, or train without it."
        )
    return outermost


def _works(module: nn.Module) -> bool:
    """Whether checkpointing can be switched on; in many timm models the switch raises."""
    try:
        attach(module)
    except (AssertionError, NotImplementedError, ValueError):
        return False
    detach(module)
    return True


def on(part: nn.Module) -> bool:
    """Whether this module itself checkpoints, whoever has switched that on."""
    wrapped = getattr(part, "checkpoint_fn", call) is not call  # by apply_activation_checkpointing
    return wrapped or any(getattr(part, flag, False) for flag in FLAGS)


def leave_out(twin: nn.Module) -> None:
    """Switches off all checkpointing in a copy of a model, for good."""
    for part in filter(on, twin.modules()):
        vars(part).update(dict.fromkeys(FLAGS, False), checkpoint_fn=call)


def advise(model: nn.Module) -> None:
    """Warns if a stock model has checkpointing switched on."""
    if any(map(on, model.modules())):
        log.warning(
            "%s has activation checkpointing enabled, which razor does not need. Disable it for "
            "faster steps: gradient_checkpointing_disable(), set_grad_checkpointing(False), or "
            "gradient_checkpointing=False of a trainer.",
            stock_type(model).__name__,
        )


def attach(module: nn.Module) -> None:
    """Switches a module's checkpointing on, if it is not on already."""
    if any(map(on, module.modules())):
        return
    enable, _ = _switches(module)
    hooked = bool(getattr(module, HOOKS, None))
    getattr(module, enable)()
    setattr(module, MARK, hooked)


def detach(module: nn.Module) -> None:
    """Switches checkpointing off, if `attach` switched it on."""
    if hasattr(module, MARK):
        enable, disable = _switches(module)
        switch = getattr(module, disable)
        switch(False) if enable == disable else switch()
        if getattr(module, HOOKS, None) and not getattr(module, MARK):
            module.disable_input_require_grads()  # type: ignore[operator]
        delattr(module, MARK)


def _switches(module: nn.Module) -> tuple[str, str]:
    return next(pair for pair in SWITCHES if hasattr(module, pair[0]))
