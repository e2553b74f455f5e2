"""Blocks that run again in the backward pass, from few-bit copies of their inputs.

Forward: y = f(x, w), the stock one; of x only a copy x' is kept. Backward: f(x', w) runs again, and
dx and dw are those of f at x'. torch's checkpoint does it: it keeps nothing of the first run, whose
graph gets what the second one keeps. Here it keeps copies, and the second run gets their values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from razorctl.errors import UsageError
from razorctl.layers.base import changed_since, stock_type, transforming, unpacked
from razorctl.layers.second_run import (
    EXACT,
    ROWS,
    Buffer,
    laid,
    unchanged,
    unknown,
    watching_buffers,
    without_cache,
)
from razorctl.layers.sharing import Memo
from razorctl.ops.images import memory_format
from razorctl.ops.quantize import empty_copy
from razorctl.rules.base import Rule
from razorctl.rules.dense import Half
from razorctl.rules.packed import TILE, Packed
from razorctl.rules.quantized import Quantized

NOTHING = torch.empty(0, device="meta")
HALF = 16  # bits of an element in half precision
# Layers -> the attribute with the number of their channels, which are axis 1 of their input.
CHANNELS: dict[type[nn.Module], str] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "in_channels"),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "num_features"),
    nn.GroupNorm: "num_channels",
}


class Values(torch.autograd.Function):
    """The values of a copy in a shape, with a gradient, so that the graph is like the first one.

    Nothing flows back through it: gradients take the graph of the first run.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: "Kept", *tensors: Any) -> Tensor:
        assert kept.form is not None
        copy = kept.form.holding(tensors)
        x = (
            copy.values()
            if kept.images is None
            else copy.images(kept.shape, copy.dtype, kept.images)
        )
        view: Tensor = torch.ops.aten._unsafe_view(x, kept.shape)  # it may change in place
        return view if view.stride() == kept.strides else laid(view, kept.strides)


class Holder(torch.autograd.Function):
    """An empty tensor whose node keeps tensors, as autograd keeps what it needs again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class Kept(NamedTuple):
    """How a tensor of a block's arguments is kept.

    Args:
        form: its copy without tensors; None if it is kept as it is.
        parts: the number of tensors that are kept for it.
        shape, strides: its own.
        images: its memory format, if its channels are axis 1 and the copy's rows its pixels.
        gradient: whether it has one.
    """

    form: Packed | None
    parts: int
    shape: torch.Size
    strides: tuple[int, ...]
    images: torch.memory_format | None = None
    gradient: bool = True

    def tensor(self, kept: tuple[Any, ...]) -> Tensor:
        """The tensor that the block gets when it runs again."""
        if self.form is None:
            (x,) = kept
            return x  # type: ignore[no-any-return]
        values: Tensor = Values.apply(torch.zeros((), requires_grad=self.gradient), self, *kept)
        return values


class Rows(NamedTuple):
    """The rows and columns that a tensor is packed in; images: whether rows are its pixels."""

    length: int
    columns: int
    images: bool

    def bytes(self, bits: int) -> int:
        """Bytes of a copy."""
        if bits == HALF:
            return 2 * self.length * self.columns
        return sum(t.nbytes for t in empty_copy(NOTHING, self.length, self.columns, bits, TILE))


class Rerun:
    """Runs in place of the forward of a block."""

    def __init__(self, owner: nn.Module, name: str, bits: int | None, memo: Memo) -> None:
        self.owner, self.name, self.memo = owner, name, memo
        self.rule: Rule | None = None
        if bits is not None:
            self.rule = Half() if bits == HALF else Quantized(bits)
        self.inner: Any = vars(owner).get("forward")  # None: that of its class
        names = list(signature(owner.forward).parameters.values())
        self.names = [
            p.name for p in names if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        sizes = [(module, CHANNELS.get(stock_type(module))) for module in owner.modules()]
        self.channels = {getattr(module, size) for module, size in sizes if size is not None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.owner.training and torch.is_grad_enabled()):
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(
                msg=f"{self.name} is run again in the backward pass, which no compiled graph does; "
                "call torch.compile without fullgraph, or choose a smaller ratio."
            )
        return self._run(args, kwargs)

    @property
    def _forward(self) -> Callable[..., Any]:
        """The forward of the block itself."""
        return self.inner or partial(type(self.owner).forward, self.owner)

    # Compiled, it would run again from its input itself.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = self._forward
        if transforming():
            return forward(*args, **kwargs)
        arguments = self.arguments(args, kwargs)
        leaves, tree = tree_flatten(arguments)
        if unknown(leaves):
            return forward(*args, **kwargs)
        tensors, forms = self._pack(arguments)
        again = _Again(forward, forms, tree, self.owner, self.label)
        again.first = leaves
        versions = _versions(leaf for leaf in leaves if isinstance(leaf, Tensor))
        held = Holder.apply(torch.zeros((), requires_grad=True), *tensors)
        # checkpoint keeps the random states of the devices of its arguments.
        devices = {x.device: x for x in tensors if x is not None}
        places = [x.new_empty(0) for x in devices.values()]
        result = checkpoint(again, held, *places, use_reentrant=False)
        self._check(_changed(versions), [*tensors, *_parameters(leaves)])
        return result

    @property
    def label(self) -> str:
        """The name and the class of the block, for messages."""
        return f"{self.name} ({stock_type(self.owner).__name__})"

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
        """The arguments by number or name, without caches that hold nothing of the block."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return {key: without_cache(self.owner, value) for key, value in arguments.items()}

    def leaves(self, arguments: Mapping[Any, Any]) -> Iterator[tuple[Any, Rows | None]]:
        """Each leaf of the arguments, and the rows that it is packed in, if it is."""
        first = True
        for key, value in arguments.items():
            name = self.names[key] if isinstance(key, int) and key < len(self.names) else str(key)
            exact = any(part in name for part in EXACT)
            for leaf in tree_leaves(value):
                packs = isinstance(leaf, Tensor) and not exact
                yield leaf, self._rows(leaf, first) if packs else None
                first = False

    def _rows(self, x: Tensor, first: bool) -> Rows | None:
        """The rows that an argument is packed in: an activation with enough of them.

        It has a gradient, or is the first argument, as what a model gets is to its first block.
        """
        images = x.dim() > 2 and x.shape[1] in self.channels
        columns = x.shape[1] if images else x.shape[-1] if x.dim() else 1
        activation = x.is_floating_point() and not isinstance(x, nn.Parameter)
        activation = activation and (x.requires_grad or first)
        if activation and x.layout is torch.strided and x.numel() >= ROWS * max(1, columns):
            return Rows(x.numel() // max(1, columns), columns, images)
        return None

    def _pack(self, arguments: dict[Any, Any]) -> tuple[list[Tensor | None], list[Any]]:
        """The tensors to keep, and for each leaf of the arguments how it is kept, or itself."""
        tensors, forms, seen = list[Tensor | None](), list[Any](), dict[int, int]()
        for leaf, rows in self.leaves(arguments):
            # Hooks of autograd, as save_on_cpu, return a plain tensor in place of a parameter.
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                forms.append(leaf)
            elif id(leaf) in seen:
                forms.append(_Same(seen[id(leaf)]))
            else:
                seen[id(leaf)] = len(forms)
                kept, parts = self._keep(leaf, rows)
                forms.append(kept)
                tensors += parts
        return tensors, forms

    def _keep(self, x: Tensor, rows: Rows | None) -> tuple[Kept, list[Tensor | None]]:
        """How a tensor is kept, and the tensors that are."""
        rule = self.rule
        if rule is None or rows is None:
            return Kept(None, 1, x.shape, x.stride()), [x]

        def copy() -> Packed:
            with torch.no_grad():
                if rows.images:
                    return rule.pack_images(x.detach(), x.dtype)
                return rule.pack(x.detach().reshape(-1, rows.columns))

        packed, _ = self.memo.pack(x, ("block", rows.images), copy, self.owner)
        parts = list(packed.tensors)
        form = packed.holding([None] * len(parts))
        images = memory_format(x) if rows.images else None
        return Kept(form, len(parts), x.shape, x.stride(), images, x.requires_grad), parts

    def _check(self, changed: list[Tensor], kept: list[Tensor | None]) -> None:
        """Raises UsageError if a block changed an argument in place that it needs unchanged."""
        places = [tensor.untyped_storage()._cdata for tensor in changed]
        if len(set(places)) < len(places) or any(
            one is tensor for one in changed for tensor in kept
        ):
            raise UsageError(
                f"{self.label} changes an argument in place, so it cannot be run again; change a "
                "clone of it."
            )


class _Same(NamedTuple):
    """An argument that is the same tensor as an earlier one."""

    place: int


class _Again:
    """The two runs of a block: with its arguments, once, and then with the values of copies."""

    def __init__(
        self, forward: Callable[..., Any], forms: list[Any], tree: Any, owner: nn.Module, label: str
    ) -> None:
        self.forward, self.forms, self.tree, self.owner = forward, forms, tree, owner
        self.label, self.weights = label, list[tuple[Tensor, int]]()
        self.first: list[Any] | None = None  # the graph must not hold the arguments
        self.changed: list[Buffer] = []

    def __call__(self, held: Tensor, *_: Tensor) -> Any:
        if self.first is not None:
            leaves, self.first = self.first, None
            changed = watching_buffers(self.owner)
            result = self._run(leaves)
            self.changed = changed()
            self.weights = _versions([*self.owner.parameters(), *_parameters(leaves)])
            return result
        leaves, rest = list[Any](), unpacked(held.grad_fn, self.label)
        if _changed(self.weights):
            raise UsageError(changed_since(self.label))
        for form in self.forms:
            if isinstance(form, _Same):
                form = leaves[form.place]
            elif isinstance(form, Kept):
                of_this, rest = rest[: form.parts], rest[form.parts :]
                form = form.tensor(of_this)
            leaves.append(form)
        with unchanged(self.changed):
            return self._run(leaves)

    def _run(self, leaves: list[Any]) -> Any:
        arguments = tree_unflatten(leaves, self.tree)
        args = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        return self.forward(*args, **named)


def _parameters(leaves: Iterable[Any]) -> list[nn.Parameter]:
    """The parameters among arguments."""
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors with their versions."""
    return [(tensor, tensor._version) for tensor in tensors]


def _changed(versions: Iterable[tuple[Tensor, int]]) -> list[Tensor]:
    """The tensors that have changed in place since."""
    return [tensor for tensor, version in versions if tensor._version != version]


def attach(block: nn.Module, name: str, bits: int | None, memo: Memo) -> None:
    """Makes a block run again in the backward pass, until `detach`.

    Args:
        block: of any type.
        name: its name in its model, for messages.
        bits: of an element of its packed inputs, HALF for half precision; None keeps them as they
            are.
        memo: where blocks find copies of each other's inputs.
    """
    block.forward = Rerun(block, name, bits, memo)


def attached(module: nn.Module) -> bool:
    """Whether this very module runs again in the backward pass."""
    return isinstance(vars(module).get("forward"), Rerun)


def detach(module: nn.Module) -> None:
    """Restores the forward of a block."""
    if attached(module):
        rerun: Any = vars(module).pop("forward")
        if rerun.inner is not None:
            module.forward = rerun.inner
