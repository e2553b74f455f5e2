"""Residual connections x + f(norm(x)) whose norm adds the two gradients of x in one operation.

The output is the stock one. The norm's output is in the dtype that the linear layers after it
compute in; autocast would cast it to that dtype anyway.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from razorctl.layers import by_type
from razorctl.layers.base import stock_type
from razorctl.layers.kinds.norm import Norm
from razorctl.layers.own_forward import InPlace, place
from razorctl.layers.shared_copies.int8_gradients import add_residual
from razorctl.rules.derived_norms import DerivedSum

# Argument of a torch block -> the argument of its attention.
ARGUMENTS = {"src_mask": "attn_mask", "src_key_padding_mask": "key_padding_mask"}


@dataclass(frozen=True)
class Connection:
    """x + last(...first(norm(x))). The first branch of a block gets the block's other arguments.

    through: whether the norm may add the gradients, since `first` only multiplies by weights.
    """

    norm: Norm
    first: nn.Module
    rest: tuple[nn.Module, ...]
    through: bool

    def adds(self, x: Tensor) -> bool:
        """Whether the norm adds the two gradients of x."""
        norm = self.norm
        # A hook would get two outputs; a patched forward may take no second argument.
        plain = not norm._forward_hooks and "forward" not in vars(norm)
        return self.through and plain and norm.fuses(x)

    def call(self, y: Tensor, **kwargs: Any) -> Any:
        """The output of `first`, with the block's other arguments."""
        if not isinstance(self.first, nn.MultiheadAttention):
            return self.first(y, **kwargs)
        named = {ARGUMENTS.get(name, name): value for name, value in kwargs.items()}
        return self.first(y, y, y, need_weights=False, **named)

    @property
    def again(self) -> bool:
        """Whether the norm's input is recomputed in the backward pass if possible."""
        return any(rule.again for rule in self.norm.rules.each)


class Block(InPlace):
    """Replaces the forward of a block that is a sequence of connections."""

    def __init__(self, owner: nn.Module, connections: tuple[Connection, ...]) -> None:
        self.owner, self.connections = owner, connections
        _, _, *self.names = inspect.signature(type(owner).forward).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        # The first branch uses the names of the block's arguments, but perhaps not their order.
        named = dict(zip(self.names, args[1:], strict=False)) | kwargs
        more = named.get("encoder_hidden_states") is not None
        # transformers checkpoints in the forward of the class.
        if (
            more
            or not isinstance(x, Tensor)
            or getattr(self.owner, "gradient_checkpointing", False)
        ):
            return type(self.owner).forward(self.owner, *args, **kwargs)
        adds = all(connection.adds(x) for connection in self.connections)
        if not adds and not all(c.norm.saving and c.again for c in self.connections):
            return type(self.owner).forward(self.owner, *args, **kwargs)
        for connection in self.connections:
            norm = connection.norm
            y, x = norm(x, through=True) if adds else (norm(x), x)
            f = connection.call(y, **named)
            f = f[0] if isinstance(f, tuple) else f  # attention may return its probabilities
            for module in connection.rest:
                f = module(f)
            goes_on = connection is not self.connections[-1]
            derived = norm.memo.both(x, f, norm) if norm.memo is not None and goes_on else ()
            # The next norm has the same settings.
            settings = norm.handover, norm.epsilon(x), norm.centers
            x = add_residual(x, f, *settings) if adds else x + f
            if norm.memo is not None and derived:
                norm.memo.derive(x, DerivedSum(x.shape, x.dtype, derived))
            named = {}
        return x


def find(model: nn.Module) -> dict[nn.Module, tuple[Connection, ...]]:
    """The blocks of `model` whose norms are razor norms, with their connections."""
    by_block, first = {}, by_type.linear_first()
    for block in model.modules():
        names = by_type.connections_of(stock_type(block))
        first_norm = getattr(block, "norm_first", True)
        if not names or not first_norm or place(block) is None:
            continue
        if not set().union(*names) <= {name for name, _ in block.named_modules()}:
            continue
        connections = []
        for branch in names:
            norm, to, *rest = map(block.get_submodule, branch)
            if isinstance(norm, Norm):
                through = stock_type(to) in first
                connections.append(Connection(norm, to, tuple(rest), through))
        useful = all(c.through or c.again for c in connections)
        if useful and len(connections) == len(names):
            by_block[block] = tuple(connections)
    return by_block
