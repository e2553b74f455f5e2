"""The choice of the blocks that run again, so that a model keeps few enough bytes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from razorctl.config import registry
from razorctl.memory.saved import on_copies, traced_bytes_by_module
from razorctl.surgery import reruns


@dataclass
class Module:
    """The bytes that a module keeps with all inside it, and those of copies of its inputs.

    calls: how often it ran. unknown: the type of an argument with which it cannot run again.
    """

    held: int = 0
    inputs: int = 0
    calls: int = 0
    unknown: str = ""


def measured(model: nn.Module, inputs: Any, **run: Any) -> dict[str, Module]:
    """Traces a sparsified model; name -> what the module keeps, of all modules."""

    def trace(twin: nn.Module, batch: Any) -> dict[str, Module]:
        found = {name: Module() for name, _ in twin.named_modules()}
        for name, module in twin.named_modules():
            _watch(module, found[name])
        for name, size in traced_bytes_by_module(twin, batch, **run).items():
            for outer in _outer(name):
                found[outer].held += size
        return found

    return on_copies(trace, model, inputs)


def _watch(module: nn.Module, found: Module) -> None:
    """Adds what a module is called with to what is found of it."""

    def before(block: nn.Module, args: Any, kwargs: Any) -> None:
        values = (*args, *kwargs.values())
        leaves = tree_leaves([reruns.without_cache(block, value) for value in values])
        found.calls += 1
        found.inputs += sum(map(_kept, leaves))
        found.unknown = found.unknown or reruns.unknown(leaves)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _kept(leaf: Any) -> int:
    """About the bytes that a block keeps of an argument in 8 bits."""
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or isinstance(leaf, nn.Parameter):
        return 0
    return (
        leaf.numel() if reruns.packable(leaf, leaf.shape[-1] if leaf.dim() else 1) else leaf.nbytes
    )


def _outer(name: str) -> Iterator[str]:
    """The name of a module and of all that it is inside of."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def groups(modules: Mapping[str, Module], budget: float, listed: bool) -> list[list[str]]:
    """The blocks that may run again, in groups whose names differ in numbers alone.

    Of the ways to choose blocks that are not inside each other, one that is likely to meet the
    budget has about the least peak: what is kept, and what the largest block holds while it runs
    again. Groups that spare most are first.

    Args:
        modules: of `measured`.
        budget: in bytes.
        listed: whether blocks are elements of lists and sequences alone; otherwise any module with
            none inside is too.
    """
    inside: dict[str, list[str]] = {}
    for name in modules:
        if name:
            inside.setdefault(name.rpartition(".")[0], []).append(name)

    def able(name: str) -> bool:
        module = modules[name]
        return bool(module.calls and not module.unknown and _spared(module) > 0)

    elements = {name for name in modules if name.rpartition(".")[2].isdigit() and able(name)}
    # What elements are inside of is the model, more or less, and would save nothing at its peak.
    above = {outer for name in elements for outer in _outer(name.rpartition(".")[0])}

    def fit(name: str) -> bool:
        return name in elements or (not listed and name not in above and able(name))

    largest = Counter[str]()  # of a group, so that its blocks are chosen together
    for name in filter(fit, modules):
        stars = registry.starred(name)
        largest[stars] = max(largest[stars], modules[name].held)

    def chosen(name: str, most: int) -> Iterator[str]:
        if fit(name) and largest[registry.starred(name)] <= most:
            yield name
        else:
            for child in inside.get(name, ()):
                yield from chosen(child, most)

    def excess_and_peak(names: list[str]) -> tuple[float, int]:
        kept = modules[""].held - sum(_spared(modules[name]) for name in names)
        return max(0, kept - budget), kept + max((modules[n].held for n in names), default=0)

    ways = (list(chosen("", most)) for most in sorted(set(largest.values())))
    best = min(ways, key=excess_and_peak, default=[])
    by_stars: dict[str, list[str]] = {}
    for name in best:
        by_stars.setdefault(registry.starred(name), []).append(name)
    spares = {stars: sum(_spared(modules[n]) for n in names) for stars, names in by_stars.items()}
    return [by_stars[stars] for stars in sorted(spares, key=spares.__getitem__, reverse=True)]


def unfit(modules: Mapping[str, Module]) -> str:
    """The name of the largest module that cannot run again, "" if all can."""
    names = [name for name, module in modules.items() if name and module.unknown]
    return max(names, key=lambda name: modules[name].held, default="")


def _spared(module: Module) -> int:
    return module.held - module.inputs
