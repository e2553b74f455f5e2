"""Times steps of every method at every ratio and measures their memory: what either costs.

    .venv/bin/python scripts/bench/frontier.py

Steps, checks and peaks are those of step.py, on a CUDA device in bf16 alone; nothing is compiled.
A method has a row for each of RATIOS that it can meet, or one if it takes no ratio. Exact methods
are full, its micro-batches of a half to a sixteenth of the batch, and checkpoint. picture.py draws
the result, results/frontier_DEVICE.json.
"""

from collections.abc import Iterator
from dataclasses import replace

from step import Bench, Case, Workload, main

from razorctl import Recipe
from razorctl.errors import UsageError
from razorctl.methods import METHODS

RATIOS = (0.5, 0.75, 0.9, 0.95, 0.97)
VARIANTS = {  # of razor -> what differs in the recipe
    "razor, int8 forward": {"int8_forward": True},
    "razor, joint budget 0.5": {"joint_budget": 0.5},
    "razor, branches 0.5": {"joint_budget": 0.5, "joint": "branches"},
}
WORKLOADS = {
    "cuda": Workload("vit_base_patch16_224", 128, ("bf16",), turns=5, steps=3),
    "cpu": Workload("vit_small_patch16_224", 8, ("fp32",), turns=5, steps=1),
}


def recipes(method: str) -> Iterator[tuple[str, Recipe]]:
    """The name and recipe of a method at each ratio that it can meet."""
    if not METHODS[method].has_ratio:
        yield method, Recipe(method)
        return
    for ratio in RATIOS:
        try:
            yield f"{method} at {ratio}", Recipe(method, ratio)
        except UsageError:  # razor has no rules that keep so little
            continue


def cases(bench: Bench, precision: str) -> dict[str, Case]:
    """Every case by name; full is the first."""
    rows = bench.workload.batch_size
    every = {"full": Case(), "checkpoint": Case(Recipe("checkpoint"))}
    every |= {f"accumulate {rows >> n}": Case(rows=rows >> n) for n in range(1, 5) if rows >> n}
    for name, method in sorted(METHODS.items(), key=lambda entry: entry[0] != "razor"):
        if method.prunes:
            every |= {name: Case(recipe) for name, recipe in recipes(name)}
    for name, changes in VARIANTS.items():
        for _, recipe in recipes("razor"):
            varied = replace(recipe, **changes)
            every[f"{name} at {recipe.ratio}"] = Case(varied, exact=not varied.int8_forward)
    return every


if __name__ == "__main__":
    main("frontier", __doc__, WORKLOADS, cases)
