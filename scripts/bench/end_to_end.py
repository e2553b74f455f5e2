"""Fine-tunes files with `razorctl.finetune`: images, texts, and images with masks.

    .venv/bin/python scripts/bench/end_to_end.py

The script writes models and data as a user would have them, in folders under the cache: SqueezeNet
with Fashion-MNIST as folders of classes; the decoder of decoder.py with news as plain texts; and
the MobileNetV2 of convnets.py as the backbone of a linear head, with garments of Fashion-MNIST laid
on a background and their masks. Then it runs `full` and `razor` with the same seeds, from reading
the files to the test at the end, and writes results/end_to_end.json. With --cases the rows of the
others stay. It needs the `bench` extra and takes some fifteen minutes on two cores.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import convnets
import decoder
import torch
import transformers
from PIL import Image
from pretrained import CACHE, kept, load_fashion, news
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from razorctl import Job, Recipe, finetune
from razorctl.cli.views.common import size

GARMENTS = ("t-shirt", "trouser", "pullover", "dress", "coat")
GARMENTS += ("sandal", "shirt", "sneaker", "bag", "boot")
RECIPES = {"full": Recipe("full"), "razor": Recipe("razor", 0.9)}
SCENE = 64  # pixels of a side
ENLARGED = 112  # pixels of a side that the model sees: garments are nearly as large as in training
SHAPES = {"rows": {"train": 6000, "test": 2000}, "scene": SCENE, "version": 1}
RESULT = Path(__file__).parent / "results" / "end_to_end.json"


@dataclass(frozen=True)
class Case:
    """What is fine-tuned: a job, whose model and data are folders that `files` makes or finds."""

    summary: str
    job: Job
    files: Callable[[Path], tuple[Path, Path]]


def squeezenet_files(cache: Path) -> tuple[Path, Path]:
    """A folder as `razorctl` writes models of torchvision, and folders of classes."""

    def write_model(folder: Path) -> None:
        state = convnets.build_squeezenet(cache).state_dict()
        save_file({k: v for k, v in state.items() if k.startswith("features")}, weights(folder))
        config = {
            "library": "torchvision",
            "architecture": "squeezenet1_1",
            "task": "classification",
            "label_names": GARMENTS,
            "input_size": convnets.SIDE,
        }
        (folder / "config.json").write_text(json.dumps(config))

    def write_data(folder: Path) -> None:
        for split, rows in zip(SHAPES["rows"], load_fashion(cache), strict=True):
            for name in GARMENTS:
                (folder / split / name).mkdir(parents=True)
            for number in range(SHAPES["rows"][split]):
                where = folder / split / GARMENTS[rows["labels"][number]] / f"{number}.png"
                Image.fromarray(rows["images"][number].numpy()).save(where)

    model = kept(cache, "files-squeezenet", SHAPES, write_model)
    return model, kept(cache, "files-fashion", SHAPES, write_data)


def decoder_files(cache: Path) -> tuple[Path, Path]:
    """A folder of transformers, and a text file for each split."""

    def write_data(folder: Path) -> None:
        parts = {
            "train": decoder.halves(cache)[1],
            "test": [text for _, text in news(cache, "test")],
        }
        for split, texts in parts.items():
            (folder / f"{split}.txt").write_text("\n\n\n".join(texts) + "\n")

    return decoder.home(cache), kept(cache, "files-news", SHAPES, write_data)


def scene(images: Tensor, classes: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two to four garments [28, 28] on a slanted gray background, and the mask of their classes."""
    down, right = torch.meshgrid(*[torch.linspace(-1, 1, SCENE)] * 2, indexing="ij")
    slant, level = torch.rand(2, generator=draw) * 120 - 60, 60 + 80 * torch.rand(1, generator=draw)
    picture = level + slant[0] * down + slant[1] * right
    picture = picture + 8 * torch.randn(SCENE, SCENE, generator=draw)
    mask = torch.zeros(SCENE, SCENE, dtype=torch.uint8)
    for _ in range(int(torch.randint(2, 5, (), generator=draw))):
        number = int(torch.randint(len(images), (), generator=draw))
        y, x = torch.randint(SCENE - 28 + 1, (2,), generator=draw).tolist()
        part = slice(y, y + 28), slice(x, x + 28)
        garment = images[number] > 0
        picture[part] = torch.where(garment, images[number].float(), picture[part])
        mask[part] = torch.where(garment, classes[number].to(torch.uint8) + 1, mask[part])
    return picture.clamp(0, 255).to(torch.uint8), mask


def segmenter_files(cache: Path) -> tuple[Path, Path]:
    """A folder of timm, whose features are an eighth of the image, and images with masks."""

    def write_model(folder: Path) -> None:
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        pixels = (3, SCENE, SCENE)
        config = {
            "architecture": convnets.ARCHITECTURE,
            "num_classes": 10,
            "model_args": {"output_stride": 8},
            "pretrained_cfg": {"input_size": pixels, "mean": mean, "std": std, "crop_pct": 1.0},
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file(convnets.mobilenet_weights(cache), weights(folder))

    def write_data(folder: Path) -> None:
        (folder / "classes.txt").write_text("\n".join(["background", *GARMENTS]) + "\n")
        draw = torch.Generator().manual_seed(0)
        for split, rows in zip(SHAPES["rows"], convnets.load_unseen(cache), strict=True):
            for part in ("images", "masks"):
                (folder / part / split).mkdir(parents=True)
            for number in range(SHAPES["rows"][split] // 2):
                made = scene(rows["images"], rows["labels"], draw)
                for part, values in zip(("images", "masks"), made, strict=True):
                    Image.fromarray(values.numpy()).save(folder / part / split / f"{number}.png")

    model = kept(cache, "files-backbone", {**SHAPES, **convnets.TRAINING}, write_model)
    return model, kept(cache, "files-scenes", {**SHAPES, **convnets.TRAINING}, write_data)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def job(task: Any, batch_size: int, steps: int, input_size: int, rate: float) -> Job:
    """A job of AdamW without a model and data."""
    return Job(
        "",
        "",
        task=task,
        batch_size=batch_size,
        steps=steps,
        input_size=input_size,
        optimizer="adamw",
        learning_rate=rate,
        precision="fp32",
        evaluate_every=steps,
    )


CASES = {
    "squeezenet": Case(
        "SqueezeNet 1.1, Fashion-MNIST",
        job("classification", 32, 250, convnets.SIDE, 2e-4),
        squeezenet_files,
    ),
    "decoder": Case(
        "Llama of four layers, Reuters R8",
        job("causal-lm", 8, 120, decoder.TOKENS, 3e-4),
        decoder_files,
    ),
    "scenes": Case(
        "MobileNetV2 0.5 with a linear head, garments on a background",
        job("segmentation", 8, 150, ENLARGED, 2e-3),
        segmenter_files,
    ),
}


def run(case: Case, recipe: Recipe, seed: int, cache: Path) -> dict[str, Any]:
    """Fine-tunes from files to the result of a run."""
    model, data = case.files(cache)
    wanted = replace(case.job, model=str(model), dataset=str(data), seed=seed)
    with tempfile.TemporaryDirectory() as out:
        going = finetune(wanted, replace(recipe, seed=seed), out=Path(out) / "run", device="cpu")
        losses = [step.loss for step in going]
        found = going.result()
    names = ("metric", "metrics", "steps", "saved_bytes", "full_saved_bytes", "step_seconds")
    return {**{name: found[name] for name in names}, "curve": losses[::10]}


def described(cases: Mapping[str, Case]) -> dict[str, Any]:
    """What all rows have in common."""
    return {
        "command": "scripts/bench/end_to_end.py",
        "date": date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm", "transformers")},
        "ratio": RECIPES["razor"].ratio,
        "settings": {
            name: {
                "summary": case.summary,
                **{k: v for k, v in asdict(case.job).items() if v not in (None, "", False)},
            }
            for name, case in cases.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of each run, instead of the case's own")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = [row for row in known if row["task"] not in args.cases]
    cases = CASES
    if args.steps:
        shorter = partial(replace, steps=args.steps, evaluate_every=args.steps)
        cases = {name: replace(case, job=shorter(case.job)) for name, case in cases.items()}
    for name, case in ((name, cases[name]) for name in args.cases):
        for seed in range(args.seeds):
            for method, recipe in RECIPES.items():
                found = run(case, recipe, seed, args.cache)
                rows.append({"task": name, "case": method, "seed": seed, **found})
                document = {**described(cases), "rows": rows}
                args.out.write_text(json.dumps(document, indent=2) + "\n")
                value = found["metrics"][found["metric"]]
                print(f"{name} {method} {seed}: {found['metric']} {value:.4f}")
    Console().print(report(rows))


def report(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table("task", "case", "seed", "saved", "of full", "metric", "value", "step")
    for row in rows:
        table.add_row(
            row["task"],
            row["case"],
            str(row["seed"]),
            size(row["saved_bytes"]),
            f"{row['saved_bytes'] / row['full_saved_bytes']:.0%}",
            row["metric"],
            f"{row['metrics'][row['metric']]:.4f}",
            f"{row['step_seconds']:.2f} s",
        )
    return table


if __name__ == "__main__":
    main()
