"""torchao's int8 mixed-precision training: linear layers that run all three GEMMs in int8.

They store what stock layers store. torchao is imported only if they are used.
"""

from importlib.util import find_spec

from torch import nn

from razorctl.errors import UsageError
from razorctl.layers.own_forward import place, rebind

CONFIG = "config"  # the attribute of torchao's linear layer with its settings


def check_library() -> None:
    """Raises UsageError if torchao is not installed."""
    if find_spec("torchao") is None:
        raise UsageError(
            "torchao-int8 needs torchao, which is not installed; run pip install torchao, or "
            "choose --method razor."
        )


def find(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of `model` by name, without the last one, its classifier.

    Raises UsageError if there are none, or if torchao is not installed.
    """
    check_library()
    linear: dict[str, nn.Module] = {
        name: m for name, m in model.named_modules() if type(m) is nn.Linear and place(m)
    }
    if len(linear) < 2:
        raise UsageError(
            f"{type(model).__name__} has no linear layer before its classifier for torchao; choose "
            "another method."
        )
    linear.popitem()
    return linear


def attach(module: nn.Module) -> None:
    """Makes an `nn.Linear` torchao's, until `detach`."""
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    from razorctl.surgery.torchao_linear import Int8Linear

    module.__class__ = Int8Linear
    rebind(module, nn.Linear)
    setattr(module, CONFIG, int8_mixed_precision_training())


def attached(module: nn.Module) -> bool:
    """Whether `attach` has changed this module."""
    return isinstance(module, nn.Linear) and hasattr(module, CONFIG)


def detach(module: nn.Module) -> None:
    """Makes a module that `attach` changed a stock `nn.Linear` again."""
    if attached(module):
        before, module.__class__ = type(module), nn.Linear
        rebind(module, before)
        delattr(module, CONFIG)
