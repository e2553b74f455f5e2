"""The draw of a joint budget, before each training forward pass of a model.

If torch.distributed is initialized, norms are averaged over processes, so that all draw the same.
DistributedDataParallel then needs find_unused_parameters=True.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from razorctl.layers.base import RazorLayer, in_backward
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.recompute.large_logits import LargeLogits, Measured
from razorctl.layers.shared_copies.int8_cost import Int8Cost
from razorctl.sampling.joint import MARK, Blocks, refuse_compilation
from razorctl.sampling.reduction import mean_over_processes
from razorctl.sampling.samplers import Sampler
from razorctl.system.spans import packing


def attach(model: nn.Module, blocks: Blocks) -> None:
    """Makes `blocks` the draw of a model, until `detach`."""
    setattr(model, MARK, blocks)
    model.register_forward_pre_hook(_draw)


def detach(module: nn.Module) -> None:
    """Removes the draw of a module, if it has one."""
    vars(module).pop(MARK, None)
    unhook(module, _draw)


def unhook(module: nn.Module, *hooks: Callable[..., object]) -> None:
    """Removes these forward hooks and pre-hooks of a module."""
    every: Any = module._forward_pre_hooks, module._forward_hooks
    for registered in every:
        for number in [number for number, hook in registered.items() if hook in hooks]:
            del registered[number]


def unhook_strangers(model: nn.Module) -> None:
    """Removes forward hooks and pre-hooks that are neither razorctl's nor torch's, in a copy."""
    for module in model.modules():
        every: Any = module._forward_pre_hooks, module._forward_hooks
        for registered in every:
            for number, hook in [*registered.items()]:
                function = getattr(hook, "func", hook)  # of a partial
                place = getattr(function, "__module__", None) or type(function).__module__
                if not place.startswith(("razorctl.layers.", "razorctl.surgery.", "torch.")):
                    del registered[number]


def draws(model: nn.Module) -> dict[str, Blocks | Sampler | Int8Cost | LargeLogits]:
    """The draws and measurements of a sparsified model, by name.

    They learn from gradients, and are not in the model's state dict.
    """
    by_name: dict[str, Blocks | Sampler | Int8Cost | LargeLogits] = {}
    for name, module in model.named_modules():
        if MARK in vars(module):
            by_name[f"{name}:blocks"] = getattr(module, MARK)
        if isinstance(module, Linear):
            by_name[f"{name}:int8"] = module.int8_cost
        if isinstance(module, Measured):
            by_name[f"{name}:logits"] = LargeLogits(module)
        if isinstance(module, RazorLayer) and module.rules is not None:
            for number, rule in enumerate(module.rules.each):
                if rule.sampler is not None:
                    by_name[f"{name}:{number}"] = rule.sampler
    return by_name


def _draw(model: nn.Module, inputs: object) -> None:
    if not (model.training and torch.is_grad_enabled()):
        return
    refuse_compilation()
    if in_backward():
        return  # a recomputation by activation checkpointing, with the same draw
    blocks: Blocks = getattr(model, MARK)
    with packing():
        device = next(model.parameters()).device
        blocks.advance(partial(mean_over_processes, device=device))
