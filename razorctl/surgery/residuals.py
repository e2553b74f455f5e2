"""Residual connections x + f(norm(x)) whose norm adds the two gradients of x in one operation.

The output is the stock one. The norm's output is in the dtype that the linear layers after it
compute in, to which autocast would cast it anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from razorctl.layers.base import stock_type
from razorctl.layers.handover import add_residual
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
            x = add_residual(x, f, norm.handover, norm.epsilon(x), norm.centers)
            args, kwargs = (), {}
        return x


def _splits(norm: Norm, x: Tensor) -> bool:
    # A hook would get two outputs where it expects one; a patched forward may take no argument.
    return norm.fuses(x) and not norm._forward_hooks and "forward" not in vars(norm)


def find(
    model: nn.Module, members: Mapping[type[nn.Module], Names], first: frozenset[type[nn.Module]]
) -> dict[nn.Module, tuple[Connection, ...]]:
    """The blocks of `model` whose norms are razor norms, with their connections.

    members: block type -> the names of the members of each connection, the norm first. first: the
    types that may follow a norm, since they only multiply its output by weights.
    """
    by_block = {}
    for block in model.modules():
        names = members.get(type(block), ())
        if not names or "forward" in vars(block):
            continue
        connections = []
        for branch in names:
            norm, to, *rest = map(block.get_submodule, branch)
            if isinstance(norm, Norm) and stock_type(to) in first:
                connections.append(Connection(norm, to, tuple(rest)))
        if len(connections) == len(names):
            by_block[block] = tuple(connections)
    return by_block


def attach(block: nn.Module, connections: tuple[Connection, ...]) -> None:
    """Makes a block run by its connections, until `detach`."""
    block.forward = Block(block, connections)


def attached(module: nn.Module) -> bool:
    """Whether this very module runs by its connections."""
    return isinstance(vars(module).get("forward"), Block)


def detach(module: nn.Module) -> None:
    """Restores the forward of a block."""
    if attached(module):
        del module.forward
