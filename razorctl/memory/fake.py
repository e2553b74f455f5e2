"""Fake copies of models: tensors with sizes and without values."""

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.memory.fake_mode import TraceMode, storage_key


def fake(
    model: nn.Module, mode: FakeTensorMode | None = None, device: torch.device | str = "cpu"
) -> FakeTensorMode:
    """Replaces a model's parameters and buffers on the meta device by fake ones on `device`.

    Returns the mode of the fake tensors, a new one if `mode` is None.
    """
    mode, stand_ins = mode or TraceMode(), dict[int, Tensor]()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in stand_ins:  # tied weights stay tied
                    stand_ins[id(tensor)] = _stand_in(tensor, mode, device)
                tensors[name] = stand_ins[id(tensor)]  # type: ignore[assignment]
    return mode


def mode_of(tensors: Iterable[Tensor]) -> FakeTensorMode | None:
    """The mode of the fake tensors among these; None if none is fake."""
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def copied(model: nn.Module, mode: FakeTensorMode, device: torch.device | str = "cpu") -> nn.Module:
    """A copy of a model whose parameters and buffers are fake, on `device` if they were meta."""
    tensors = [*model.parameters(), *model.buffers()]
    users = Counter(storage_key(tensor) for tensor in tensors if _simple(tensor))
    # To copy a fake tensor, the mode would return an earlier copy that is still alive; a real one
    # takes it ten times as long.
    new = {
        id(tensor): _stand_in(tensor, mode, device if tensor.is_meta else tensor.device)
        for tensor in tensors
        if isinstance(tensor, FakeTensor) or (_simple(tensor) and users[storage_key(tensor)] == 1)
    }
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model, new)
    # The mode may remember a parameter from before it was frozen.
    for new_parameter, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        new_parameter.requires_grad_(parameter.requires_grad)
    return twin


def _simple(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, and no number that a model may read."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.dim():
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _stand_in(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A fake parameter or buffer like another one."""
    stand_in = _fake_like(tensor, mode, device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(stand_in, tensor.requires_grad)
    return stand_in


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A fake tensor on `device` with the shape, strides and dtype of `tensor`."""
    with no_dispatch():  # the mode's own torch.empty_strided takes several times as long
        meta = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )
    return FakeTensor(mode, meta, torch.device(device))


def fake_copies(model: nn.Module, inputs: Any) -> tuple[FakeTensorMode, nn.Module, Any]:
    """A fake mode, a fake copy of a model in train mode, and fake copies of its inputs.

    Copies of meta tensors are on the device of the other tensors, or on the CPU if all are meta.
    """
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)  # tokenizers return their own mapping type
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    tensors += [*model.parameters(), *model.buffers()]
    mode = mode_of(tensors) or TraceMode()
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))

    def stand_in(tensor: Tensor) -> Tensor:
        return _fake_like(tensor, mode, device) if tensor.is_meta else mode.from_tensor(tensor)

    model = copied(model, mode, device).train()
    fake(model, mode, device)
    return mode, model, tree_map_only(Tensor, stand_in, inputs)


@contextmanager
def without_caches() -> Iterator[None]:
    """Inside it, the methods of transformers that cache tensors compute them each time.

    A cache would give what is fake to passes that are real, and the other way round. They cache
    nothing while they are compiled, so this says that they are.
    """
    module: Any = sys.modules.get("transformers.pytorch_utils")
    if module is None:
        yield
        return
    before = module.is_torchdynamo_compiling
    module.is_torchdynamo_compiling = lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_compiling = before


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Inside it, a decoder of transformers that is given no mask and no positions makes no mask.

    It looks whether a mask that it makes itself hides nothing, and whether positions that it counts
    are those of one text in each row. They are, but fake tensors do not tell.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    packed, skips, told = masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa, False

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal told
        given = {name for name, value in kwargs.items() if value is not None}
        told = len(args) > 1 or any("mask" in name or name == "position_ids" for name in given)

    def indices(positions: Tensor) -> Tensor | None:
        found: Tensor | None = packed(positions) if told else None
        return found

    def ignore(mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        ignored: bool = skips(mask if told else None, *args, **kwargs)
        return ignored

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa = indices, ignore
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa = packed, skips
        hook.remove()
