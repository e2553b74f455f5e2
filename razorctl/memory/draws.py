"""The draw of a joint budget that saves most: a trace counts that one."""

from collections.abc import Callable

from torch import nn

from razorctl.sampling.joint import MARK, Blocks, Reduce


class Held(Blocks):
    """A draw that stays what it is, and notes what its blocks save.

    sizes: of each block the elements that its weight packed last, or the bytes that were saved
    while its branch ran.
    """

    sizes: list[int]
    branch: int | None  # the one that is running

    @classmethod
    def hold(cls, blocks: Blocks) -> "Held":
        """Makes a draw, of a copy of a model, one of every block."""
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

    def saved(self, size: int) -> None:
        """Told of bytes that are saved, somewhere in the model."""
        if self.branch is not None:
            self.sizes[self.branch] += size

    def hold_largest(self) -> None:
        """Becomes the draw of the largest blocks."""
        largest = sorted(range(self.size), key=self.sizes.__getitem__, reverse=True)
        self.drawn = dict.fromkeys(largest[: self.sampler.count], 1.0)


def draws(model: nn.Module) -> list[Blocks]:
    """The draws of `model` and its parts."""
    return [vars(module)[MARK] for module in model.modules() if MARK in vars(module)]


def hold_largest(model: nn.Module, forward: Callable[[Callable[[int], object]], object]) -> None:
    """Holds the draws of a copy of a model to those that save most, which a forward pass tells.

    `forward(note)` runs one, and tells `note` the bytes of each storage that it saves.
    """
    held = [Held.hold(blocks) for blocks in draws(model)]

    def note(size: int) -> None:
        for blocks in held:
            blocks.saved(size)

    if held:
        forward(note)
    for blocks in held:
        blocks.hold_largest()
