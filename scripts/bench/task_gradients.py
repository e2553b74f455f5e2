"""How close the gradient of razor is to the exact one on tasks that pretrained.py has no loss for.

    .venv/bin/python scripts/bench/task_gradients.py

Batches and losses are those of `finetune`: embeddings of mails by their subjects, from a sentence
embedder, and boxes of garments, from a small RT-DETR that has learned others (see files.py). The
exact gradient is that of `full` in fp32, summed over the first batches; random numbers of a batch,
such as denoising queries, are the same for all. Rounding in bf16 changes which queries a detector
selects and matches, also with `full`. So gradients are compared with those of `full` in the same
precision too, as is the worst parameter, and `full` has a row where each value of the images is
off by NOISE of itself, which shows what a gradient in that precision is worth. Results are in
results/task_gradients.json.
"""

import argparse
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from accuracy import job_of
from files import TASKS, subjects
from pages import RESULTS, Row, listing
from passes import undropped, worst
from pretrained import CACHE
from record import device_name, head, write

from razorctl import Job, Recipe, data, restore
from razorctl.config.job import Precision
from razorctl.errors import UsageError
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes
from razorctl.step import autocast
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training.feed import Feed

BATCHES, BATCH, NOISE = 8, 16, 1e-4
RECIPES = (Recipe("full"), Recipe("razor", 0.9), Recipe("razor", 0.97))
COLUMNS = (
    ("cosine", 1, ".5f"),
    ("to_stock", 1, ".5f"),
    ("worst_cosine", 1, ".5f"),
    ("kept", 1, ".4f"),
)


class Subject:
    """The pretrained model of a job, and its first batches."""

    def __init__(self, job: Job) -> None:
        device = torch.device("cpu")
        family, source = data.pair(job)
        self.job = replace(job, augment="none").resolved(family.defaults, None)
        splits = source.load()
        self.family, self.classes = family.fed(self.job), len(splits.classes)
        torch.manual_seed(0)
        self.model = undropped(self.family.build(self.classes, self.job.input_size))
        feed = Feed(self.model, self.job, self.family, splits, device)
        rows = islice(chain.from_iterable(feed.loading.batches()), BATCHES)
        self.batches = [feed.trained(batch) for batch in rows]

    def gradients(self, precision: Precision, noise: float = 0.0) -> dict[str, Any]:
        """Parameter -> its gradient, summed over batches in double precision.

        noise: standard deviation of a factor of each value of an image.
        """
        job = replace(self.job, precision=precision)
        losses, total = self.family.losses(job), dict[str, Any]()
        for number, (inputs, labels) in enumerate(self.batches):
            torch.manual_seed(number)
            self.model.zero_grad()
            if noise:
                inputs = {name: noisy(value, noise) for name, value in inputs.items()}
                torch.manual_seed(number)
            with autocast(labels.device, job):
                loss = losses(self.model, inputs, labels, "mean")
            loss.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad.double()
        return total


def noisy(value: Any, noise: float) -> Any:
    """Images with a random factor near 1 for each value; other inputs as they are."""
    images = torch.is_tensor(value) and value.dim() == 4
    return value * (1 + noise * torch.randn_like(value)) if images else value


def cosine(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """The cosine of whole gradients."""
    ours, whole = (torch.cat([of[name].flatten() for name in exact]) for of in (found, exact))
    return torch.nn.functional.cosine_similarity(ours, whole, 0).item()


def rows_of(name: str, job: Job) -> list[Row]:
    """A row for each recipe and precision."""
    subject = Subject(job)
    exact = subject.gradients("fp32")
    rows = []
    for precision in ("fp32", "bf16"):
        stock = exact if precision == "fp32" else subject.gradients(precision)
        job = replace(subject.job, precision=precision)
        forward = JobForward(subject.family, job, subject.classes)
        inputs = subject.batches[0] if subject.job.task == "detection" else subject.batches[0][0]
        full = traced_bytes(subject.model, inputs, **forward.options)
        if subject.job.task == "detection":
            found = subject.gradients(precision, NOISE)
            about = {"task": name, "method": "full", "ratio": None, "precision": precision}
            rows.append(about | {"noise": NOISE, "kept": 1.0} | close(found, exact, stock))
        for recipe in RECIPES[precision == "fp32" :]:
            try:
                sparsify_within(subject.model, recipe, inputs, **forward.options)
            except UsageError:  # a ratio that this small model cannot meet
                continue
            kept = traced_bytes(subject.model, inputs, **forward.options) / full
            found = subject.gradients(precision)
            restore(subject.model)
            about = {"task": name, "method": recipe.method, "ratio": recipe.ratio}
            about |= {"precision": precision, "kept": kept}
            rows.append(about | close(found, exact, stock))
    return rows


def close(found: dict[str, Any], exact: dict[str, Any], stock: dict[str, Any]) -> Row:
    """The cosines of gradients, and of the worst parameter."""
    far = {f"worst_{key}": value for key, value in worst(found, stock).items()}
    return {"cosine": cosine(found, exact), "to_stock": cosine(found, stock), **far}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    boxes = job_of(TASKS["objects"], "fp32", args.cache)
    pairs = replace(job_of(TASKS["r8"], "fp32", args.cache), task="embedding")
    pairs = replace(pairs, dataset=str(subjects(args.cache)), input_size=64)
    every = {"mails by their subjects": pairs, "boxes of garments": boxes}
    jobs = {name: replace(job, batch_size=BATCH) for name, job in every.items()}
    document = {
        **head(device_name("cpu"), "torch", "transformers"),
        "rows": [row for name, job in jobs.items() for row in rows_of(name, job)],
    }
    write(RESULTS / "task_gradients.json", document)
    print(listing(document["rows"], ("task", "method", "ratio", "precision"), COLUMNS))


if __name__ == "__main__":
    main()
