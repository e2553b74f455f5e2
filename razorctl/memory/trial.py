"""A forward pass with small inputs and made-up weights, by which settings that ruin it show."""

import math
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import stateless

from razorctl.models import Model
from razorctl.models.transformers.pretrained_files import quiet_transformers

TOKENS, SIDE = 8, 64  # of a text; pixels of an image, if the model takes it
MANY = 4  # layers of a list, which are no stages
ALIKE = 1e-12  # the difference of outputs that are the same
WIDE = 1 << 18  # numbers of a weight
MOST = 1 << 27  # numbers of weights that are multiplied as they are
LARGEST = 1 << 31  # numbers of a weight, which some models draw at once


def check(family: Model, model: nn.Module, classes: int, input_size: int | None) -> None:
    """Raises ValueError if the logits of a model are not finite, or, of texts, all the same.

    Its weights take no memory, and of many layers of a kind two are tried. A model that cannot run
    so, as it counts its layers, is not tried. model: has the sizes of its weights.
    """
    if any(p.numel() > LARGEST for p in model.parameters()):
        return
    fault = None
    for signed in (False, True):  # some layers take no weights of the one or the other kind
        logits = _logits(family, classes, input_size, signed)
        if logits is None or (fault := _fault(logits, family.modality == "text")) is None:
            return
    raise ValueError(fault)


def _fault(logits: Tensor, differ: bool) -> str | None:
    """The fault of logits of two inputs; differ: whether they must, as behind layer norms."""
    if not logits.isfinite().all():
        return "its output is not finite"
    alike = torch.allclose(logits[0], logits[1], rtol=0, atol=ALIKE)
    return "its output is the same for all inputs" if differ and alike else None


def _logits(family: Model, classes: int, input_size: int | None, signed: bool) -> Tensor | None:
    """The logits of the first batch with which the model runs; None if there is none."""
    from accelerate import init_empty_weights

    with torch.random.fork_rng([]), torch.no_grad(), suppress(Exception), quiet_transformers():
        torch.manual_seed(0)
        with init_empty_weights(include_buffers=False):
            model = family.bare(classes, input_size).eval()
        _shorten(model)
        if _left(model) > MOST:
            return None
        weights = {name: _made_up(p.shape, signed) for name, p in model.named_parameters()}
        # Fused attention on a CPU has a finite output even for what is none.
        with stateless._reparametrize_module(model, weights), sdpa_kernel(SDPBackend.MATH):
            for batch in _batches(family, model, input_size):
                with suppress(Exception):
                    return family.logits(model, batch)
    return None


def _batches(family: Model, model: nn.Module, input_size: int | None) -> list[Any]:
    """Batches of two inputs that differ, the smallest first."""
    if family.modality == "image":
        images = torch.rand_like(family.example(model, 2, input_size))
        return [images[..., :SIDE, :SIDE], images]
    batch = family.example(model, 2, TOKENS)
    ids = torch.arange(2 * TOKENS).view_as(batch["input_ids"])
    return [{**batch, "input_ids": ids}]


def _shorten(model: nn.Module) -> None:
    """Leaves two layers of each list of many that have the same class and shapes.

    Wide linear layers, which take most of the time, repeat their input.
    """
    for layers in [*model.modules()]:
        if isinstance(layers, (nn.ModuleList, nn.Sequential)):
            kinds = {(type(m), *(p.shape for p in m.parameters())) for m in [*layers]}
            if len(layers) > MANY and len(kinds) == 1:
                del layers[2:]
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.numel() > WIDE:
            object.__setattr__(layer, "forward", partial(_repeated, torch.rand(layer.out_features)))


def _repeated(scales: Tensor, x: Tensor) -> Tensor:
    """The input of a linear layer, again and again up to the size of its output, and scaled."""
    return x.tile(-(-len(scales) // x.shape[-1]))[..., : len(scales)] * (0.5 + scales)


def _left(model: nn.Module) -> int:
    """The numbers of all weights but those of linear layers and embeddings, as of experts."""
    others = (m for m in model.modules() if type(m) not in (nn.Linear, nn.Embedding))
    return sum(p.numel() for m in others for p in m.parameters(recurse=False))


def _made_up(shape: torch.Size, signed: bool) -> Tensor:
    """A weight whose rows, with a sum of about 1 or of random signs, are parts of a common one."""
    numbers, size = torch.rand(sum(shape) + 1) + 0.5, max(1, math.prod(shape[1:]))
    numbers = (2 * numbers - 2) / math.sqrt(size) if signed else numbers / size
    weight = numbers.as_strided(shape, [1] * len(shape))
    return weight.contiguous() if weight.numel() <= WIDE else weight
