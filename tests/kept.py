"""Tensors and bytes that autograd keeps of a real forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def saved(run: Callable[..., Any], *inputs: Any) -> list[Tensor]:
    """The tensors that a forward pass saves."""
    tensors: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        run(*inputs)
    return tensors


def held_bytes(model: nn.Module, run: Callable[..., Any], *inputs: Any) -> int:
    """The bytes that a forward pass saves beside parameters and buffers; a storage counts once."""
    lasting = (*model.parameters(), *model.buffers())
    resident = {t.untyped_storage().data_ptr() for t in lasting}
    tensors = saved(run, *inputs)  # which stay alive, so that no other gets their memory
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for place, size in sizes.items() if place not in resident)
