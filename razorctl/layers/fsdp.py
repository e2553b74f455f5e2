"""Weights that FSDP2 frees between the forward pass of a module and its backward pass.

Other layers need some of them earlier: the weight of a norm whose copy serves the layers after it,
and the weight of a linear layer whose output is recomputed.
"""

import sys

import torch
from torch import Tensor, nn

from razorctl.errors import UsageError


def _wrapped() -> list[nn.Module]:
    """The modules that FSDP2 gathers."""
    if torch.compiler.is_compiling() or "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    return [module for module in list(_module_state_mapping) if isinstance(module, FSDPModule)]


def refuse_sharded(model: nn.Module) -> None:
    """Raises UsageError for a model that FSDP2 shards."""
    if not set(_wrapped()).isdisjoint(model.modules()):
        raise UsageError(
            f"{type(model).__name__} is sharded by FSDP2, so its stored activations cannot be "
            "traced; trace and sparsify it before fully_shard."
        )


def in_use() -> bool:
    """Whether FSDP2 wraps any module."""
    return bool(_wrapped())


def alone(layer: nn.Module) -> bool:
    """Whether FSDP2 wraps this very layer, so that its weight is freed right after its forward."""
    return any(module is layer for module in _wrapped())


def lasting(t: Tensor | None) -> Tensor | None:
    """A small parameter that other layers will read: a clone if FSDP2 is in use."""
    return t.detach().clone() if t is not None and _wrapped() else t


def gather(layer: nn.Module, weight: Tensor) -> None:
    """Gathers a weight that FSDP2 has freed, before the layer's own backward pass.

    Collective. FSDP2 does not gather it again, so it is sent once either way. Raises UsageError if
    something other than FSDP2 freed it.
    """
    if torch.compiler.is_compiling() or not weight.numel() or weight.untyped_storage().size():
        return
    around = [module for module in _wrapped() if any(part is layer for part in module.modules())]
    if not around:
        raise UsageError(
            f"the weight of {getattr(layer, 'place', '') or 'a linear layer'} is sharded apart "
            "from the rest of its block, which needs it in the backward pass; shard whole blocks "
            "with FSDP2."
        )
    nearest = min(around, key=lambda module: len(list(module.modules())))
    nearest.unshard()  # type: ignore[operator]
