"""The losses of detection models, which match their guesses with the objects of an image.

A model of transformers has a matcher and losses of its own (Carion et al., 2020, section 3.1).
Functions of their modules get stand-ins while they run:
- The steps of a matcher depend on values, which traces lack. There each image has DRAWN objects,
  and each object the query of its own number.
- The losses compare each matched box with all others and use the diagonal alone. With denoising
  queries, and at a batch of 16, that is 10 MB a tensor. The stand-ins compare pairs, and the other
  entries are NaN, so that another use of them would be seen.
- Several processes of accelerate divide by their mean number of objects; a step divides by itself.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import box_area

from razorctl.config.tasks import NO_LABEL
from razorctl.models.boxes import DRAWN
from razorctl.step import ByLogits

LOSSES = "transformers.loss."  # the modules whose functions get stand-ins


@dataclass(frozen=True)
class MatchedLosses(ByLogits):
    """The losses of a detection model by its own matcher.

    They are means over the objects of a batch, but for the cross-entropy of DETR and YOLOS, a mean
    over queries. A sum is a mean times the number of objects, at least 1, so that micro-batches
    weigh as their objects do.
    """

    def scored(
        self, model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor]:
        output = run(model, inputs, labels)
        factor = (labels != NO_LABEL).sum().clamp(min=1) if reduction == "sum" else 1
        return guesses(model, output), output.loss.float() * factor


def run(model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor | None = None) -> Any:
    """The output of a model for inputs of `models.boxes`, with a loss if there are labels."""
    pixels = {name: value for name, value in inputs.items() if name.startswith("pixel_")}
    mode = getattr(pixels["pixel_values"], "fake_mode", None)
    if mode is not None:
        mode.answers = True  # to questions for values: see `TraceMode`
    if labels is None:
        return model(**pixels)
    objects = (labels != NO_LABEL).sum(1)
    counts = objects.tolist() if mode is None else [DRAWN] * len(objects)
    with stand_ins(traced=mode is not None):
        return model(**pixels, labels=targets(inputs["boxes"], labels, counts))


def targets(boxes: Tensor, labels: Tensor, counts: Sequence[int]) -> Sequence[Mapping[str, Tensor]]:
    """The objects of each image as transformers takes them.

    boxes [batch, most, 4] and labels [batch, most] as in `models.boxes`. counts: of the objects.
    """
    # Objects do not come first if groups of objects lie between them.
    order = (labels == NO_LABEL).long().argsort(dim=1, stable=True)
    return [
        {"class_labels": labels[row, of[:count]], "boxes": boxes[row, of[:count]]}
        for row, (of, count) in enumerate(zip(order, counts, strict=True))
    ]


def guesses(model: Any, output: Any) -> Tensor:
    """Guesses [batch, queries, classes + 4], fp32: chances of classes, centers and sizes of boxes.

    A model scores each class for itself, or else has a last class for no object.
    """
    logits, boxes = output.logits.detach().float(), output.pred_boxes.detach().float()
    alone = logits.shape[-1] == model.config.num_labels
    chances = logits.sigmoid() if alone else logits.softmax(-1)[..., :-1]
    return torch.cat([chances, boxes], -1)


@contextmanager
def stand_ins(traced: bool) -> Iterator[None]:
    """Runs the block with stand-ins for functions of losses; see the module."""
    functions: dict[str, Any] = {"box_iou": _paired_iou, "generalized_box_iou": _paired_giou}
    functions["is_accelerate_available"] = lambda _: False
    if traced:
        functions["linear_sum_assignment"] = _in_order
    with ExitStack() as patched:
        for module in [module for name, module in sys.modules.items() if name.startswith(LOSSES)]:
            for name in functions.keys() & vars(module).keys():
                function = partial(functions[name], vars(module)[name])
                patched.enter_context(patch.object(module, name, function))
        if traced:
            patched.enter_context(patch.object(nn.Module, "to", _moved))
        yield


def _in_order(_: Any, cost: Tensor) -> tuple[Any, Any]:
    numbers = np.arange(min(cost.shape))
    return numbers, numbers


def _paired_giou(stock: Any, boxes: Tensor, others: Tensor) -> Tensor:
    """The generalized IoU of pairs of boxes [n, 4] in the diagonal of a matrix [n, n]."""
    if not torch.is_grad_enabled():  # in a matcher
        matrix: Tensor = stock(boxes, others)
        return matrix
    both, union = _areas(boxes, others)
    corner = torch.minimum(boxes[:, :2], others[:, :2])
    hull = (torch.maximum(boxes[:, 2:], others[:, 2:]) - corner).prod(1)
    return _diagonal(both / union - (hull - union) / hull)


def _paired_iou(stock: Any, boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The IoU and the union of pairs of boxes, as in `_paired_giou`."""
    if not torch.is_grad_enabled():
        matrices: tuple[Tensor, Tensor] = stock(boxes, others)
        return matrices
    both, union = _areas(boxes, others)
    return _diagonal(both / union), _diagonal(union)


def _areas(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The areas of the intersections and of the unions of pairs of boxes."""
    corner = torch.maximum(boxes[:, :2], others[:, :2])
    both = (torch.minimum(boxes[:, 2:], others[:, 2:]) - corner).clamp(min=0).prod(1)
    return both, box_area(boxes) + box_area(others) - both


def _diagonal(values: Tensor) -> Tensor:
    rest = values.new_full((len(values), len(values)), torch.nan).fill_diagonal_(0)
    return torch.diag_embed(values) + rest


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """`Module.to` for the losses of a model, as torch converts no parameter without values."""
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(parameter.to(device), parameter.requires_grad))
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, buffer.to(device))
    return module
