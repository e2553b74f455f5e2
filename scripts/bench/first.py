"""Takes one training step by every method, beside full: what to run first on a new card.

    .venv/bin/python scripts/bench/first.py

The steps are those of step.py in bf16, of 32 images. On a CUDA device what they launch is compiled
before, for that card alone, by a process for each core; Triton keeps it, and compiles what is
missing later. A row has whether all gradients are finite, the cosine of the whole gradient to that
of full in fp32 and in bf16, the distance of the logits to those of full in bf16, the seconds of a
first and a second step, the peak, and which kernels failed. The last row has razor's gradient by
PyTorch operations, which kernels must come close to. At the end a step is captured as a CUDA graph,
as `razorctl doctor` does it. The script writes results/first_DEVICE.json
after every row, and starts again with the next case if a card can run nothing more. It ends with 1
if a step or a kernel failed, or a gradient is not finite.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.nn.functional as F
from pages import RESULTS, Row, figures
from record import device_name, head, on_a_device, options, reason, write
from step import LIBRARIES, SMOKE, Bench, Case, Run, Workload
from torch import Tensor, nn

from razorctl import Recipe
from razorctl.config.job import Job
from razorctl.methods import METHODS
from razorctl.ops import kernels
from razorctl.planning import job_trace
from razorctl.training.doctor import graphs

if TYPE_CHECKING:
    from razorctl.ops.triton.recorded import Card
    from razorctl.ops.triton.variants import Variant

WORKLOAD = Workload("vit_base_patch16_224", 32, ("bf16",), turns=1, steps=2)
FULL, TORCH = "full", "razor, PyTorch operations"
MOST = 16  # processes that compile


def runs() -> Iterator[Run]:
    """The runs, in order; the first has the exact gradient, and razor's comes soon."""
    yield Run(f"{FULL}, fp32", Case(), "fp32")
    cases = {FULL: Case(), "razor": Case(Recipe("razor", 0.9))}
    cases["razor at 0.5"] = Case(Recipe("razor", 0.5))
    cases["razor, int8 forward"] = Case(Recipe("razor", 0.9, int8_forward=True))
    cases["checkpoint"] = Case(Recipe("checkpoint"))
    pruning = [name for name, method in METHODS.items() if method.prunes]
    cases |= {name: Case(Recipe(name, 0.9)) for name in pruning if name not in cases}
    cases[TORCH] = cases["razor"]
    yield from (Run(name, case, "bf16") for name, case in cases.items())


def compiled(workload: Workload) -> Row:
    """Compiles what the steps of all runs launch on the current card, and says what failed.

    In processes, as most of a compilation holds Python's lock. They see no card: none needs it, and
    each would take memory of it.
    """
    from razorctl.ops.triton.recorded import Card

    start, card = time.perf_counter(), Card.of(torch.device("cuda"))
    cases = {run.case.recipe: run for run in runs() if METHODS[run.case.recipe.method].prunes}
    apart = multiprocessing.get_context("spawn")  # what CUDA has set up here cannot be forked
    with (
        mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
        apart.Pool(min(MOST, len(os.sched_getaffinity(0)))) as pool,
    ):
        recorded = partial(_recorded, workload.batch_size, card)
        variants = {repr(each): each for part in pool.map(recorded, cases, 1) for each in part}
        seconds = time.perf_counter() - start
        results = pool.imap_unordered(partial(_compiled, card.capability), variants.values())
        errors = [why for why in results if why]
    whole = time.perf_counter() - start
    print(f"compiled {len(variants)} kernels for sm_{card.capability} in {whole:.0f} s,", end=" ")
    print(f"{seconds:.0f} of them to find out which; {len(errors)} failed", *errors[:1], flush=True)
    return {
        "kernels": len(variants),
        "seconds": whole,
        "recording_seconds": seconds,
        "errors": errors,
    }


def attempted(workload: Workload) -> Row:
    """The result of `compiled`, or its error: steps then compile what they need one by one."""
    try:
        return compiled(workload)
    except Exception as error:
        print("nothing was compiled:", reason(error), flush=True)
        return {"error": reason(error)}


def _recorded(batch_size: int, card: "Card", recipe: Recipe) -> "list[Variant]":
    """The variants that a step launches; for other processes, a kernel is a (module, name)."""
    job = Job("vit-b16", "random", batch_size=batch_size, precision="bf16", optimizer="sgd")
    job = replace(job, learning_rate=1e-3, weight_decay=0.0)
    from razorctl.ops.triton.recorded import distinct

    variants = distinct(job_trace.launches(job, recipe, 1000, card)[card])
    return [replace(v, kernel=(v.kernel.__module__, v.kernel.__name__)) for v in variants]


def _compiled(capability: int, variant: "Variant") -> str | None:
    """Compiles a variant into Triton's cache; why that failed."""
    from razorctl.ops.triton.compiled import compile_all

    try:
        module, name = variant.kernel
        variant = replace(variant, kernel=getattr(import_module(module), name))
        compile_all([variant], capability, threads=1)
    except Exception as error:
        return f"{variant.label}: {reason(error)}"
    return None


class Steps:
    """The steps of all runs, and the gradients that they are compared with: by name of a run."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.gradients: dict[str, Tensor] = {}
        self.logits: dict[str, Tensor] = {}

    def take(self, run: Run, row: Row) -> None:
        """Takes a run's steps, and puts what they say into its row."""
        with self.bench.running(run) as model:
            for key in ("first_seconds", "second_seconds"):
                self.bench.full.zero_grad()
                start = time.perf_counter()
                logits = torch.cat(self.bench.gradients(run, model)).float()
                gradient = _whole(self.bench.full)
                row["finite"] = bool(gradient.isfinite().all() & logits.isfinite().all())  # waits
                row[key] = time.perf_counter() - start
            if self.bench.device.type == "cuda":
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
        if run.name.startswith(FULL):
            self.gradients[run.name], self.logits[run.name] = gradient, logits
        for name, other in self.gradients.items():
            row[f"cosine to {name}"] = _cosine(gradient, other)
        if FULL in self.logits:
            distance = torch.linalg.vector_norm(logits - self.logits[FULL])
            row["logits_distance"] = (distance / torch.linalg.vector_norm(logits)).item()


def _whole(model: nn.Module) -> Tensor:
    """The gradient of all parameters, on the device."""
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).float()


def _cosine(ours: Tensor, theirs: Tensor) -> float | None:
    """None if a method leaves out the gradients of some parameters."""
    return (
        None
        if len(ours) != len(theirs)
        else F.cosine_similarity(ours.double(), theirs.double(), 0).item()
    )


def as_text(row: Row) -> str:
    columns = (
        ("cosine to full, fp32", 1, ".4f"),
        ("cosine to full", 1, ".4f"),
        ("logits_distance", 1, ".1e"),
        ("first_seconds", 1, ".2f"),
        ("second_seconds", 1, ".3f"),
    )
    cells = "".join(f"{figure:>10}" for figure in figures(row, columns))
    broken = "" if row["finite"] or row["error"] else "NOT FINITE "
    why = row["error"] or ", ".join(f"{name}: {why}" for name, why in row["failed"].items())
    return f"{row['case']:27}{cells}  {broken}{why}".rstrip()


def main() -> int:
    parser = on_a_device(options(__doc__))
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--resume", action="store_true", help="skip the rows that OUT has")
    args = parser.parse_args()
    workload = replace(WORKLOAD, **SMOKE, batch_size=8) if args.smoke else WORKLOAD
    out = args.out or RESULTS / f"first_{args.device}.json"
    document: Row = (
        json.loads(out.read_text())
        if args.resume
        else {
            **head(device_name(args.device), *LIBRARIES),
            "compiled": attempted(workload) if args.device == "cuda" else None,
            "rows": [],
        }
    )
    done = {row["case"] for row in document["rows"]}
    print(f"{'one training step':27}{'to fp32':>10}{'to full':>10}", end="")
    print(f"{'logits':>10}{'first s':>10}{'second s':>10}", flush=True)
    torch.backends.cudnn.allow_tf32 = False  # the gradient in fp32 is exact
    steps = Steps(Bench(workload, torch.device(args.device)))
    for run in runs():
        if run.name in done and not run.name.startswith(FULL):
            continue
        before = kernels.failures()
        row: Row = {"case": run.name, "finite": None}
        kernels._wanted = run.name != TORCH
        run.attempt(steps.take, row)
        if run.name in done:  # the others are compared with it
            continue
        failed = {op: why for (op, _), why in kernels.failures().items() if (op, _) not in before}
        document["rows"].append(row | {"error": run.error, "failed": failed})
        write(out, document)
        print(as_text(document["rows"][-1]), flush=True)
        if (run.error or "").startswith("AcceleratorError"):
            rest = [] if args.resume else ["--resume"]
            os.execv(sys.executable, [sys.executable, *sys.argv, *rest])
    if args.device == "cuda":
        document["graphs"] = asdict(graphs(torch.device(args.device)))
        write(out, document)
        print("CUDA graphs:", document["graphs"]["found"])
    print(f"written to {out}")
    return int(any(r["error"] or r["failed"] or not r["finite"] for r in document["rows"]))


if __name__ == "__main__":
    sys.exit(main())
