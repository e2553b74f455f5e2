"""The draw of a joint budget that stores the most bytes; traces count this one."""

from collections.abc import Callable
from typing import Any

from torch import nn

from razorctl.sampling.joint import MARK, Blocks, Reduce


class Held(Blocks):
    """A draw that stays the same in every step, and records what each block stores.

    sizes: for each block, the elements that its weight packed last, or the bytes stored while its
        branch ran.
    """

    sizes: list[int]
    branch: int | None  # the block whose branch is running

    @classmethod
    def hold(cls, blocks: Blocks) -> "Held":
        """Turns the `blocks` of a copied model into a Held that draws every block."""
        blocks.__class__ = cls
        assert isinstance(blocks, Held)
        blocks.sizes, blocks.branch = [0] * blocks.size, None
        blocks.drawn = dict.fromkeys(range(blocks.size), 1.0)
        return blocks

    def advance(self, reduce: Reduce) -> None:
        pass

    def running(self, block: int | None) -> None:
        self.branch = block

    def packed(self, block: int, elements: int) -> None:
        self.sizes[block] = elements

    def hold_largest(self) -> None:
        """Draws the largest blocks: of each kind, as many as the joint budget allows."""
        count, size = self.sampler.count, self.sizes.__getitem__
        drawn, more = list[int](), list[int]()
        for kind in self.kinds:
            blocks = sorted(kind, key=size, reverse=True)
            least, rest = divmod(count * len(blocks), self.size)
            drawn += blocks[:least]
            more += blocks[least : least + 1] if rest else []
        drawn += sorted(more, key=size, reverse=True)[: count - len(drawn)]
        self.drawn = dict.fromkeys(drawn, 1.0)


def joint_draws(model: nn.Module) -> list[Blocks]:
    """The draws of parameter blocks of `model` and its submodules."""
    return [vars(module)[MARK] for module in model.modules() if MARK in vars(module)]


def hold_largest(model: nn.Module, kept: Callable[[Callable[[], Any]], list[Any]]) -> None:
    """Fixes the draws of a copied model to those blocks that store the most bytes.

    `kept(place)` runs a forward pass and returns its `saved.KeptStorage`s.
    """
    held = [Held.hold(blocks) for blocks in joint_draws(model)]

    def running() -> list[int | None]:
        return [blocks.branch for blocks in held]

    for storage in kept(running) if held else ():
        for blocks, branch in zip(held, storage.places[0], strict=True):
            if branch is not None:
                blocks.sizes[branch] += storage.size
    for blocks in held:
        blocks.hold_largest()
