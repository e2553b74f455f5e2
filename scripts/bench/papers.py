"""Predicts the memory and the step of each row of the papers' tables, beside what they say.

    .venv/bin/python scripts/bench/papers.py

Every row is a preset in presets/recipes, in fp32 as in the papers, planned for the card of the
table as `razorctl plan --recipe NAME` does: nothing runs. The script writes results/papers.json
and takes some ten minutes. Accuracies need the papers' data; accuracy.sh has ours, on other data.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from record import head, options, write
from rich.console import Console
from rich.progress import track
from rich.table import Table as Shown

from razorctl import Job, Recipe
from razorctl.cli.settings import settings_of_file
from razorctl.config import presets
from razorctl.errors import RazorError
from razorctl.memory.trace_cache import Cache
from razorctl.planning import gpus
from razorctl.planning.search import Search
from razorctl.units import size


@dataclass(frozen=True)
class Line:
    """A row of a table: what the paper calls it and says of it, and the preset that is planned.

    accuracies: in %, in the order of the table's data sets; "" where the paper has none.
    """

    method: str
    preset: str
    memory: str
    time: str
    accuracies: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of a paper. memory, time: what its columns mean. command: what runs a row."""

    name: str
    model: str
    data: tuple[str, ...]
    memory: str
    time: str
    gpu: str
    dataset: str
    lines: tuple[Line, ...]

    def command(self, line: Line, dataset: str) -> str:
        return f"razorctl finetune {self.model} {dataset} --recipe {line.preset} --precision fp32"


SHEARED, RAZOR = "Sheared Backpropagation", "Back Razor, appendix"
ALLOCATED = "allocated by CUDA, mean"
PEAK = "peak"
CIFAR = "cifar100"
TABLES = (
    Table(
        f"{SHEARED}, Tab. 1",
        "vit-b16",
        ("CIFAR-100", "CIFAR-10", "CUB-200"),
        ALLOCATED,
        "an epoch",
        "rtx-4090",
        CIFAR,
        (
            Line("Full-FT", "sheared-tab1-full", "19980 MB", "2:59", ("93.0", "99.0", "85.5")),
            Line(
                "BackRazor", "sheared-tab1-backrazor", "7540 MB", "6:19", ("92.1", "98.6", "86.6")
            ),
            Line(
                "PreBR++, JS@70%", "sheared-tab1-js70", "7440 MB", "4:37", ("92.4", "98.8", "85.0")
            ),
            Line(
                "PreBR++, JS@50%", "sheared-tab1-js50", "6880 MB", "4:02", ("92.1", "98.6", "85.6")
            ),
        ),
    ),
    Table(
        f"{SHEARED}, Tab. 2",
        "vit-b16",
        ("CIFAR-100",),
        ALLOCATED,
        "an epoch",
        "rtx-4090",
        CIFAR,
        (
            Line("PreBR++, JS, its attention", "sheared-tab2-stored", "6570 MB", "4:37", ("91.4",)),
            Line("the same, FlashAttention", "sheared-tab2-flash", "7960 MB", "3:40", ("92.2",)),
            Line("the same, sparse", "sheared-tab2-sparse-flash", "6880 MB", "4:02", ("92.1",)),
        ),
    ),
    Table(
        f"{SHEARED}, Tab. 2, RTX 2080 Ti",
        "vit-b16",
        ("CIFAR-100",),
        ALLOCATED,
        "an epoch",
        "rtx-2080-ti",
        CIFAR,
        (
            Line("Full-FT", "sheared-tab1-full", "out of memory", "", ("",)),
            Line("BackRazor", "sheared-tab1-backrazor", "7780 MB", "19:47", ("",)),
            Line("PreBR, JS@30%", "sheared-tab2-2080ti", "6870 MB", "15:13", ("",)),
        ),
    ),
    Table(
        f"{SHEARED}, Tab. 4",
        "vit-b16",
        ("CIFAR-100",),
        PEAK,
        "an epoch",
        "rtx-4090",
        CIFAR,
        (
            Line("Full-FT", "sheared-tab1-full", "19980 MB", "2:59", ("93.0",)),
            Line("BackRazor, 90 %", "sheared-tab4-backrazor-90", "7540 MB", "6:19", ("92.1",)),
            Line("PreBR-, 90 %", "sheared-tab4-norm-90", "7220 MB", "5:25", ("91.7",)),
            Line("BackRazor, 80 %", "sheared-tab4-backrazor-80", "8210 MB", "6:28", ("92.9",)),
            Line("PreBR-, 80 %", "sheared-tab4-norm-80", "8100 MB", "5:49", ("92.9",)),
        ),
    ),
    *(
        Table(
            f"{SHEARED}, Tab. 5, batch {batch}",
            "bert-base",
            ("RTE",),
            PEAK,
            "five epochs",
            "rtx-4090",
            "rte",
            tuple(
                Line(name, f"sheared-tab5-b{batch}-{preset}", memory, time, (accuracy,))
                for (name, preset), (memory, time, accuracy) in zip(
                    (
                        ("Full-FT", "full"),
                        ("BackRazor, 90 %", "backrazor-90"),
                        ("PreBR, 90 %", "prebackrazor-90"),
                        ("BackRazor, 80 %", "backrazor-80"),
                        ("PreBR, 80 %", "prebackrazor-80"),
                    ),
                    figures,
                    strict=True,
                )
            ),
        )
        for batch, figures in (
            (
                32,
                (
                    ("16625 MB", "2:50", "70.40"),
                    ("11865 MB", "6:26", "66.43"),
                    ("11871 MB", "6:24", "65.70"),
                    ("12888 MB", "6:41", "65.70"),
                    ("13006 MB", "6:19", "66.07"),
                ),
            ),
            (
                8,
                (
                    ("5575 MB", "4:28", "70.04"),
                    ("4734 MB", "16:59", "66.43"),
                    ("4747 MB", "16:05", "69.68"),
                    ("4812 MB", "17:39", "69.31"),
                    ("4840 MB", "16:36", "72.92"),
                ),
            ),
        )
    ),
    *(
        Table(
            f"{SHEARED}, supplement, Tab. {number}",
            "vit-b16",
            (data,),
            PEAK,
            time,
            "rtx-4090",
            CIFAR,
            tuple(
                Line(name, f"sheared-tab{number}-{preset}", *line, (accuracy,))
                for (name, preset), (*line, accuracy) in zip(
                    (
                        ("Full-FT", "full"),
                        ("BackRazor, 80 %", "backrazor-80"),
                        ("PreBR++, 80 %", "prebackrazor-80"),
                    ),
                    figures,
                    strict=True,
                )
            ),
        )
        for number, data, time, figures in (
            (
                6,
                "Flowers-102",
                "2,000 steps",
                (
                    ("19600 MB", "17:11", "99.3"),
                    ("8190 MB", "34:50", "99.5"),
                    ("7800 MB", "22:39", "99.4"),
                ),
            ),
            (
                7,
                "CUB-200",
                "an epoch",
                (
                    ("19600 MB", "0:22", "85.5"),
                    ("8210 MB", "0:47", "86.6"),
                    ("8100 MB", "0:30", "86.4"),
                ),
            ),
        )
    ),
    Table(
        f"{RAZOR}, Tab. 1",
        "vit-l16",
        ("CUB-200", "Flowers-102"),
        "for training, computed",
        "",
        "a100-80gb",
        CIFAR,
        (
            Line("FT-Full", "backrazor-tab1-full", "51257 MB", "", ("86.6", "99.6")),
            Line(
                "Back Razor, 90 %", "backrazor-tab1-backrazor-90", "12270 MB", "", ("86.9", "99.5")
            ),
        ),
    ),
    Table(
        f"{RAZOR}, Tab. 2",
        "proxylessnas",
        ("CUB-200", "Flowers-102"),
        "for training, computed",
        "",
        "rtx-2080-ti",
        CIFAR,
        (
            Line("ActNN", "backrazor-tab2-int2", "60 MB", "", ("81.0", "96.9")),
            Line("Back Razor, 90 %", "backrazor-tab2-backrazor-90", "42 MB", "", ("81.0", "96.9")),
        ),
    ),
    Table(
        f"{RAZOR}, Tab. 3, batch 1",
        "proxylessnas",
        ("Flowers-102",),
        "for training, computed",
        "",
        "rtx-2080-ti",
        CIFAR,
        (
            Line("FT-Full", "backrazor-tab3-full", "34 MB", "", ("96.4",)),
            Line("TinyTL; ours is its TinyTL-B", "backrazor-tab3-bias", "18 MB", "", ("96.1",)),
            Line("Back Razor, 80 %", "backrazor-tab3-backrazor-80", "15 MB", "", ("96.4",)),
        ),
    ),
    Table(
        f"{RAZOR}, Tab. 4, batch 8, SGD",
        "proxylessnas",
        ("Flowers-102",),
        "for training, computed",
        "",
        "rtx-2080-ti",
        CIFAR,
        (
            Line("FT-Full", "backrazor-tab4-full", "366 MB", "", ("97.1",)),
            Line("Back Razor, 80 %", "backrazor-tab4-backrazor-80", "42 MB", "", ("96.7",)),
        ),
    ),
    *(
        Table(
            f"{RAZOR}, Tab. 5, batch {batch}",
            "proxylessnas",
            ("CIFAR-100",),
            "on the device",
            "",
            "rtx-2080-ti",
            CIFAR,
            (
                Line("baseline", f"backrazor-tab5-b{batch}-full", full, "", ("",)),
                Line("Back Razor, 90 %", f"backrazor-tab5-b{batch}-backrazor-90", own, "", ("",)),
            ),
        )
        for batch, full, own in ((8, "1655 MB", "1637 MB"), (128, "7393 MB", "6634 MB"))
    ),
)


def rows(table: Table, cache: Cache) -> Iterator[dict[str, Any]]:
    """The rows of a table, and of `razor` at ratio 0.9 with the settings of its first."""
    first = table.lines[0]
    ours = Line("ours: razor, 90 %", first.preset, "", "", ("",) * len(table.data))
    for line in (*table.lines, ours):
        preset = settings_of_file(presets.files("recipes")[line.preset])
        settings = {k: v for k, v in preset.items() if k in Job.__dataclass_fields__}
        recipe = Recipe(**{k: v for k, v in preset.items() if k in Recipe.__dataclass_fields__})
        if line is ours:
            recipe = Recipe("razor", 0.9)
        job = Job(table.model, table.dataset, precision="fp32", **settings)
        row = {"table": table.name, **asdict(line), "command": table.command(line, table.dataset)}
        if line is ours:
            row["command"] += " --method razor --ratio 0.9"
        try:
            search = Search(job, gpus.load(table.gpu), 1 << 60, recipe, cache)
            predicted = search.predict(recipe).predicted
        except RazorError as error:
            yield row | {"error": str(error)}
            continue
        yield row | {
            "saved_bytes": predicted.saved_bytes,
            "peak_bytes": predicted.peak_bytes,
            "step_seconds": predicted.step_seconds,
            "step_seconds_low": predicted.step_seconds_low,
            "step_seconds_high": predicted.step_seconds_high,
            "step_seconds_vs_full": predicted.step_seconds_vs_full,
            "error": None,
        }


def main() -> None:
    args = options(__doc__, "papers").parse_args()
    cache = Cache()
    every = track(TABLES, "tables", console=Console(stderr=True))
    lines = [row for table in every for row in rows(table, cache)]
    document = {
        **head(None, "torch", "timm", "transformers"),
        "tables": [asdict(replace(table, lines=())) for table in TABLES],
        "rows": lines,
    }
    write(args.out, document)
    shown = Shown("table", "row", "paper", "kept", "peak", "step")
    for row in lines:
        sizes = [size(row[key]) if row[key] else "-" for key in ("saved_bytes", "peak_bytes")]
        shown.add_row(
            row["table"], row["method"], row["memory"], *sizes, f"{row['step_seconds']:.3f}"
        )
    Console().print(shown)


if __name__ == "__main__":
    main()
