"""Residual connections x + f(norm(x)) whose norm adds the two gradients of x in its own operation.

The output is the stock one. The norm's output is in the dtype that the linear layers after it
compute in, to which autocast would cast it anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from razorctl.layers.base import stock_type
from razorctl.layers.handover import add
from razorctl.layers.norm import Norm

Names = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Connection:
    """x + last(...first(norm(x))). The block passes its other arguments on to its first branch."""

    norm: Norm
    first: nn.Module
    rest: tuple[nn.Module, ...]


class Block:
    """Runs in place of the forward of a block that is a sequence of connections."""

    def __init__(self, owner: nn.Module, connections: tuple[Connection, ...]) -> None:
        self.owner, self.connections = owner, connections

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not all(_splits(connection.norm, x) for connection in self.connections):
            return type(self.owner).forward(self.owner, x, *args, **kwargs)
        for connection in self.connections:
            y, x = connection.norm(x, through=True)
            f = connection.first(y, *args, **kwargs)
            f = f[0] if isinstance(f, tuple) else f  # attention may return its probabilities
            for module in connection.rest:
                f = module(f)
            norm = connection.norm  # the next one is like it
            x = add(x, f, norm.handover, norm.epsilon(x), norm.centers)
            args, kwargs = (), {}
        return x


def _splits(norm: Norm, x: Tensor) -> bool:
    # A hook would get two outputs where it expects one; a patched forward may take no argument.
    return norm.fuses(x) and not norm._forward_hooks and "forward" not in vars(norm)


def find(
    model: nn.Module, known: Mapping[type[nn.Module], Names], first: frozenset[type[nn.Module]]
) -> dict[nn.Module, tuple[Connection, ...]]:
    """The blocks of `model` whose norms are razor norms, with their connections.

    known: block type -> the names of the members of each connection, the norm first. first: the
    types that may follow a norm, since all they do with its output is to multiply it by weights.
    """
    found = {}
    for block in model.modules():
        names = known.get(type(block), ())
        members = [[block.get_submodule(name) for name in branch] for branch in names]
        if members and "forward" not in vars(block):
            own = tuple(
                Connection(norm, to, tuple(rest))
                for norm, to, *rest in members
                if isinstance(norm, Norm) and stock_type(to) in first
            )
            if len(own) == len(members):
                found[block] = own
    return found


def attach(block: nn.Module, connections: tuple[Connection, ...]) -> None:
    """Makes a block run by its connections, until `detach`."""
    block.forward = Block(block, connections)


def attached(module: nn.Module) -> bool:
    """Whether this very module is such a block."""
    return isinstance(vars(module).get("forward"), Block)


def detach(module: nn.Module) -> None:
    """Gives a block its own forward back."""
    if attached(module):
        del module.forward
