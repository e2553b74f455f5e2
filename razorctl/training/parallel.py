"""A model that several processes train: DistributedDataParallel, or FSDP2 over the blocks.

A model that FSDP2 trains has DTensors as parameters. `full_tensors` and `put` turn them into the
tensors that one process would have, and back, so files do not depend on the number of processes.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from razorctl import processes
from razorctl.job import Job
from razorctl.step import Losses
from razorctl.surgery.blocks import blocks


class WithLoss(nn.Module):
    """A model whose output is its loss.

    DistributedDataParallel copies outputs, and logits that are not computed yet would have to be.
    """

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, inputs: Any, labels: Tensor, reduction: str) -> Tensor:
        return self.losses(self.model, inputs, labels, reduction)


def parallel(
    model: nn.Module, losses: Losses, job: Job, device: torch.device
) -> tuple[nn.Module, Losses]:
    """What training steps call instead of `model` and `losses`. Collective.

    FSDP2 changes the model in place.
    """
    if job.processes == 1:
        return model, losses
    if job.strategy == "fsdp":
        return _sharded(model, device), losses
    from torch.nn.parallel import DistributedDataParallel

    # A joint budget leaves other parameters out in each step, and some stock models always do.
    together = DistributedDataParallel(
        WithLoss(model, losses),
        device_ids=None if device.type == "cpu" else [device],
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    return together, lambda whole, *batch: whole(*batch)


def _sharded(model: nn.Module, device: torch.device) -> nn.Module:
    # accelerate's own FSDP2 has no CPU, so that nothing of it could be tested without GPUs.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.count(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unsynced(model: nn.Module) -> AbstractContextManager[object]:
    """The context of a micro-batch that is not the last one of its step.

    DistributedDataParallel then keeps each process's own sum of gradients. FSDP2 reduces the
    gradients of every micro-batch, since sums that are not sharded would not fit.
    """
    no_sync = getattr(model, "no_sync", None)
    return nullcontext() if no_sync is None else no_sync()


def full_tensors(tree: Any) -> Any:
    """A tree with full tensors on the host in place of DTensors. Collective if it has any."""
    if processes.count() == 1:
        return tree
    from torch.distributed.tensor import DTensor  # takes half a second

    return tree_map_only(DTensor, lambda t: t.detach().full_tensor().cpu(), tree)


def put(values: Mapping[str, Tensor], model: nn.Module) -> None:
    """Gives a model the full tensors of a state dict; a process keeps its own part of each."""
    own = model.state_dict()
    model.load_state_dict({name: like(value, own.get(name)) for name, value in values.items()})


def like(value: Any, own: Any) -> Any:
    """A full tensor, as a DTensor if `own` is one, laid out like it. Collective if so."""
    if processes.count() == 1:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor):
        return value
    device = own.to_local().device
    return distribute_tensor(value.to(device), own.device_mesh, own.placements)


def unsharded(model: nn.Module, job: Job) -> nn.Module | None:
    """A copy on the host of a model that FSDP2 will change, in the first process; else None."""
    sharded = job.processes > 1 and job.strategy == "fsdp"
    return deepcopy(model).cpu() if sharded and processes.first() else None


def gathered(model: nn.Module, copy: nn.Module | None) -> nn.Module:
    """The copy of `unsharded` with the model's weights, or else the model. Collective."""
    weights = full_tensors(model.state_dict())
    if copy is None:
        return model
    copy.load_state_dict(weights)
    return copy


def shard(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Lays the full tensors in an optimizer's state dict out like its parameters. Collective."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state["state"].items():
        own = parameters[number]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == own.shape:
                values[name] = like(value, own)
