"""The two runs of code that runs again; see `code_again`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from razorctl.errors import UsageError
from razorctl.layers import layouts
from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer, save, stock_type
from razorctl.layers.code_forms import RESULT, Code, CodeInputs, CodeOutput, PartOutput, Place
from razorctl.layers.second_run import EXACT, ROWS, laid, without_cache
from razorctl.ops.images import memory_format, unrolled
from razorctl.rules.packed import Packed
from razorctl.spans import packing

push = torch._C._autograd._push_saved_tensors_default_hooks
pop = torch._C._autograd._pop_saved_tensors_default_hooks


class Keeping(torch.autograd.Function):
    """The node of a graph that keeps the inputs of code; nothing flows back through it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: CodeInputs) -> Tensor:
        save(ctx, inputs)
        return anchor.detach()


class _DoneError(Exception):
    """Ends a second run that has made all that is needed."""


class KeptByCode(NamedTuple):
    """The object that autograd holds in place of a tensor that the code keeps."""

    code: Code
    number: int


class FirstRun:
    """The first run, as long as it lasts."""

    def __init__(
        self, code: Code, arguments: dict[Any, Any], unpack: Callable[[KeptByCode], Tensor]
    ) -> None:
        self.code, self.owner, self.unpack = code, code.owner, unpack
        values = {key: without_cache(self.owner, value) for key, value in arguments.items()}
        leaves, code.tree = tree_flatten(values)
        names = [str(key) for key in values]
        names[: len(code.names)] = code.names[: len(names)]
        exact = [
            any(part in name for part in EXACT)
            for name, value in zip(names, values.values(), strict=True)
            for _ in tree_flatten(value)[0]
        ]
        self.leaves = [
            (leaf, leaf._version if isinstance(leaf, Tensor) else 0, name)
            for leaf, name in zip(leaves, exact, strict=True)
        ]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.device = tensors[0].device
        self.derived: dict[int, Packed] = {}
        self.copies: list[Packed] = []
        self.exact: list[Tensor | None] = []
        self.inputs: CodeInputs | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        # The same functions all the time: by them layers know where autograd keeps.
        self.pair = self.pack, self.unpack
        push(*self.pair)
        try:
            yield
        finally:
            pop()
            del self.pair

    def pack(self, t: Tensor) -> KeptByCode:
        self.code.likes.append((t.shape, t.dtype))
        return KeptByCode(self.code, len(self.code.likes) - 1)

    def through(self, part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Calls a part, which keeps by itself."""
        images = isinstance(part, RazorLayer) and part.kind == "conv"
        code, number = self.code, len(self.code.outputs)
        pop()
        try:
            if args and code.likes:
                self.offer(args[0], number)
            y: Tensor = forward(*args, **kwargs)
            before = len(code.likes), len(self.copies), len(self.exact)
            code.outputs.append(PartOutput(self.place(y, images=images), *before))
        finally:
            push(*self.pair)
        return y

    def offer(self, x: Any, number: int) -> None:
        """Offers what the code makes of its inputs so far to the layer that it feeds."""
        memo = self.owner.memo
        if memo is not None and memo.derives and isinstance(x, Tensor):
            form = CodeOutput(x.shape, x.dtype, (self.form(),), code=self.code, number=number)
            memo.derive(x, form, whole=number != RESULT)

    def form(self) -> CodeInputs:
        """The inputs that the code runs again with, as far as they are known."""
        if not self.code.leaves:
            self.derive()
            self.code.leaves = [self.argument(*leaf) for leaf in self.leaves]
        sources, others = tuple(self.copies), tuple(self.exact)
        had = None if self.inputs is None else (len(self.inputs.sources), len(self.inputs.others))
        if self.inputs is None or had != (len(sources), len(others)):
            self.inputs = CodeInputs(torch.Size(), torch.float32, sources, others)
        return self.inputs

    def derive(self) -> None:
        """Finds the derived arguments, together, since they may view one tensor."""
        views = [leaf for leaf, *_, exact in self.leaves if not exact and _active(leaf)]
        found = self.owner.derived(*views) if views else ()
        self.derived = {id(view): copy for view, copy in zip(views, found, strict=False)}

    def argument(self, leaf: Any, version: int, exact: bool) -> Any:
        """Where an argument is kept, or itself if it is no tensor."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf._version != version:
            name = f"{self.owner.place or 'a layer'} ({stock_type(self.owner).__name__})"
            raise UsageError(
                f"{name} changes an argument in place, so it cannot be run again; change a clone "
                "of it."
            )
        return self.place(leaf, exact)

    def place(self, x: Tensor, exact: bool = False, images: bool = False) -> Place:
        """Keeps a tensor, as a copy if it is an activation."""
        like, images = (x.shape, x.dtype, x.stride(), x.requires_grad), images and x.dim() > 2
        columns = x.shape[1 if images else -1] if x.dim() else 1
        if exact or not _active(x) or x.numel() < ROWS * max(1, columns):
            self.exact.append(x.detach())
            return Place(len(self.exact) - 1, False, like)
        self.copies.append(self.copy(x, images))
        return Place(len(self.copies) - 1, True, like, memory_format(x) if images else None)

    def copy(self, x: Tensor, images: bool) -> Packed:
        """The copy of an activation: that of another layer if there is one."""
        owner, dtype = self.owner, compute_dtype(x)
        if images:
            with packing(), torch.no_grad():
                return owner.rules.of(x.dtype).pack_images(x.detach(), x.dtype)
        if id(x) in self.derived:
            return self.derived[id(x)]
        derived = owner.derived(x)
        if derived:
            return derived[0]
        if owner.memo is not None:
            copy = owner.memo.find(x, layouts.of_rows(dtype), owner)
            if copy is not None and copy.elementwise:
                return copy
        with packing(), torch.no_grad():
            return owner.rules.of(dtype).pack(x.detach().reshape(-1, x.shape[-1]))

    def end(self) -> None:
        """Keeps what a second run needs, if there is to be one."""
        code = self.code
        while code.outputs and code.outputs[-1].likes == len(code.likes):  # nothing follows them
            last = code.outputs.pop()
            del self.copies[last.copies :], self.exact[last.exact :]
        if code.likes:
            anchor = torch.zeros((), requires_grad=True)
            code.keeper = Keeping.apply(anchor, self.form()).grad_fn


class SecondRun:
    """The second run, as long as it lasts."""

    def __init__(self, code: Code, inputs: CodeInputs) -> None:
        self.code, self.copies, self.exact = code, inputs.read(), inputs.others
        tensors = [*self.copies, *(t for t in self.exact if t is not None)]
        self.device = tensors[0].device
        self.calls = 0
        code.kept, code.read = {}, {}

    def run(self) -> None:
        """Runs the code up to the last tensor that is needed."""
        code = self.code
        leaves = [self.tensor(leaf) if isinstance(leaf, Place) else leaf for leaf in code.leaves]
        arguments = tree_unflatten(leaves, code.tree)
        args = [value for key, value in arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in arguments.items() if isinstance(key, str)}
        try:
            result = code.call(*args, **named)
        except _DoneError:
            return
        code.read[RESULT] = first_of(result).detach()
        if len(code.kept) < len(code.likes):
            raise code.differs()

    def tensor(self, place: Place) -> Tensor:
        """The tensor that the code gets in the place of one that it got."""
        shape, dtype, strides, gradient = place.like
        if not place.packed:
            given = self.exact[place.number]
            assert given is not None
            x = given.detach()
        elif place.images is not None:
            x = unrolled(self.copies[place.number].to(dtype), shape)
            x = x.contiguous(memory_format=place.images)
        else:
            x = self.copies[place.number].to(dtype).reshape(shape).detach()
        if gradient:
            x = torch.ops.aten._unsafe_view(x.requires_grad_(), shape)  # no leaf
        return x if x.stride() == strides else laid(x, strides)

    def pack(self, t: Tensor) -> int:
        code, number = self.code, len(self.code.kept)
        if number >= len(code.likes) or code.likes[number] != (t.shape, t.dtype):
            raise code.differs()
        code.kept[number] = t.detach()
        self.check()
        return number

    def check(self) -> None:
        """Ends the run if all is made."""
        code = self.code
        if len(code.kept) == len(code.likes) and code.wanted <= code.read.keys():
            raise _DoneError

    def replayed(self, part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The output of a part in the first run, in place of a call."""
        code, number = self.code, self.calls
        self.calls += 1
        if number in code.wanted:
            code.read[number] = args[0].detach()
            self.check()
        place = code.outputs[number].place if number < len(code.outputs) else None
        if place is None or place.number >= len(self.copies if place.packed else self.exact):
            raise _DoneError
        return self.tensor(place)


def _active(x: Any) -> bool:
    """Whether an argument is an activation that has a gradient."""
    tensor = isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
    return tensor and x.requires_grad and x.is_floating_point() and x.layout is torch.strided


def first_of(result: Any) -> Tensor:
    """The first of the results of code."""
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first


@contextmanager
def calling(parts: Sequence[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Inside, `call(part, forward, ...)` runs in place of the forward of each part."""
    before = [vars(part).get("forward") for part in parts]
    for part in parts:
        vars(part)["forward"] = partial(call, part, part.forward)
    try:
        yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            if forward is None:
                del vars(part)["forward"]
            else:
                vars(part)["forward"] = forward
