"""The rows of a run as batches that its model takes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from razorctl import data, models, units
from razorctl.config.job import Job
from razorctl.config.job_checks import scale_numbers
from razorctl.data.own import text_lengths
from razorctl.data.own.splitting import digested
from razorctl.models.boxes import rescaled
from razorctl.models.tokens import are
from razorctl.step import label_count
from razorctl.training.loading import Loading, cached, in_order, moved
from razorctl.training.standard import Standard

Batch = tuple[Any, Tensor]  # inputs and labels


def sequenced(
    splits: data.Splits, family: models.Model, job: Job, progress: models.Progress
) -> data.Splits:
    """The splits of a data set as the model's transform takes them; see `Model.sequences`."""
    splits = digested(splits)  # digests of texts, not of their tokens
    parts = splits.parts.items()
    return replace(
        splits, **{name: family.sequences(rows, job.input_size, progress) for name, rows in parts}
    )


def cut_texts(rows: Any, family: models.Model, job: Job) -> tuple[str, ...]:
    """A note on training texts that are cut, counted in a sample of them; none if none is."""
    some = text_lengths.sample(rows)
    lengths = family.lengths(some, job.input_size)
    cut = sum(length > family.longest(job.input_size) for length in lengths)
    if not cut:
        return ()
    of = units.count(len(some), "training text")
    if len(some) < len(rows):
        of += f" of {len(rows):,}"
    said = f"of {of}, {are(cut)} longer than"
    if family.modality == "image":  # captions
        return (f"{said} the {units.count(family.longest(None), 'token')} of the model and cut.",)
    return (f"{said} the input size and cut; a larger --input-size keeps more.",)


def mixing(job: Job, classes: int) -> Callable[[Batch], Batch]:
    """A function that mixes images and labels by mixup and cutmix as a resolved job says.

    Zhang et al., 2018; Yun et al., 2019.
    Mixed labels are shares of classes [rows, classes]. Or it resizes images to one of the job's
    scales. Random numbers are from NumPy's generator.
    """
    if job.scales is not None:
        scales = scale_numbers(job.scales)
        return lambda batch: (rescaled(batch[0], int(np.random.choice(scales))), batch[1])
    if not (job.mixup or job.cutmix):
        return lambda batch: batch
    from timm.data import Mixup

    # The loss smooths labels, mixed or not.
    mix = Mixup(job.mixup, job.cutmix, label_smoothing=0.0, num_classes=classes)

    def mixed(batch: Batch) -> Batch:
        images, shares = mix(*batch)
        return images, shares

    return mixed


class Feed:
    """The training rows of a resolved job, and the rows that are evaluated.

    Args:
        split: the name of the split that is evaluated during training.
        evaluated: its micro-batches.
        test: micro-batches of the test split; None if that is `split`, or if there is none.
        held_out: the rows of the test split, or else of `split`, before `transform`.
        facts: counts, classes and digests, by which changed data are recognized.
        standard: mean and deviation of the targets of a regression.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        family: models.Model,
        splits: data.Splits,
        device: torch.device,
    ) -> None:
        self.device = device
        self.job = job
        transform, masked = family.transform(model, job.input_size), family.masked(model)
        training_transform = masked or transform
        lengths: Sequence[int] | None = None
        if job.packing is False:
            lengths = text_lengths.of_rows(splits.train, family, job).tokens
        # With few shapes little is compiled or captured. Padding separate texts to one length would
        # cost more than compiling each length.
        separate = job.packing is not None
        if family.pads and (job.cuda_graphs or (job.compile and not separate)):
            shapes = text_lengths.shapes_of(splits.train, family, job)
            training_transform = family.transform(model, job.input_size, shapes)
        if job.augment != "none":
            assert job.augment is not None
            training_transform = family.augmented(model, job.input_size, job.augment)
        training_rows = splits.train.with_transform(training_transform)
        drawn = job.augment != "none" or masked is not None
        keeps = family.modality == "image"  # the padding of texts depends on the micro-batch
        if keeps and not drawn:
            training_rows = cached(training_rows, job, device)
        self.loading = Loading(training_rows, job, device, drawn, lengths)
        self.mix = mixing(job, len(splits.classes))
        self.standard = Standard()
        if job.task == "regression":
            self.standard = Standard.of(splits.train["label"][:], model)
        self.split, rows = splits.evaluated
        self.held_out, self.transform = splits.test or rows, transform
        counts = {"train": len(splits.train), self.split: len(rows)}
        self.facts: dict[str, Any] = {
            **counts,
            "classes": [*splits.classes],
            "digests": splits.digests,
        }
        evaluated = rows.with_transform(transform)
        evaluated = cached(evaluated, job, device) if keeps else evaluated
        self.evaluated = in_order(evaluated, job, device)
        self.test: DataLoader[Any] | None = None
        if self.split != "test" and splits.test is not None:
            self.test = in_order(splits.test.with_transform(transform), job, device)

    def total(self, batches: Iterable[Any]) -> Tensor | None:
        """The number of labels in a batch; None if each row has one. Collective."""
        if self.job.of_rows:
            return None
        return label_count((batch["labels"] for batch in batches), self.device)

    def moved(self, batch: Any) -> Batch:
        """The inputs and the labels of a batch, on the device."""
        batch = moved(batch, self.device)
        return batch["inputs"], batch["labels"]

    def trained(self, batch: Any) -> Batch:
        """The inputs and labels of a micro-batch of training rows, mixed if the job asks for it.

        Labels of a regression are standardized.
        """
        inputs, labels = self.mix(self.moved(batch))
        return inputs, self.standard.labels(labels)
