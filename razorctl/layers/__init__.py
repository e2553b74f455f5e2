"""Layers that keep the forward pass exact and save by a rule: a file a kind, found by listing.

A layer file defines `SWAPS`, which maps exact stock types to their razor classes. A razor class
subclasses its stock class, adds no parameter or buffer, and takes over a module by assignment to
`__class__`, so parameters, state-dict keys, hooks, deepcopy and pickle stay what they were.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from razorctl import registry
from razorctl.rules import Rule
from razorctl.sampling import Blocks


class RazorLayer(nn.Module):
    """Base of the razor classes: a layer whose training forward saves by `rule`.

    kind: layer kind, as `Method.rules` names it. blocks: the draw of weights under a joint budget,
    of which this layer's weight is number `block`; None if every weight gets a gradient.
    """

    kind: ClassVar[str]
    rule: Rule
    blocks: Blocks | None
    block: int

    @staticmethod
    def columns(module: nn.Module) -> int:
        """The length of the last axis of the activation that the rule of `module` will see."""
        raise NotImplementedError

    @property
    def saving(self) -> bool:
        """Whether this forward pass saves for a backward pass; if not, it is the stock one."""
        return self.training and torch.is_grad_enabled()


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that stock autocast would compute with."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """For a backward pass: its dtypes are settled, even where a user runs it under autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    stock: razor
    for file in registry.modules(__name__, __path__)
    for stock, razor in file.SWAPS.items()
}
