"""Average precision of detected objects, as COCO defines it, by torchmetrics and pycocotools."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision
from torchvision.ops import box_convert

from razorctl.config.tasks import FIGURES, NO_LABEL
from razorctl.errors import DataError

MOST = 100  # guesses of an image that count
SHARES = ("precision", "recall", "f1")  # of a class
LEAST = 0.5  # score of a guess that counts for precision and recall of a class


def corners(boxes: Tensor, extent: Tensor) -> Tensor:
    """Boxes [batch, n, 4] as left, top, right and bottom in pixels.

    boxes, extent: as in `models.boxes`.
    """
    sides: Tensor = box_convert(boxes, "cxcywh", "xyxy")
    return sides * extent.repeat(1, 2)[:, None]


def likeliest(guesses: Tensor, extent: Tensor) -> Iterator[dict[str, Tensor]]:
    """The MOST guesses of each image: `scores` [n], descending, `labels` [n] and `boxes` [n, 4].

    A query may guess several classes. guesses: as `matched_losses.guesses` returns them.
    """
    chances, boxes = guesses[..., :-4], corners(guesses[..., -4:], extent)
    classes = chances.shape[-1]
    scores, places = chances.flatten(1).topk(min(MOST, chances[0].numel()))
    for row, of in enumerate(places):
        found = boxes[row, of // classes]
        yield {"scores": scores[row], "labels": of % classes, "boxes": found}


class AveragePrecision(MeanAveragePrecision):
    """Mean average precision, by size and by class, and mean average recall of MOST guesses.

    Sizes are areas below 32^2, below 96^2 and above, in pixels of the stored image; a size without
    objects has no figure. Of a class there are also precision and recall at an IoU of .5, of the
    guesses with a score of LEAST, in steps of recall of .01. Groups of objects count neither as
    right nor as wrong.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__(class_metrics=True, extended_summary=True)
        self.count = len(classes)

    def update(  # type: ignore[override]
        self, guesses: Tensor, labels: Tensor, inputs: Mapping[str, Tensor]
    ) -> None:
        """guesses: as `matched_losses.guesses` returns them. labels, inputs: of `models.boxes`."""
        extent, crowd = inputs["extent"], inputs["crowd"]
        boxes = corners(inputs["boxes"], extent)
        every = torch.where(crowd == NO_LABEL, labels, crowd)
        target = []
        for row, there in enumerate(every != NO_LABEL):
            target.append(
                {
                    "boxes": boxes[row, there],
                    "labels": every[row, there],
                    "iscrowd": (labels[row, there] == NO_LABEL).long(),
                }
            )
        super().update([*likeliest(guesses, extent)], target)

    def compute(self) -> dict[str, Tensor]:
        objects = torch.cat([*self.groundtruth_labels]).flatten()
        if not len(objects):
            raise DataError(
                "no image that is evaluated has a box; add boxes, or hold out more with "
                "--validation."
            )
        alone = objects[torch.cat([*self.groundtruth_crowds]).flatten() == 0]
        values = super().compute()
        figures = {name: values[name] for name in FIGURES["detection"] if name in values}
        figures = {name: value for name, value in figures.items() if value >= 0}
        by_class = {name: torch.zeros(self.count) for name in ("average_precision", *SHARES)}
        known = values["classes"].flatten().tolist()
        for place, number in enumerate(known):
            shares = _shares(values["precision"], values["scores"], place)
            average = values["map_per_class"].flatten()[place]
            for name, value in zip(by_class, (average, *shares), strict=True):
                by_class[name][number] = max(float(value), 0.0)
        by_class["labels"] = alone.cpu().bincount(minlength=self.count)
        return {**figures, **{f"by class {name}": value for name, value in by_class.items()}}


def _shares(precision: Tensor, scores: Tensor, place: int) -> tuple[float, float, float]:
    """Precision, recall and F1 of a class at an IoU of .5.

    precision, scores: [IoU, recall, classes, sizes, counts of guesses] of pycocotools, at recalls
    from 0 to 1; place: of the class.
    """
    sure = int((scores[0, :, place, 0, -1] >= LEAST).sum())
    if not sure:
        return 0.0, 0.0, 0.0
    exact, recall = float(precision[0, sure - 1, place, 0, -1]), (sure - 1) / 100
    return exact, recall, 2 * exact * recall / ((exact + recall) or 1)
