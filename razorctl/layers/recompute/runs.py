"""The first and the second run of recomputed code; see `code`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from razorctl.layers.base import RazorLayer, save
from razorctl.layers.recompute.kept_inputs import RESULT, Code, CodeInputs, PartOutput, Place
from razorctl.layers.recompute.large_logits import Measured
from razorctl.layers.recompute.replayed_state import (
    Rows,
    empty_cache,
    laid,
    leaves_of,
    rows_of,
    split,
    without_cache,
)
from razorctl.ops.images import memory_format
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing


class Keeping(torch.autograd.Function):
    """The graph node that saves the inputs of the code; no gradient flows through it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: CodeInputs, name: str) -> Tensor:
        ctx.label = name
        save(ctx, inputs)
        return anchor.new_empty(0)


class _DoneError(Exception):
    """Ends a second run once everything needed is computed."""


class FirstRun:
    """The first run, while it lasts."""

    def __init__(self, code: Code, arguments: Mapping[Any, Any]) -> None:
        self.code = code
        values = {key: without_cache(code.owner, value) for key, value in arguments.items()}
        code.tree = tree_structure(values)
        makes = {key: empty_cache(code.owner, value) for key, value in arguments.items()}
        code.caches = {key: make for key, make in makes.items() if make is not None}
        self.leaves = [
            (x, x._version if isinstance(x, Tensor) else 0, rows)
            for x, rows in leaves_of(values, code.names, code.channels)
        ]
        self.tensors = [x for x, *_ in self.leaves if isinstance(x, Tensor)]
        self.derived: dict[int, Packed] = {}
        self.copies: list[Packed] = []
        self.exact: list[Tensor | None] = []
        self.inputs: CodeInputs | None = None
        owner = code.owner if code.by_rules else None
        self.measures = isinstance(owner, Measured) and any(map(owner.measures, self.tensors))
        self.made: dict[int, tuple[Tensor, Rows]] = {}  # the packed inputs, while it measures
        self.measured = set[int]()  # indices of copies whose gradients have been compared

    @contextmanager
    def hooks(self) -> Iterator[None]:
        # The same two functions all the time: `memo._place` compares them. The graph holds them, so
        # they must not hold the arguments.
        self.storing = saved_tensors_hooks(self.code.pack, self.code.unpack)
        with self.storing:
            yield

    def through(self, part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Calls a part, which stores its input itself."""
        images = isinstance(part, RazorLayer) and part.kind == "conv"
        code, number = self.code, len(self.code.outputs)
        self.storing.__exit__()
        try:
            if args and code.likes:
                if self.made:
                    code.measure(self, args[0])
                self.offer(args[0], number)
            y: Tensor = forward(*args, **kwargs)
            before = len(code.likes), len(self.copies), len(self.exact)
            place = self.place(y, rows_of(y, images and y.dim() > 2))
            code.outputs.append(PartOutput(place, *before))
        finally:
            self.storing.__enter__()
        return y

    def offer(self, x: Any, number: int) -> None:
        """Shares the code's tensor `x` with the layer that reads it."""
        if isinstance(x, Tensor):
            self.code.offer(x, self.form, number)

    def form(self) -> CodeInputs:
        """The inputs of the recomputation, as far as the run has got."""
        if not self.code.leaves:
            views = {id(x): x for x, _, rows in self.leaves if rows}
            self.derived = dict(zip(views, self.code.derive([*views.values()]), strict=False))
            same: dict[int, Place] = {}
            for x, version, rows in self.leaves:
                # Autograd hooks such as save_on_cpu return a plain tensor for a parameter.
                if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
                    self.code.leaves.append(x)
                    continue
                if x._version != version:
                    raise self.code.changes()
                if id(x) not in same:
                    same[id(x)] = self.place(x, rows)
                self.code.leaves.append(same[id(x)])
        sources, others = tuple(self.copies), tuple(self.exact)
        had = None if self.inputs is None else (len(self.inputs.sources), len(self.inputs.others))
        if self.inputs is None or had != (len(sources), len(others)):
            self.inputs = CodeInputs(torch.Size(), torch.float32, sources, others)
        return self.inputs

    def place(self, x: Tensor, rows: Rows | None) -> Place:
        """Stores a tensor: as a copy if it has rows and the code packs, else as it is."""
        like = x.shape, x.dtype, x.stride(), x.requires_grad
        copy = self.derived.get(id(x))
        if rows is not None and copy is None:
            with packing(), torch.no_grad():
                copy = self.code.copy(x, rows)
        if rows is None or copy is None:
            self.exact.append(x.detach())
            return Place(len(self.exact) - 1, False, like)
        self.copies.append(copy)
        if self.measures:
            self.made[len(self.copies) - 1] = x, rows
        images = memory_format(x) if rows.images else None
        self.code.packed.append(Place(len(self.copies) - 1, True, like, images))
        return self.code.packed[-1]

    def end(self) -> None:
        """Stores the inputs of a second run, if one will be needed."""
        code = self.code
        needed = max(code.wanted, default=0)  # earlier outputs lead to tensors that others store
        while len(code.outputs) > needed and code.outputs[-1].likes == len(code.likes):
            last = code.outputs.pop()
            del self.copies[last.copies :], self.exact[last.exact :]
        if code.likes:
            anchor = torch.zeros((), requires_grad=True)
            code.keeper = Keeping.apply(anchor, self.form(), code.name)
            self.check()

    def check(self) -> None:
        """Raises UsageError if the code has changed an argument that is stored as it is."""
        key: Callable[[Any], Any] = StorageWeakRef  # equal for views of one storage
        changed = [
            (key(x.untyped_storage()), isinstance(place, Place) and place.packed)
            for (x, version, _), place in zip(self.leaves, self.code.leaves, strict=True)
            if isinstance(x, Tensor) and x._version != version
        ]
        if len(dict(changed)) < len(changed) or not all(packed for _, packed in changed):
            raise self.code.changes()


class SecondRun:
    """The second run, while it lasts."""

    def __init__(self, code: Code, inputs: CodeInputs) -> None:
        self.code, self.exact = code, inputs.others
        self.copies: list[Tensor | None] = [*inputs.read(code.packed)]
        self.calls = 0
        code.kept, code.read = {}, {}

    def run(self) -> None:
        """Runs the code up to the last tensor that is needed."""
        code = self.code
        places = dict.fromkeys(leaf for leaf in code.leaves if isinstance(leaf, Place))
        made = {place: self.tensor(place) for place in places}
        leaves = [made[leaf] if isinstance(leaf, Place) else leaf for leaf in code.leaves]
        caches = {key: make() for key, make in code.caches.items()}
        args, named = split({**tree_unflatten(leaves, code.tree), **caches})
        try:
            result = code.call(*args, **named)
        except _DoneError:
            return
        code.read[RESULT] = first_of(result).detach()
        if len(code.kept) < len(code.likes):
            raise code.differs()

    def tensor(self, place: Place) -> Tensor:
        """The tensor for the second run in place of one that the first run read."""
        shape, _, strides, gradient = place.like
        held = self.copies if place.packed else self.exact
        given = held[place.number]
        assert given is not None
        x = given.detach()
        if place.packed:
            self.copies[place.number] = None  # so that the code can free it
        if gradient:
            x = torch.ops.aten._unsafe_view(x.requires_grad_(), shape)  # so that it is no leaf
        return x if x.stride() == strides else laid(x, strides)

    def pack(self, t: Tensor) -> int:
        code, number = self.code, len(self.code.kept)
        if number >= len(code.likes) or code.likes[number] != (t.shape, t.dtype):
            raise code.differs()
        # States of random generators are real in traces, and take no operation there.
        code.kept[number] = t.detach() if t.requires_grad else t
        self.check()
        return number

    def check(self) -> None:
        """Ends the run if everything is computed."""
        code = self.code
        if len(code.kept) == len(code.likes) and code.wanted <= code.read.keys():
            raise _DoneError

    def replayed(self, part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The output of a part in the first run, instead of calling it."""
        code, number = self.code, self.calls
        self.calls += 1
        if number in code.wanted:
            code.read[number] = args[0].detach()
            self.check()
        place = code.outputs[number].place if number < len(code.outputs) else None
        if place is None or place.number >= len(self.copies if place.packed else self.exact):
            raise _DoneError
        return self.tensor(place)


def first_of(result: Any) -> Tensor:
    """The first tensor in the results of code."""
    first: Tensor = next(x for x in tree_leaves(result) if isinstance(x, Tensor))
    return first


@contextmanager
def calling(parts: Sequence[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, `call(part, forward, ...)` replaces the forward of each part."""
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
