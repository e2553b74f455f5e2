"""Measures what runs on a CPU take beside their training steps: checkpoints, and loading data.

    .venv/bin/python scripts/bench/run_costs.py [saving | loading]

Saving: whole runs of vit-micro on digits, and runs of a few steps of a ViT-S/16, take turns with
each recipe. Timed are `Run.save`, the copy that each step takes of random states and buffers, the
steps and the evaluations. The shares are those of a run with a checkpoint at the default interval,
which is that of the evaluations; that of the ViT-S/16 is the one of vit-b16.

Loading: runs from files, and the same runs whose batches were read before, take turns. The files
are JPEG images of 500 x 375 pixels, which the run decodes and crops at random, digits, and a CSV of
texts. Timed are the steps, and in each the wait for its rows, which is what loading adds to it:
that is steadier than the ratio where other work shares the cores. The first step of a run is not
counted, and the batches in memory are those of the run from files, to the bit.

All models but vit-micro have random weights. The script writes results/run_costs.json.
"""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import transformers
from machine import device_name
from PIL import Image
from record import head, options, write
from tokenizers import Tokenizer, models, pre_tokenizers

from razorctl import models as registry
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.models import timm as timm_models
from razorctl.models.transformers import classification, from_hub
from razorctl.training import state
from razorctl.training.loading import Loading
from razorctl.training.metrics import Step
from razorctl.training.run import Run, finetune

RECIPES = {
    "full": Recipe("full"),
    "razor": Recipe("razor"),
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", joint_budget=0.5),
}
VIT, BERT = "vit-s16", "bert-small"  # the names of the random models
SMALL_BERT = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
ROWS, SIZE, WORDS = 64, (500, 375), 2000
FIRST = 1  # steps of a run that are not counted


@dataclass(frozen=True)
class Workload:
    """A job and how often it is timed; interval: default steps between saves, None: the job's."""

    job: Job
    turns: int
    interval: int | None = None


def photos(folder: Path) -> Path:
    """JPEGs of two classes: a disk or a square on smooth noise with grain."""
    draw = np.random.default_rng(0)
    width, height = SIZE
    y, x = np.mgrid[:height, :width]
    for number in range(ROWS):
        smooth = Image.fromarray(draw.integers(0, 256, (12, 16, 3), np.uint8))
        pixels = np.asarray(smooth.resize(SIZE, Image.Resampling.BICUBIC), np.float32)
        pixels = pixels + draw.normal(0, 12, pixels.shape)
        far = abs(x - draw.integers(100, 400)), abs(y - draw.integers(80, 300))
        disk = bool(number % 2)
        inside = np.hypot(*far) < 60 if disk else np.maximum(*far) < 60
        pixels[inside] = draw.integers(0, 256, 3)
        file = folder / ("disk" if disk else "square") / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return folder


def texts(file: Path) -> Path:
    """A CSV of two classes: words that are drawn, from 20 to 120 in a text."""
    draw = np.random.default_rng(0)
    lines = ["text,label"]
    for number in range(4 * ROWS):
        words = draw.integers(0, WORDS, draw.integers(20, 120))
        lines.append(f"{' '.join(f'w{word}' for word in words)},{number % 2}")
    file.write_text("\n".join(lines) + "\n")
    return file


def register() -> None:
    """Puts the random models beside the registered ones."""
    entry = timm_models.from_hub(VIT, "", "vit_small_patch16_224", timm_models.VIT_DEFAULTS)
    vit = entry.of("classification")
    vocabulary = {
        word: i for i, word in enumerate(["[PAD]", "[UNK]", *map("w{}".format, range(WORDS))])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    bert = from_hub(BERT, "", "", {"model_type": "bert", **SMALL_BERT}).of("classification")
    transform = partial(classification.tokenized, tokenizer, classification.TOKENS, False)
    for model in (
        replace(vit, build=vit.bare),
        replace(bert, build=bert.bare, transform=lambda *_: transform, save=lambda *_: None),
    ):
        registry.models()[model.name] = registry.Named.single(model)


class Clock:
    """The seconds of each call of what it watches, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def watching(self, owner: Any, name: str) -> Iterator[None]:
        function, seconds = getattr(owner, name), self.seconds.setdefault(name, [])

        def timed(*args: Any, **settings: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                seconds.append(time.perf_counter() - start)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, function)


def saved_run(job: Job, recipe: Recipe, out: Path) -> dict[str, float]:
    """Seconds of one save, step, copy and evaluation of a run; the first step is not counted."""
    clock = Clock()
    with (
        clock.watching(Run, "save"),
        clock.watching(Run, "evaluate"),
        clock.watching(state, "transient"),
    ):
        run = finetune(job, recipe, out=out, device="cpu")
        steps = [step.seconds for step in run][1:]
        assert run.job.evaluate_every is not None
    seconds = clock.seconds
    # A save takes a copy too, so that a run has more copies than steps.
    return {
        "save_seconds": fmean(seconds["save"]),
        "step_seconds": fmean(steps),
        "copy_seconds": median(seconds["transient"]),
        "evaluation_seconds": fmean(seconds["evaluate"]),
        "interval": run.job.evaluate_every,
        "saves": len(seconds["save"]),
    }


def saving(workload: Workload, turns: int) -> list[dict[str, Any]]:
    """A row for each recipe: medians over turns, and the median of the shares of each turn."""
    runs_of: dict[str, list[dict[str, float]]] = {name: [] for name in RECIPES}
    for _ in range(turns):
        for name, recipe in RECIPES.items():
            with tempfile.TemporaryDirectory() as folder:
                runs_of[name].append(saved_run(workload.job, recipe, Path(folder) / "run"))
    rows = []
    for name, runs in runs_of.items():
        row = {key: median(run[key] for run in runs) for key in runs[0]}
        interval = workload.interval or row["interval"]

        def share(run: dict[str, float], more: float = 0.0, interval: float = interval) -> float:
            cost = run["save_seconds"] + interval * run["copy_seconds"]
            return cost / (interval * run["step_seconds"] + more)

        rows.append(
            {
                "model": workload.job.model,
                "case": name,
                **row,
                "interval": int(interval),
                "share_of_steps": median(map(share, runs)),
                "share_of_all": median(
                    share(run, run["evaluation_seconds"] + run["save_seconds"]) for run in runs
                ),
                "steps_per_save_at_5_percent": median(
                    run["save_seconds"] / (0.05 * run["step_seconds"]) for run in runs
                ),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


@contextmanager
def batches(make: Callable[[Loading, int], Iterator[Iterator[Any]]]) -> Iterator[None]:
    """Runs take what `make` makes of a loading, instead of its own batches."""
    original = Loading.batches
    Loading.batches = make  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Loading.batches = original  # type: ignore[method-assign]


def read(job: Job, recipe: Recipe, out: Path) -> list[list[Any]]:
    """The batches of a run."""
    batches_of_run: list[list[Any]] = []
    original = Loading.batches

    def noted(loading: Loading, taken: int = 0) -> Iterator[Iterator[Any]]:
        for batch in original(loading, taken):
            batches_of_run.append(list(batch))
            yield iter(batches_of_run[-1])

    with batches(noted):
        list(finetune(job, recipe, out=out, device="cpu"))
    return batches_of_run


def loading(workload: Workload, turns: int) -> list[dict[str, Any]]:
    """The ratio of the steps of a run to those of the same run from memory."""
    job, recipe = workload.job, RECIPES["full"]
    with tempfile.TemporaryDirectory() as folder:
        out = (Path(folder) / f"{number}" for number in itertools.count())
        batches_of_run = read(job, recipe, next(out))

        def from_memory(loading: Loading, taken: int = 0) -> Iterator[Iterator[Any]]:
            return map(iter, batches_of_run)

        waits: list[float] = []
        original = Loading.batches

        def timed(loading: Loading, taken: int = 0) -> Iterator[Iterator[Any]]:
            left = original(loading, taken)
            while True:
                start = time.perf_counter()
                batch = next(left)
                waits.append(time.perf_counter() - start)
                yield batch

        def steps(make: Callable[[Loading, int], Iterator[Iterator[Any]]]) -> list[Step]:
            with batches(make):
                return list(finetune(job, recipe, out=next(out), device="cpu"))[FIRST:]

        from_files, in_memory, shares, loaded = [], [], [], []
        for _ in range(turns):
            waits.clear()
            files, memory = steps(timed), steps(from_memory)
            # The losses tell whether all batches were the same.
            assert [step.loss for step in files] == [step.loss for step in memory]
            from_files.append(fmean(step.seconds for step in files))
            in_memory.append(fmean(step.seconds for step in memory))
            loaded.append(fmean(waits[FIRST : len(files) + FIRST]))
            shares.append(loaded[-1] / (from_files[-1] - loaded[-1]))
    ratios = [one / other for one, other in zip(from_files, in_memory, strict=True)]
    row = {
        "model": job.model,
        "data": Path(job.dataset).name,
        "batch_size": job.batch_size or 64,
        "steps": job.steps,
        "turns": turns,
        "step_seconds": median(from_files),
        "step_seconds_in_memory": median(in_memory),
        "loading_seconds": median(loaded),
        "loading_share": median(shares),
        "ratio": median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }
    print(json.dumps(row), flush=True)
    return [row]


def workloads(folder: Path) -> tuple[list[Workload], list[Workload]]:
    """The workloads of saving, and those of loading."""
    images, table = str(photos(folder / "photos")), str(texts(folder / "texts.csv"))
    default = timm_models.VIT_DEFAULTS["evaluate_every"]
    vit = Job(VIT, images, batch_size=8, steps=4, save_every=2, precision="fp32")
    saves = [
        Workload(Job("vit-micro", "digits"), turns=1),
        Workload(vit, turns=1, interval=int(str(default))),
    ]
    vit = replace(vit, steps=8, augment="crop", save_every=None)
    bert = Job(BERT, table, batch_size=16, steps=8, precision="fp32")
    micro = Job("vit-micro", "digits")
    return saves, [Workload(vit, 2), Workload(bert, 3), Workload(micro, 3)]


def main() -> None:
    parser = options(__doc__, "run_costs")
    parser.add_argument("part", nargs="?", choices=("saving", "loading"), help="default: both")
    parser.add_argument("--turns", type=int, help="of each case")
    args = parser.parse_args()
    register()
    earlier = json.loads(args.out.read_text()) if args.out.exists() else {}
    document: dict[str, Any] = earlier | {
        **head(device_name(), "torch", "timm", "transformers"),
        "command": "scripts/bench/run_costs.py",
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        saves, loads = workloads(Path(folder))
        parts: dict[str, list[Callable[[], list[dict[str, Any]]]]] = {
            "saving": [partial(saving, each, args.turns or each.turns) for each in saves],
            "loading": [partial(loading, each, args.turns or each.turns) for each in loads],
        }
        for part in [args.part] if args.part else parts:
            document[part] = []
            for measure in parts[part]:
                document[part] += measure()
                write(args.out, document)


if __name__ == "__main__":
    main()
