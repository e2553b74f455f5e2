"""Embeddings at equal wall time: each way at the batch that one budget of memory holds.

    .venv/bin/python scripts/bench/retrieval.py [--seconds 90] [--budget MiB]

A sentence embedder learns which subject a mail has (see files.py). The batch of `full` with
activation checkpointing and of `razor` is the largest multiple of STEP whose traced peak is within
the budget. GradCache takes the batch of `razor`, as micro-batches of the size that `full` holds.
Steps of the ways take turns on one core; as many steps of each as take --seconds are then run, for
each seed, with the learning rate whose loss on the validation split is the least. Results are in
results/retrieval-DEVICE-DATE.json; a call goes on where an earlier one of the same day was
interrupted.
"""

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from functools import partial
from multiprocessing import get_context
from os import sched_getaffinity
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import transformers
from files import bert, subjects
from pages import MIB, RESULTS, Row, listing, load
from pretrained import CACHE
from record import device_name, versions, write

from razorctl import Job, Recipe
from razorctl.planning import job_trace
from razorctl.training.run import finetune

WAYS = {
    "full, checkpointing": Recipe("full", activation_checkpointing=True),
    "full, GradCache": Recipe("full"),
    "razor": Recipe("razor", 0.9),
}
STEP, MOST = 16, 1024  # of batches
TOKENS, SEEDS, RATES = 32, 3, (6e-5, 2e-4)
TURNS, WARM_UP = 5, 1
FIGURES = ("recall_at_1", "recall_at_5", "recall_at_10", "mrr", "loss")


def begun(cache: Path) -> Job:
    """The job of all runs, without batch, steps and learning rate."""
    return Job(
        *(str(bert(cache)), str(subjects(cache))),
        task="embedding",
        optimizer="adamw",
        precision="fp32",
        input_size=TOKENS,
        evaluate_every=10**6,
    )


def largest(job: Job, recipe: Recipe, budget: int) -> int:
    """The largest batch whose peak is within a budget."""
    low, high = 0, MOST // STEP
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(job, batch_size=middle * STEP, steps=1, learning_rate=1e-5)
        trace = job_trace.trace(tried.resolved({}, MOST), recipe, 2, device="cpu")
        low, high = (middle, high) if trace.peak <= budget else (low, middle - 1)
    return low * STEP


def jobs(cache: Path, budget: int) -> dict[str, Job]:
    """The job of each way, with its batch."""
    job = begun(cache)
    held = {way: largest(job, recipe, budget) for way, recipe in WAYS.items()}
    ours = held["razor"]
    micro = max(size for size in range(STEP, held["full, GradCache"] + 1) if ours % size == 0)
    return {
        "full, checkpointing": replace(job, batch_size=held["full, checkpointing"]),
        "full, GradCache": replace(job, batch_size=ours, accumulate=ours // micro),
        "razor": replace(job, batch_size=ours),
    }


def step_seconds(every: dict[str, Job]) -> dict[str, float]:
    """The median time of a step of each way, in turns on one core."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {way: [] for way in every}
    with tempfile.TemporaryDirectory() as out:
        going: dict[str, Iterator[Any]] = {
            way: iter(
                finetune(
                    replace(job, steps=TURNS + WARM_UP + 1, learning_rate=2e-5),
                    WAYS[way],
                    out=Path(out) / way.replace(", ", "-"),
                    device="cpu",
                )
            )
            for way, job in every.items()
        }
        for _ in range(TURNS + WARM_UP):
            for way, steps in going.items():
                taken[way].append(next(steps).seconds)
    return {way: median(seconds[WARM_UP:]) for way, seconds in taken.items()}


def run(way: str, job: Job) -> Row:
    """A run of a way with one seed and rate, and its figures on the test split."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as out:
        recipe = replace(WAYS[way], seed=job.seed)
        going = finetune(job, recipe, out=Path(out) / "run", device="cpu")
        losses = [round(step.loss, 4) for step in going]
        result, last = going.result(), going.history[-1]
    about = {"way": way, "seed": job.seed, "rate": job.learning_rate, "losses": losses}
    keys = ("steps", "saved_bytes", "full_saved_bytes")
    figures = {name: result["metrics"][name] for name in FIGURES}
    about |= {"validation_loss": last.test_loss}
    return {**about, **{key: result[key] for key in keys}, **figures}


def rows(document: Row) -> list[Row]:
    """The means of each way over its seeds, at its best rate."""
    found = []
    for way, job in document["jobs"].items():
        runs = [one for one in document["runs"] if one["way"] == way]
        rate = best_rate(document, way)
        seeds = [one for one in runs if one["rate"] == rate]
        if len(seeds) == SEEDS:
            means = {name: fmean(one[name] for one in seeds) for name in FIGURES}
            spread = {"recall_at_1_std": stdev(one["recall_at_1"] for one in seeds)}
            kept = seeds[0]["saved_bytes"] / seeds[0]["full_saved_bytes"]
            found.append(
                {"way": way, **job, "learning_rate": rate, "kept": kept, **means, **spread}
            )
    return found


def best_rate(document: Row, way: str) -> float:
    """The rate with the least loss on the validation split, by the mean over its seeds."""
    losses: dict[float, list[float]] = {}
    for one in document["runs"]:
        if one["way"] == way:
            losses.setdefault(one["rate"], []).append(one["validation_loss"])
    return min(losses, key=lambda rate: fmean(losses[rate]), default=RATES[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--budget", type=int, default=1024, help="MiB of a step")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    budget = args.budget * MIB
    name = f"retrieval-cpu-{date.today().isoformat()}"
    every = jobs(args.cache, budget)
    if (RESULTS / f"{name}.json").exists():
        document = load(name)
    else:
        seconds = step_seconds(every)
        given = f"--seconds {args.seconds:g} --budget {args.budget}"
        document = {
            "command": f"scripts/bench/retrieval.py {given}",
            "date": date.today().isoformat(),
            "device": device_name("cpu"),
            "versions": versions("torch", "transformers"),
            "settings": {"seconds": args.seconds, "budget": budget, "tokens": TOKENS},
            "jobs": {
                way: {
                    "batch_size": job.batch_size,
                    "accumulate": job.accumulate,
                    "step_seconds": seconds[way],
                    "steps": round(args.seconds / seconds[way]),
                }
                for way, job in every.items()
            },
            "runs": [],
        }
    jobs_of = {
        way: replace(job, steps=document["jobs"][way]["steps"]) for way, job in every.items()
    }
    one = partial(execute, document, RESULTS / f"{name}.json", jobs_of)
    one([(way, 0, rate) for way in jobs_of for rate in RATES])
    one([(way, seed, best_rate(document, way)) for way in jobs_of for seed in range(SEEDS)])
    columns = [(name, 1, ".4f") for name in FIGURES]
    print(listing(document["rows"], ("way", "batch_size", "steps"), columns))


def execute(
    document: Row, path: Path, every: dict[str, Job], wanted: list[tuple[str, int, float]]
) -> None:
    """Runs what the document lacks, one on each core."""
    done = {(one["way"], one["seed"], one["rate"]) for one in document["runs"]}
    with ProcessPoolExecutor(len(sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        going = [
            pool.submit(run, way, replace(every[way], seed=seed, learning_rate=rate))
            for way, seed, rate in dict.fromkeys(wanted)
            if (way, seed, rate) not in done
        ]
        for future in as_completed(going):
            document["runs"].append(future.result())
            document["rows"] = rows(document)
            write(path, document)


if __name__ == "__main__":
    main()
