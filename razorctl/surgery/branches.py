"""Residual branches, the f of x + f(x): a joint budget omits some from the backward pass.

Related work: DropBP (2024) omits layers there, VCAS (2024) samples examples and tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.layers.base import stock_type
from razorctl.layers.by_type import branches_of
from razorctl.layers.own_forward import InPlace, place, put
from razorctl.sampling.joint import Blocks, norm


@dataclass(frozen=True)
class Branch:
    """Modules of `owner` that make up its branch; the last one returns the output, a tensor.

    kind: their names.
    """

    owner: nn.Module
    kind: tuple[str, ...]
    members: tuple[nn.Module, ...]

    def attach(self, blocks: Blocks) -> None:
        """Makes this branch a block of a draw, until `own_forward.take`."""
        block = blocks.join()
        for module in self.members:
            last = module is self.members[-1]
            member = Member(module, self.owner, blocks, block, last)
            put(module, member)


class Member(InPlace):
    """Replaces a module's forward; it runs without grad if the branch is not drawn.

    The output is the stock one either way. It is an attribute of the module instead of a pair of
    hooks: no hook runs after a KeyboardInterrupt, so grad would stay disabled in a notebook.

    The draw learns |f(x)| |dy| of a branch, with dy the gradient of its output. This takes one
    hook. On vit-micro it ranked branches almost like the norm of their weight gradients, which
    would take hooks on parameters. |dy| alone ranks them badly, because it is the gradient of the
    residual stream.
    """

    def __init__(
        self, module: nn.Module, owner: nn.Module, blocks: Blocks, block: int, last: bool
    ) -> None:
        self.module, self.owner, self.last = module, owner, last
        self.blocks, self.block = blocks, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(self.module).forward, self.module)  # of the razor class, if swapped
        if not (self.owner.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        p = self.blocks.probability(self.block)
        self.blocks.running(self.block)
        with torch.set_grad_enabled(p > 0):
            output = forward(*args, **kwargs)
        return self._end(output, p) if self.last else output

    def _end(self, output: Tensor, p: float) -> Tensor:
        self.blocks.running(None)
        if not p:
            return output.detach()  # the owner may have used parameters between the members
        if output.requires_grad:
            learn = partial(self.blocks.observe, self.block, p, size=norm(output))
            output.register_hook(learn)  # type: ignore[no-untyped-call]
        return output


def find(model: nn.Module) -> list[Branch]:
    """The known branches of `model` that have parameters to train.

    A branch is skipped if the forward of a member is patched, since the patch would no longer run.
    It is skipped, too, if the block lacks a member; its attention may use other names.
    """
    branches = [
        Branch(owner, names, tuple(map(owner.get_submodule, names)))
        for owner in model.modules()
        for names in branches_of(stock_type(owner))
        if set(names) <= {name for name, _ in owner.named_modules()}
    ]
    return [
        branch
        for branch in branches
        if any(p.requires_grad for m in branch.members for p in m.parameters())
        and all(map(place, branch.members))
    ]
