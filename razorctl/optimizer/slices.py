"""Updates of large weights in slices, so that the temporaries of an update are small.

torchao's AdamW with 8-bit state restores both moments in single precision for its update: 8 bytes
an element, which for the embedding of Llama-3.2-1B are 2.1 GB. A slice is of whole quantization
blocks and has the state of a weight, so both updates are equal to the bit.
"""

from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SLICE = 2**24  # the most elements of a slice
BLOCK = 256  # elements that torchao quantizes with one scale


def sizes_of(count: int, most: int = SLICE) -> list[int]:
    """The sizes of the slices of a weight of `count` elements, as equal as whole blocks can be.

    Since torchao quantizes no state of fewer than 4,096 elements, none is much smaller than `most`.
    A weight that is no multiple of BLOCK has no quantized state, and is one slice.
    """
    if count <= most or count % BLOCK:
        return [count]
    parts = -(-count // most)
    blocks, further = divmod(count // BLOCK, parts)
    return [BLOCK * (blocks + (part < further)) for part in range(parts)]


class Slices:
    """Makes an optimizer update large weights in slices.

    Between steps the optimizer has whole weights, for schedules, clipping and loss scaling. Its
    state and its state dict have an entry for each slice.
    """

    def __init__(self, optimizer: Optimizer, most: int = SLICE) -> None:
        self._most = most
        self._slices: dict[Tensor, list[nn.Parameter]] = {}
        self._whole: list[list[Tensor]] = []  # of each group, while the optimizer has slices
        optimizer.register_step_pre_hook(lambda *_: self._cut(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._join(optimizer))
        optimizer.register_state_dict_pre_hook(self._cut)
        optimizer.register_state_dict_post_hook(lambda *_: self._join(optimizer))
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._cut(optimizer))
        optimizer.register_load_state_dict_post_hook(self._join)

    def _cut(self, optimizer: Optimizer) -> None:
        """Replaces the weights of an optimizer by their slices."""
        if self._whole:  # a step was interrupted
            self._join(optimizer)
        for group in optimizer.param_groups:
            self._whole.append(group["params"])
            group["params"] = [part for whole in group["params"] for part in self._parts(whole)]

    def _join(self, optimizer: Optimizer) -> None:
        """Undoes `_cut`, and frees the slices' views of gradients."""
        for group, whole in zip(optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        self._whole = []
        for parts in self._slices.values():
            for part in parts:
                part.grad = None

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """The slices of a weight with their gradients; the weight itself if it is small."""
        sizes = sizes_of(whole.numel(), self._most)
        if len(sizes) == 1 or not whole.is_contiguous():
            return [whole]
        views = torch.split(whole.detach().view(-1), sizes)
        if whole not in self._slices:
            self._slices[whole] = [nn.Parameter(view, requires_grad=False) for view in views]
        parts = self._slices[whole]
        for part, view in zip(parts, views, strict=True):
            part.data = view
        if whole.grad is not None:
            gradients = torch.split(whole.grad.reshape(-1), sizes)
            for part, gradient in zip(parts, gradients, strict=True):
                part.grad = gradient
        return list(parts)


def lift_zeros(optimizer: Optimizer) -> None:
    """Makes code 0 of second moments in 8 bits stand for the least value above 0.

    torchao rounds second moments below 1.6e-7 of the largest of their BLOCK to 0, and an update is
    divided by their root: weights of a BERT moved 170 times as far as by AdamW.
    """
    lifted = 0

    def lift(*_: object) -> None:
        nonlocal lifted
        for state in islice(optimizer.state.values(), lifted, None):
            values = getattr(state.get("exp_avg_sq"), "qmap", None)
            if values is not None:
                values[0] = values[1]
        lifted = len(optimizer.state)

    optimizer.register_step_post_hook(lift)
