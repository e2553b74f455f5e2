"""Checks `sparsify` on a model of every file of models in timm: forward, gradients, `restore`.

    .venv/bin/python scripts/bench/architectures.py

Of each file the model with the fewest parameters is run, in train mode, on random images, with
`razor` at ratio 0.5. The forward pass has to equal that of the stock model to the bit. Every
parameter that gets a gradient in the stock model has to get a finite one. The cosine of all
gradients to the stock ones has to be at least 0.9995. `restore` has to bring the stock types back.
Each model runs in a process of its own, so that a crash is a row too. The script writes
results/architectures.json and exits with 1 if a model has a fault. It takes some ten minutes on one
core.
"""

import sys
import tomllib
from dataclasses import asdict, dataclass, field
from typing import Any

import timm
import torch
from pages import HERE, table
from passes import cosine, equal, guarded, redrawn, run, undropped, worst
from record import device_name, head, options, write
from rich.console import Console
from rich.progress import track
from timm.models import list_modules
from torch import Tensor, nn

from razorctl import Recipe, restore, sparsify

RECIPE = Recipe("razor", 0.5)
COSINE = 0.9995
COLUMNS = ("module", "model", "swapped", "cosine", "worst", "faults")  # that are printed


@dataclass(frozen=True)
class Case:
    """A model of timm and its images.

    resized: whether timm has to be told the size of the images. options: arguments of timm for a
    smaller model, used where the smallest has over 80 million parameters and takes them.
    """

    model: str
    pixels: int = 96
    batch: int = 4
    resized: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """A model in train mode with gradients for every parameter."""
        torch.manual_seed(0)
        size = {"img_size": self.pixels} if self.resized else {}
        model: nn.Module = timm.create_model(self.model, num_classes=10, **size, **self.options)
        return redrawn(undropped(model))

    def images(self) -> Tensor:
        """Random images [batch, 3, pixels, pixels]."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, 3, self.pixels, self.pixels, generator=generator)


MODELS = tomllib.loads((HERE / "models.toml").read_text())
CASES = {name: Case(**case) for name, case in MODELS["timm"].items()}


def check(case: Case) -> dict[str, Any]:
    """A row of the result; `faults` says what is wrong with it, in words."""
    model, images = case.build(), case.images()
    want = run(model, images)
    types = [type(module) for module in model.modules()]
    names = sparsify(model, RECIPE)
    got = run(model, images)
    restore(model)
    closeness = cosine(got, want)
    faults = {
        "the forward pass is not stock's": not equal(got, want),
        "other parameters have gradients": got.gradients.keys() != want.gradients.keys(),
        "a gradient is not finite": not all(g.isfinite().all() for g in got.gradients.values()),
        f"the cosine is below {COSINE}": not closeness >= COSINE,
        "restore left other types": types != [type(module) for module in model.modules()],
    }
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "swapped": len(names),
        "cosine": closeness,
        "worst": worst(got.gradients, want.gradients),
        "faults": [fault for fault, there in faults.items() if there],
    }


def main() -> None:
    parser = options(__doc__, "architectures")
    parser.add_argument("--modules", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for module in track(args.modules, console=Console(stderr=True)):
        case = CASES[module]
        rows.append({"module": module, **asdict(case), **guarded(check, case)})
    document = {
        **head(f"1 of {device_name()}", "torch", "timm"),
        "recipe": {"method": RECIPE.method, "ratio": RECIPE.ratio},
        "cosine_at_least": COSINE,
        "modules_left_out": sorted(set(list_modules()) - set(CASES)),
        "rows": rows,
    }
    write(args.out, document)
    print(table(COLUMNS, [[row.get(name, "") for name in COLUMNS] for row in rows]))
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
