"""A forward pass with small inputs and made-up weights, by which settings that ruin it show."""

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless

from razorctl.models import Model

LARGEST = 1 << 31  # numbers of a weight, which some models draw at once
TOKENS, MANY = 8, 4  # of a text; layers of a list, which are no stages


def check(
    family: Model, model: nn.Module, build: Callable[[], nn.Module], size: int | None
) -> None:
    """Raises ValueError if the logits of a model are not finite, or the same for all inputs.

    Its weights take no memory, and of many layers of a kind two are tried. A model that cannot run
    so, as it counts its layers, is not tried.

    model: one of `build` without values. size: of an image.
    """
    from accelerate import init_empty_weights

    if max(p.numel() for p in model.parameters()) > LARGEST:
        return
    logits = torch.rand(2)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Exception):
        torch.manual_seed(0)
        with init_empty_weights(include_buffers=False):
            model = build().eval()
        for layers in [*model.modules()]:
            many = isinstance(layers, (nn.ModuleList, nn.Sequential)) and len(layers) > MANY
            if many and len({(type(m), *(p.shape for p in m.parameters())) for m in layers}) == 1:
                del layers[2:]
        weights = {name: _made_up(p.shape) for name, p in model.named_parameters()}
        batch = family.example(model, 2, TOKENS if family.modality == "text" else size)
        with stateless._reparametrize_module(model, weights, tie_weights=True):
            logits = family.logits(model, _varied(batch))
    if not logits.isfinite().all():
        raise ValueError("its output is not finite")
    if logits[0].equal(logits[1]):
        raise ValueError("its output is the same for all inputs")


def _made_up(shape: torch.Size) -> Tensor:
    """A weight whose rows, of positive numbers with a sum of about 1, are parts of a common one."""
    numbers = (torch.rand(sum(shape) + 1) + 0.5) / max(1, math.prod(shape[1:]))
    return numbers.as_strided(shape, [1] * len(shape))


def _varied(batch: "Tensor | dict[str, Tensor]") -> "Tensor | dict[str, Tensor]":
    """Inputs like those of an example that differ from row to row."""
    if isinstance(batch, Tensor):
        return torch.rand_like(batch)
    ids = batch["input_ids"]
    return {**batch, "input_ids": torch.arange(ids.numel()).view_as(ids)}
