"""Fixtures that run Triton kernels in Triton's interpreter, on CPU tensors.

TRITON_INTERPRET=1 would have to be set before triton is first imported, and then nothing in the
process could be compiled. The fixture `interpreted` swaps the jitted functions instead.
"""

import math
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch

from razorctl.ops import kernels, op
from razorctl.ops.gemm import COPY_ROWS

try:
    import triton
    import triton.experimental.gluon  # the interpreter would import it too late
    from triton.language import constexpr
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    import razorctl.ops.triton as package
    from razorctl.ops.triton.gemm_tiles import Tile
    from razorctl.ops.triton.numbers import nearest
except ImportError:  # where PyTorch comes without Triton
    collect_ignore_glob = ["test_*.py"]
else:
    # Of a GEMM, for small operands, and where its result is a copy.
    SMALL, TALL = Tile(64, 64, 64, 1, 4, 3), Tile(COPY_ROWS, 64, 64, 1, 4, 3)

    class Interpreted(interpreter.InterpretedFunction):
        """A function that patches nothing when a kernel calls it; `_interpreting` has done so."""

        def __call__(self, *args, **kwargs):
            return self.rewrite()(*args, **kwargs)


def _cache_types(patch: pytest.MonkeyPatch) -> None:
    """Caches in the interpreter what depends on types alone."""
    core, of_numpy = triton.language.core, interpreter._get_np_dtype
    block, tensor = core.block_type.__init__, core.tensor.__init__
    arrays, blocks, sizes = {}, {}, {}

    def array_type(kind):
        scalar = kind.scalar
        if scalar.name not in arrays:
            arrays[scalar.name] = of_numpy(scalar)
        return arrays[scalar.name]

    def init_block(self, element, shape):
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            block(self, element, shape)
            blocks[key] = vars(self) | {"others": {}}
        vars(self).update(blocks[key])

    def of(self, element):
        """The block of the same shape of another type of element."""
        if element.name not in self.others:
            self.others[element.name] = core.block_type(element, self.shape)
        return self.others[element.name]

    def init_tensor(self, handle, kind):
        shape = kind.shape if kind.is_block() else None
        if id(shape) not in sizes:
            tensor(self, handle, kind)
            sizes[id(shape)] = shape, self.shape, self.numel  # the first keeps its id alive
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        _, self.shape, self.numel = sizes[id(shape)]

    equal = core.dtype.__eq__
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or equal(self, other))
    patch.setattr(core.block_type, "with_element_ty", of)
    patch.setattr(interpreter, "_get_np_dtype", array_type)
    patch.setattr(core.block_type, "__init__", init_block)
    patch.setattr(core.tensor, "__init__", init_tensor)


def _hasten(patch: pytest.MonkeyPatch) -> None:
    """Takes from the interpreter what costs most and changes no result.

    A sum of integers is not taken again in 64 bits to see whether it has overflown, which took a
    third of the time: where it has, results differ.
    """
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))

    def combine(self, inputs):
        """A reduction by a function of razorctl, of all pairs of neighbors at once.

        The stock one calls the function for each element.
        """
        assert self.axis is not None
        assert not self.keep_dims
        parts = [np.moveaxis(each.handle.data, self.axis, 0) for each in inputs]
        kinds = [each.dtype for each in inputs]
        while len(parts[0]) > 1:
            pairs = [part[at::2] for at in (0, 1) for part in parts]
            combined = self.combine_fn.fn(*map(self.to_tensor, pairs, 2 * kinds))
            parts = [each.handle.data for each in combined]
        return list(map(self.to_tensor, (part[0] for part in parts), kinds))

    semantic = type(interpreter.interpreter_semantic)
    stock = semantic.broadcast_impl_value

    def splat(self, scalar, block):
        kind, value = block.type.with_element_ty(scalar.dtype), scalar.handle.data
        data = np.full(block.handle.data.shape, value, value.dtype)
        return self.tensor(interpreter.TensorHandle(data, scalar.dtype), kind)

    def broadcast(self, left, right):
        """The stock one takes several times as long for a scalar, and for blocks of one shape."""
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (True, False):
            return left, splat(self, right, left)
        if blocks == (False, True):
            return splat(self, left, right), right
        if blocks == (True, True) and left.handle.data.shape == right.handle.data.shape:
            return left, right
        return stock(self, left, right)

    patch.setattr(interpreter.ReduceOps, "generic_reduce", combine)
    patch.setattr(semantic, "broadcast_impl_value", broadcast)


def _modules() -> list[ModuleType]:
    return [m for name, m in sys.modules.items() if name.startswith("razorctl.ops.triton")]


def _forget() -> None:
    """Clears the caches of functions, whose results may have kernels."""
    for module in _modules():
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def _interpreting() -> Iterator[tuple[pytest.MonkeyPatch, Callable[[ModuleType], ModuleType]]]:
    """Yields a patch for further changes, and a function that makes a module's kernels interpreted.

    The functions that these kernels call are interpreted too. Inside the block nothing compiles.
    """
    patch = pytest.MonkeyPatch()
    convert = interpreter._convert_float

    def rounded(values, before, after, mode):
        """A cast, which on a card rounds to nearest; the interpreter truncates."""
        if (before, after) != (triton.language.float32, triton.language.bfloat16):
            return convert(values, before, after, mode)
        cast = torch.from_numpy(values.view(np.float32)).bfloat16().view(torch.int16)
        return cast.numpy().view(np.uint16)

    patch.setattr(interpreter, "_convert_float", rounded)
    _cache_types(patch)
    _hasten(patch)
    # By identity: the hash of a function depends on all that it calls.
    swapped: dict[int, Interpreted] = {}
    done: list[ModuleType] = []

    def swap(module: ModuleType) -> ModuleType:
        _forget()
        if module in done:
            return module
        done.append(module)
        for place in (module, *_modules(), triton.language, triton.language.standard):
            for name, value in list(vars(place).items()):
                if isinstance(value, JITFunction):
                    twin = swapped.setdefault(id(value), Interpreted(value.fn))
                    patch.setattr(place, name, twin)
                elif isinstance(value, constexpr) and place in (module, *_modules()):
                    patch.setattr(place, name, value.value)
        return module

    # Functions of razorctl use triton.language, Triton's functions its core.
    scopes = [interpreter._patch_lang(f) for f in (nearest.fn, triton.language.cdiv.fn)]
    try:
        yield patch, swap
    finally:
        for scope in reversed(scopes):
            scope.restore()
        patch.undo()
        _forget()


@pytest.fixture(autouse=True)
def programs(request, monkeypatch) -> Callable[[str | None], None]:
    """A function that sets the order of programs in later launches; None is first to last.

    A card runs programs in any order. The initial order is that of --program-order.
    """
    builder, order = interpreter.interpreter_builder, request.config.getoption("--program-order")
    go = builder.set_grid_idx

    def choose(wanted: str | None) -> None:
        nonlocal order
        order = wanted

    def go_elsewhere(*place: int) -> None:
        sizes = builder.grid_dim
        index = int(np.ravel_multi_index(place, sizes))
        if order == "reverse":
            index = math.prod(sizes) - 1 - index
        elif order == "shuffle":
            index = _shuffled(math.prod(sizes))[index]
        go(*map(int, np.unravel_index(index, sizes)))

    monkeypatch.setattr(builder, "set_grid_idx", go_elsewhere)
    return choose


@cache
def _shuffled(count: int) -> list[int]:
    return random.Random(count).sample(range(count), count)


@pytest.fixture(scope="module")
def interpreting() -> Iterator[Callable[[ModuleType], ModuleType]]:
    """The function of `interpreted`, which rewrites a kernel once for all tests of a file."""
    with _interpreting() as (_, swap):
        yield swap


@pytest.fixture
def interpreted(
    interpreting: Callable[[ModuleType], ModuleType],
) -> Iterator[Callable[[ModuleType], ModuleType]]:
    """A function that makes the kernels of a module, and their callees, run in the interpreter."""
    yield interpreting
    _forget()


@pytest.fixture(scope="module")
def card() -> Iterator[Callable[[str], None]]:
    """Runs ops on CPU tensors as on a card, through the dispatcher.

    The fixture is a function: with "kernels" ops run the kernels of a card, in the interpreter;
    with "bodies" their PyTorch operations.
    """
    for _, name, _ in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{name}")
    fused = [one for one in op.OPS.values() if "cuda" in one.kernels]
    before = {one: one.kernels.get("cpu", one.body) for one in fused}

    def run(what: str) -> None:
        for one in fused:
            one.register("cpu", one.kernels["cuda"] if what == "kernels" else one.body)

    with _interpreting() as (patch, swap), kernels.assumed(dot=True):
        gemm = swap(import_module(f"{package.__name__}.gemm"))
        patch.setattr(op, "alone", lambda args: False)
        patch.setattr(gemm, "_capability", lambda device: 80)
        patch.setattr(
            gemm, "tiles_for", lambda capability, aligned, copied: (TALL if copied else SMALL,)
        )
        patch.setattr(gemm.tuning, "fastest", lambda ways, work, key: next(iter(ways.values())))
        run("kernels")
        yield run
    for one, kernel in before.items():
        one.register("cpu", kernel)
