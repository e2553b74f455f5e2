"""Traced and measured bytes: the only place that touches torch's private trackers."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.sampling import Blocks


def saved_bytes(model: nn.Module, inputs: Any, *, autocast: torch.dtype | None = None) -> int:
    """Bytes that autograd would hold between the forward and backward pass of a training step.

    Counts unique storages; parameters and buffers are excluded, since they live on anyway. The
    pass runs on fake copies in train mode, so it allocates nothing, computes nothing and leaves
    model, samplers and random state alone. `inputs` (a tensor, a tuple of arguments or a mapping
    of keywords) and the model may be real or fake. `autocast` is the dtype of a mixed-precision
    step, None for none. Under a joint budget the blocks of largest input count as drawn.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    fakes = [*tensors, *model.parameters(), *model.buffers()]
    modes = (tensor.fake_mode for tensor in fakes if isinstance(tensor, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    device = tensors[0].device.type
    with FakeCopyMode(mode):
        model = copy.deepcopy(model).train()
    inputs = tree_map_only(Tensor, mode.from_tensor, inputs)
    resident = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def trace() -> int:
        held: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in resident:
                held[_storage(tensor)] = tensor.untyped_storage()
            return tensor

        with (
            mode,
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.autocast(device, dtype=autocast, enabled=autocast is not None),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            else:
                output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        del output
        return sum(storage.nbytes() for storage in held.values())

    drawing = (getattr(module, "blocks", None) for module in model.modules())
    blocks = next((b for b in drawing if isinstance(b, Blocks)), None)
    if blocks is not None:
        blocks.hold_all()
        trace()
        blocks.hold_largest()
    return trace()


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
