"""Held-out rows of a run that has just ended, with labels and predictions, the worst first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from razorctl.config.tasks import NO_LABEL
from razorctl.step import scored
from razorctl.training.detections import LEAST, likeliest
from razorctl.training.loading import in_order, moved
from razorctl.training.predicting.labels import HALF
from razorctl.training.predicting.objects import FoundObject, objects_of
from razorctl.training.shown_rows import label_in_words, objects_in_words
from razorctl.units import percent

if TYPE_CHECKING:
    from razorctl.training.preparation import PreparedRun

SAMPLE, MOST = 256, 24  # rows that are predicted, and rows that are kept
IOU = 0.5  # least overlap of an object with the one that it is
LABELS = ("label", "boxes", "crowd")  # columns that no prediction needs; masks are resized


@dataclass(frozen=True)
class Example:
    """A row of `Examples.rows`, its label and its prediction, both in words.

    Args:
        error: 0 for a prediction that could not be better.
        wrong: whether a part of the prediction is wrong; None for numbers and masks.
        parts: what the words summarize: two masks [height, width], the objects of the label and the
            found ones, or for each token its tag and the predicted one.
        index: of the row.
    """

    error: float
    wrong: bool | None
    label: str
    guess: str
    parts: tuple[Any, Any] | None = None
    index: int = 0


@dataclass(frozen=True)
class Examples:
    """The examples with the largest errors among some held-out rows, in descending order.

    rows: as in `Splits`. wrong: the number of rows with a wrong prediction; None for numbers and
    masks.
    """

    run: "PreparedRun"
    rows: Any
    examples: Sequence[Example]
    wrong: int | None


Judge = Callable[["PreparedRun", Tensor, Mapping[str, Any], Mapping[str, Any]], Example]


@torch.no_grad()
def worst(run: "PreparedRun") -> Examples | None:
    """Predicts up to SAMPLE held-out rows by the best weights, which a finished run's model has.

    The rows are evenly spaced. None for language models and embeddings. Runs in one process.
    """
    judge, every = JUDGES.get(run.job.task or "classification"), run.feed.held_out
    if judge is None or not len(every):
        return None
    count = min(SAMPLE, len(every))
    rows = every.select([at * len(every) // count for at in range(count)])
    names = [name for name in LABELS if name in rows.column_names]
    known, unlabeled = rows.select_columns(names), rows.remove_columns(names)

    def of_row(values: Any, place: int) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor[place], values)

    size, model = run.job.micro_batch, run.model.to(run.device).eval()
    job = replace(run.job, batch_size=size, accumulate=1, processes=1, workers=0)
    examples: list[Example] = []
    at = wrong = 0
    for batch in in_order(unlabeled.with_transform(run.feed.transform), job, run.device):
        batch = moved(batch, run.device)
        with scored(run.device, job):
            outputs = run.logits(model, batch["inputs"])
        for place, output in enumerate(outputs):
            row = known[at] if names else {}
            example = judge(run, output.float(), of_row(batch, place), row)
            examples.append(replace(example, index=at))
            at, wrong = at + 1, wrong + bool(example.wrong)
        examples = sorted(examples, key=lambda each: (-each.error, each.index))[:MOST]
    known_wrong = None if any(each.wrong is None for each in examples) else wrong
    return Examples(run, rows, examples, known_wrong)


def _class(run: "PreparedRun", output: Tensor, _: Any, row: Mapping[str, Any]) -> Example:
    chances, label = output.softmax(-1), int(row["label"])
    guess = int(chances.argmax())
    words = f"{run.classes[guess]}, {percent(float(chances[guess]))}"
    wrong = guess != label
    return Example(1 + wrong - float(chances[label]), wrong, run.classes[label], words)


def _classes(run: "PreparedRun", output: Tensor, _: Any, row: Mapping[str, Any]) -> Example:
    chances, label = output.sigmoid().cpu(), torch.tensor(row["label"], dtype=torch.float32)
    guess = (chances >= HALF).float()
    wrong = int((guess != label).sum())
    error = wrong + float((chances - label).abs().mean())
    said, guessed = (label_in_words(each, run.job, run.classes) for each in (label, guess))
    return Example(error, wrong > 0, said, guessed)


def _number(run: "PreparedRun", output: Tensor, _: Any, row: Mapping[str, Any]) -> Example:
    value, label = output.item(), float(row["label"])
    return Example(abs(value - label), None, f"{label:.4g}", f"{value:.4g}")


def _mask(
    run: "PreparedRun", output: Tensor, inputs: Mapping[str, Any], _: Mapping[str, Any]
) -> Example:
    label, guess = inputs["labels"].cpu(), output.argmax(0).cpu()
    there = label != NO_LABEL
    wrong = int((guess != label)[there].sum())
    said, guessed = (label_in_words(each[there], run.job, run.classes) for each in (label, guess))
    return Example(wrong / max(1, int(there.sum())), None, said, guessed, (label, guess))


def _objects(
    run: "PreparedRun", output: Tensor, inputs: Mapping[str, Any], row: Mapping[str, Any]
) -> Example:
    from torchvision.ops import box_iou

    extent = inputs["inputs"]["extent"]
    (found,) = likeliest(output[None], extent[None])
    width, height = extent.tolist()
    guesses = objects_of(("", None), found, (width, height), run.classes, LEAST)
    crowds = row.get("crowd") or [0] * len(row["label"])
    labels = tuple(
        FoundObject("", None, run.classes[number], 1.0, *box)
        for number, box, crowd in zip(row["label"], row["boxes"], crowds, strict=True)
        if not crowd
    )
    boxes = [
        torch.tensor([[o.left, o.top, o.right, o.bottom] for o in objects]).view(-1, 4)
        for objects in (labels, guesses)
    ]
    alike = torch.tensor([[a.label == b.label for b in guesses] for a in labels], dtype=torch.bool)
    same = (box_iou(*boxes) >= IOU) & alike.view(len(labels), len(guesses))
    error = int((~same.any(1)).sum() + (~same.any(0)).sum())
    said, guessed = (objects_in_words([one.label for one in of]) for of in (labels, guesses))
    return Example(error, error > 0, said, guessed, (labels, guesses))


def _tags(
    run: "PreparedRun", output: Tensor, inputs: Mapping[str, Any], row: Mapping[str, Any]
) -> Example:
    pairs = zip(inputs["words"].tolist(), output.argmax(-1).tolist(), strict=True)
    guessed = {word: run.classes[tag] for word, tag in pairs if word >= 0}
    tags = [run.classes[tag] if tag != NO_LABEL else "" for tag in row["label"]]
    guesses = [guessed.get(word, "") for word in range(len(tags))]  # "" beyond the input size
    wrong = sum(a != b for a, b in zip(tags, guesses, strict=True) if a and b)
    return Example(wrong, wrong > 0, "", "", (tags, guesses))


JUDGES: Mapping[str, Judge] = {
    "classification": _class,
    "multi-label": _classes,
    "regression": _number,
    "token-classification": _tags,
    "segmentation": _mask,
    "detection": _objects,
}
