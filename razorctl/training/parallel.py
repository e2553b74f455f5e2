"""A model that several processes train: DistributedDataParallel, or FSDP2 over the blocks.

FSDP2 makes parameters DTensors. `full_tensors` and `put` turn them into the tensors of one process
and back, so that files do not depend on the number of processes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from razorctl.config.job import Job
from razorctl.step import Losses
from razorctl.surgery.blocks import blocks
from razorctl.system import processes

# Methods of transformers' models that run a part of the forward pass.
FORWARDS = ("get_image_features", "get_text_features")


class WithLoss(nn.Module):
    """A model whose output is its loss.

    DistributedDataParallel copies outputs; a copy of lazy logits would compute them.
    """

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, inputs: Any, labels: Tensor, reduction: str) -> Tensor:
        return self.losses(self.model, inputs, labels, reduction)


def parallel(
    model: nn.Module, losses: Losses, job: Job, device: torch.device
) -> tuple[nn.Module, Losses]:
    """The model and the losses of the steps of several processes. Collective.

    FSDP2 changes the model in place.
    """
    if job.processes == 1:
        return model, losses
    if job.strategy == "fsdp":
        return _sharded(model, device), losses
    from torch.nn.parallel import DistributedDataParallel

    # Some parameters get no gradient; a joint budget draws other ones in each step.
    together = DistributedDataParallel(
        WithLoss(model, losses),
        device_ids=None if device.type == "cpu" else [device],
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    return together, lambda wrapped, *batch: wrapped(*batch)


def _sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, whose single numbers become tensors [1], since FSDP2 shards no others."""
    # Unlike accelerate's FSDP2, it runs on CPUs, so it is tested without GPUs.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for name, weight in [*model.named_parameters()]:
        if weight.ndim == 0:
            module, _, of = name.rpartition(".")
            setattr(model.get_submodule(module), of, nn.Parameter(weight.data.view(1)))
    mesh = init_device_mesh(device.type, (processes.count(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in FORWARDS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)
    return model


def unsynced(model: nn.Module) -> AbstractContextManager[object]:
    """The context of a micro-batch that is not the last one of its step.

    DistributedDataParallel then reduces no gradients. FSDP2 reduces the gradients of every
    micro-batch, as unsharded sums may not fit.
    """
    no_sync = getattr(model, "no_sync", None)
    return nullcontext() if no_sync is None else no_sync()


def full_tensors(tree: Any) -> Any:
    """A tree with full tensors on the host in place of DTensors. Collective if it has any."""
    if processes.count() == 1:
        return tree
    from torch.distributed.tensor import DTensor  # takes half a second

    return tree_map_only(DTensor, lambda t: t.detach().full_tensor().cpu(), tree)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def put(values: Mapping[str, Tensor], model: nn.Module) -> None:
    """Loads full tensors into a model, whose parameters may be DTensors. Collective.

    values: a state dict of the first process; the others receive it, and their `values` are unused.
    """
    if processes.count() > 1:
        present = model.state_dict().items()
        values = {name: _received(values, name, entry) for name, entry in present}
    model.load_state_dict(values)


def _received(values: Mapping[str, Tensor], name: str, entry: Tensor) -> Any:
    """The first process's full tensor, as a DTensor like `entry` if this is one. Collective."""
    value = values[name] if processes.first() else torch.empty(entry.shape)
    value = value.to(local(entry).device, entry.dtype).contiguous()
    if hasattr(entry, "to_local"):
        return like(value, entry)  # which sends the first process's
    torch.distributed.broadcast(value, 0)
    return value


def like(value: Any, other: Any) -> Any:
    """A full tensor as a DTensor like `other`, if `other` is one. Collective in this case."""
    if processes.count() == 1:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(other, DTensor):
        return value
    device = other.to_local().device
    return distribute_tensor(value.to(device), other.device_mesh, other.placements)


def unsharded(model: nn.Module, job: Job) -> nn.Module | None:
    """In the first process, a copy on the host of a model that FSDP2 will change; else None."""
    sharded = job.processes > 1 and job.strategy == "fsdp"
    return deepcopy(model).cpu() if sharded and processes.first() else None


def gathered(model: nn.Module, copy: nn.Module | None) -> nn.Module:
    """The copy of `unsharded` with the weights of the model, else the model. Collective."""
    weights = full_tensors(model.state_dict())
    if copy is None:
        return model
    copy.load_state_dict(weights)
    return copy


def shard(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Shards the full tensors in an optimizer's state dict like its parameters. Collective."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(hasattr(parameter, "to_local") for parameter in parameters):
        return
    for number, values in state["state"].items():
        parameter = parameters[number]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = like(value, parameter)
