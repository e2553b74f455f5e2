"""Weights that FSDP2 frees after the forward pass of a module, until its backward pass.

Other layers read some of them before: of a norm, whose copy serves the layers that it feeds, and of
a linear layer whose output is made again.
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
            f"{type(model).__name__} is sharded by FSDP2, so what it keeps cannot be traced; "
            "trace and sparsify it before fully_shard."
        )


def alone(layer: nn.Module) -> bool:
    """Whether FSDP2 gathers this very layer, whose weight is freed right after its forward pass."""
    return any(module is layer for module in _wrapped())


def lasting(t: Tensor | None) -> Tensor | None:
    """A small parameter for other layers to read: a copy of it if FSDP2 trains a model."""
    return t.detach().clone() if t is not None and _wrapped() else t


def gather(layer: nn.Module, weight: Tensor) -> None:
    """Gathers the weight of a layer if FSDP2 has freed it, before the layer's backward pass.

    Collective. FSDP2 then finds it gathered there, so it is sent once either way. Raises UsageError
    if it is freed and not by FSDP2.
    """
    if torch.compiler.is_compiling() or not weight.numel() or weight.untyped_storage().size():
        return
    around = [module for module in _wrapped() if any(part is layer for part in module.modules())]
    if not around:
        raise UsageError(
            f"the weight of {getattr(layer, 'place', '') or 'a linear layer'} is sharded apart "
            "from the rest of its block, which computes with it in the backward pass, and not by "
            "FSDP2; shard whole blocks."
        )
    nearest = min(around, key=lambda module: len(list(module.modules())))
    nearest.unshard()  # type: ignore[operator]
