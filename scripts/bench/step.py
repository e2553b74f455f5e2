"""Times whole training steps with every method, and measures their memory, against full.

    .venv/bin/python scripts/bench/step.py

A step is forward, cross-entropy, backward, SGD with momentum and zero_grad, on random images. On a
CUDA device it is of ViT-B/16, batch 128, in bf16 and fp32; on a CPU of ViT-S/16, batch 8, in fp32.
Cases take turns on one set of weights; ratios to full are medians over the turns, and those of
compiled cases to compiled full too. Compiled are whole models, by torch.compile, in the first
precision alone; `activation_memory_budget` is what torch.compile may keep, as a share of what it
would. Of micro-batches those are taken too that have razor's peak, or less. CUDA graphs are tried
on CUDA alone; of a case with them only the time and its peak are taken with graphs.

The peak is measured on CUDA. On a CPU it is traced, that of compiled cases measured; the two agree
(tests/test_step.py). The script writes results/step_DEVICE.json after every turn of a case; razor
comes first, beside full.

The logits and the bias gradient of the classifier are exact by contract: a case in which they
differ from those of full gets no time. Of a case whose forward pass runs in int8 the logits must
have a cosine of COSINE to those of full, and must not be the same, or nothing ran in int8.
"""

from bisect import bisect_left
from dataclasses import replace

from case import Bench, Case, Run, Workload, main

from razorctl import Recipe
from razorctl.methods import METHODS

RATIO, MORE = 0.9, 0.97
BUDGET = 0.1  # about the one of least peak on a CPU, which is above razor's
MICRO_BATCH = {"cuda": 16, "cpu": 2}
WORKLOADS = {
    "cuda": Workload("vit_base_patch16_224", 128, ("bf16", "fp32"), turns=5, steps=5),
    "cpu": Workload("vit_small_patch16_224", 8, ("fp32",), turns=7, steps=1),
}


def at_peak(bench: Bench, precision: str, recipe: Recipe) -> dict[str, Case]:
    """The largest micro-batch, of halves of the batch, whose peak is at most that of a recipe.

    If there is none, the smallest one, with a name that says so; nothing if the recipe fails.
    """

    def peak(case: Case) -> int | None:
        run = Run(f"peak of {case}", case, precision)
        run.attempt(bench.measure_peak)
        return run.peak

    most, rows, sizes = peak(Case(recipe)), bench.workload.batch_size, list[int]()
    while rows := rows // 2:
        sizes.append(rows)
    if most is None:
        return {}
    where = bisect_left(sizes, True, key=lambda rows: (peak(Case(rows=rows)) or 0) <= most)
    rows = sizes[min(where, len(sizes) - 1)]
    side = "at" if where < len(sizes) else "above"
    return {f"accumulate {rows}, {side} {recipe.method}'s peak": Case(rows=rows)}


def cases(bench: Bench, precision: str) -> dict[str, Case]:
    """Every case by name; full is the first, and compiled ones are last, since they take longest
    until they are timed.
    """
    few = MICRO_BATCH[bench.device.type]
    pruning = [name for name, method in METHODS.items() if method.prunes]
    sheared, razor = Recipe("prebackrazor++", RATIO), Recipe("razor", RATIO)
    int8 = replace(razor, int8_forward=True)
    more = replace(razor, ratio=MORE)
    graphs = {
        "full, CUDA graphs": Case(graphs=True),
        "razor, CUDA graphs": Case(razor, graphs=True),
        f"razor at {MORE}, CUDA graphs": Case(more, graphs=True),
    }
    return {
        "full": Case(),
        "razor": Case(razor),
        f"razor at {MORE}": Case(more),
        **(graphs if bench.device.type == "cuda" else {}),
        "razor, int8 forward": Case(int8, exact=False),
        "full, stored attention": Case(Recipe("full", attention="stored")),
        "checkpoint": Case(Recipe("checkpoint")),
        f"accumulate {few}": Case(rows=few),
        **at_peak(bench, precision, razor),
        **{name: Case(Recipe(name, RATIO)) for name in pruning if name != "razor"},
        "prebackrazor++, flash": Case(replace(sheared, attention="flash")),
        "prebackrazor++, joint budget 0.5": Case(replace(sheared, joint_budget=0.5)),
        "razor, branches 0.5": Case(replace(razor, joint_budget=0.5, joint="branches")),
        "full, compiled": Case(compiled=True),
        "razor, compiled": Case(razor, compiled=True),
        "razor, int8 forward, compiled": Case(int8, compiled=True, exact=False),
        f"full, compiled, activation_memory_budget {BUDGET}": Case(compiled=True, budget=BUDGET),
        "torchao int8 mixed precision, compiled": Case(
            Recipe("torchao-int8"), compiled=True, exact=False
        ),
    }


if __name__ == "__main__":
    main("step", __doc__, WORKLOADS, cases, ratio=RATIO)
