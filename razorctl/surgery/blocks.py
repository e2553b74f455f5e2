"""The blocks of a model; FSDP2 gathers one after the other."""

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the list or sequence with most parameters; all are of one class.

    In a transformer they are its layers. A model without such a list has no blocks.
    """
    lists = (m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    return list(max(lists, key=_parameters, default=nn.ModuleList()).children())


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(p.nbytes for p in module.parameters())


def _parameters(blocks: nn.Module) -> int:
    children = list(blocks.children())
    one_class = len(children) > 1 and len({type(child) for child in children}) == 1
    return sum(p.numel() for p in blocks.parameters()) if one_class else 0
