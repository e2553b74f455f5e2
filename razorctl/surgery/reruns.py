"""Blocks that are recomputed in the backward pass from few-bit copies of their inputs.

A block is code without parts (`layers.recompute`): y = f(x, w) stores only a copy x', and dx and dw
are the gradients of f at x'. Layers inside the block store copies during the recomputation only.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.layers.base import stock_type, transforming
from razorctl.layers.own_forward import InPlace, runs
from razorctl.layers.recompute.code import CodeAgain
from razorctl.layers.recompute.large_logits import Measured, unhooked
from razorctl.layers.recompute.replayed_state import (
    HALF,
    Rows,
    by_position,
    empty_cache,
    leaves_of,
    own_buffers,
    split,
    unchanged,
    unknown,
    without_cache,
)
from razorctl.layers.shared_copies.memo import Memo
from razorctl.rules.base import Rule
from razorctl.rules.dense import Half
from razorctl.rules.packed import Packed
from razorctl.rules.quantized import Quantized

# Layer -> the attribute with its number of channels, axis 1 of its input.
CHANNELS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "in_channels"),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "num_features"),
    nn.GroupNorm: "num_channels",
}


class BlockCode(CodeAgain):
    """A block whose arguments are packed by a rule.

    Args:
        rule: of the copies; None stores the arguments as they are.
        memo: where blocks share copies of their inputs.
        owner, name, call, names, channels: as in `Code`.
    """

    def __init__(
        self,
        rule: Rule | None,
        memo: Memo,
        owner: nn.Module,
        name: str,
        call: Callable[..., Any],
        names: Sequence[str],
        channels: Collection[int],
    ) -> None:
        super().__init__(owner, name, call, names=names)
        self.rule, self.memo, self.channels = rule, memo, channels

    def copy(self, x: Tensor, rows: Rows) -> Packed | None:
        rule = self.rule
        if rule is None:
            return None
        layout = "block", rows.images
        if copy := self.memo.find(x, layout, self.owner):
            return copy
        if rows.images:
            copy = rule.pack_images(x.detach(), x.dtype)
        else:
            copy = rule.pack(x.detach().reshape(-1, rows.columns))
        return self.memo.offer(x, layout, copy, self.owner)


class Rerun(InPlace):
    """Replaces the forward of a block."""

    def __init__(self, owner: nn.Module, name: str, bits: int | None, memo: Memo) -> None:
        self.owner, self.name, self.memo = owner, name, memo
        self.rule: Rule | None = None
        if bits is not None:
            self.rule = Half() if bits == HALF else Quantized(bits)
        self.inner = vars(owner).get("forward")  # None for the forward of its class
        self.names = by_position(owner.forward)
        sizes = [(module, CHANNELS.get(stock_type(module))) for module in owner.modules()]
        self.channels = {getattr(module, size) for module, size in sizes if size is not None}
        self.measured = [module for module in owner.modules() if isinstance(module, Measured)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.owner.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                msg=f"{self.name} is recomputed in the backward pass, which a full graph does "
                "not support; call torch.compile without fullgraph, or choose a smaller ratio."
            )
        return self._run(args, kwargs)

    @property
    def _forward(self) -> Callable[..., Any]:
        """The block's own forward."""
        return self.inner or partial(type(self.owner).forward, self.owner)

    # Compiled code would recompute from the input itself.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward, arguments = self._forward, self.arguments(args, kwargs)
        if transforming() or unknown(tree_leaves(arguments)):
            return forward(*args, **kwargs)
        name = f"{self.name} ({stock_type(self.owner).__name__})"
        values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        caches = {key: value for key, value in values.items() if empty_cache(self.owner, value)}
        filled = {key: value for key, value in values.items() if isinstance(value, UserDict)}
        call = partial(_filling, forward, filled) if filled else forward
        self._measure(call, arguments)
        large = self.rule is not None and any(module.logit_bits for module in self.measured)
        rule = Half() if large else self.rule
        code = BlockCode(rule, self.memo, self.owner, name, call, self.names, self.channels)
        places, named = split({**arguments, **caches})
        result = code.first(*places, **named)
        if filled:
            result, entries = result
            for key, mapping in filled.items():
                mapping.update(entries[key])
        return result

    def _measure(self, call: Callable[..., Any], arguments: dict[Any, Any]) -> None:
        """Lets attention inside measure in a separate run, since the result changes later runs."""
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
        if not any(module.measures(x) for module in self.measured for x in tensors):
            return
        devices = list({x.device for x in tensors if x.is_cuda})
        apart = tree_map_only(Tensor, _apart, arguments)
        places, named = split(apart)
        buffers = unchanged([key for key, _ in own_buffers(self.owner)])
        with unhooked(), torch.random.fork_rng(devices), buffers:
            call(*places, **named)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
        """The arguments by number or name, without caches that hold nothing of this block.

        A mapping that blocks fill for later blocks, as with keys and values, becomes a dict.
        """
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for key, value in arguments.items():
            if isinstance(value, UserDict):
                arguments[key] = dict(value)
        return {key: without_cache(self.owner, value) for key, value in arguments.items()}

    def leaves(self, arguments: Mapping[Any, Any]) -> Iterator[tuple[Any, Rows | None]]:
        """`leaves_of` the block's arguments."""
        return leaves_of(arguments, self.names, self.channels)


def _apart(x: Tensor) -> Tensor:
    """A tensor object that the memo does not know."""
    return x.detach().requires_grad_(x.requires_grad)


def _filling(
    forward: Callable[..., Any], filled: Mapping[Any, UserDict[Any, Any]], *args: Any, **kwargs: Any
) -> tuple[Any, dict[Any, dict[Any, Any]]]:
    """The result of a forward, and the entries that it adds to mappings.

    filled: argument by number or name -> the mapping that was passed, now replaced by a dict.
    """
    arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    own = {key: type(mapping)(arguments[key]) for key, mapping in filled.items()}
    places, named = split({**arguments, **own})
    result = forward(*places, **named)
    added = {
        key: {k: v for k, v in mapping.items() if v is not arguments[key].get(k)}
        for key, mapping in own.items()
    }
    return result, added


def attach(block: nn.Module, name: str, bits: int | None, memo: Memo) -> None:
    """Recomputes a block in the backward pass, until `own_forward.take`.

    Args:
        block: of any type.
        name: its name in its model, for messages.
        bits: per element of its packed inputs, HALF for half precision; None stores them as they
            are.
        memo: where blocks share copies of their inputs.
    """
    block.forward = Rerun(block, name, bits, memo)


def attached(module: nn.Module) -> bool:
    """Whether this module itself is recomputed in the backward pass."""
    return runs(module, Rerun)
