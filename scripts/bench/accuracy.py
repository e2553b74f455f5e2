"""Fine-tunes the tasks of files.py with every method: the accuracy, and the time to reach full's.

    .venv/bin/python scripts/bench/accuracy.py [--device cuda] [--precision bf16] [--tasks TASK ...]

Each run is one of `training.run.finetune`, from reading files to the test at the end. Seed 0 is run
with each learning rate of its task, the others with the one whose mean loss on the validation split
is the least, until that one has all seeds. On a CPU as many runs go on at once as the process has
cores, each on one of them. Last, steps of all methods but STATES take turns, each on all cores, for
the time of a step. Results are in results/accuracy-TASK-DEVICE-DATE.json; a call goes on where an
earlier one with the same settings was interrupted. With --precision bf16 runs are under autocast,
as GPUs train, and their results in results/accuracy-TASK-bf16-DEVICE-DATE.json. Then, and with
--known-rates, each case has the learning rate that earlier results in fp32 found for it or its
method, if there are any. It needs the `bench` extra, and one to three minutes of a core for each
run.
"""

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import transformers
from files import TASKS, Task
from pages import RESULTS, Row, listing
from pretrained import CACHE
from record import device_name, on_a_device, versions, write

from razorctl import Job, Recipe, data
from razorctl.config.job import Precision
from razorctl.config.tasks import LEAST
from razorctl.errors import RazorError
from razorctl.memory.job_forward import JobForward
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training.comparing.figures import TARGET
from razorctl.training.profiler import CLASSES, TimedTraining
from razorctl.training.run import finetune

RATIO = 0.9
CASES = {
    "full": Recipe("full"),
    "lora": Recipe("lora"),
    "backrazor": Recipe("backrazor", RATIO),
    "prebackrazor-": Recipe("prebackrazor-", RATIO),
    "prebackrazor++": Recipe("prebackrazor++", RATIO),
    "razor": Recipe("razor", RATIO),
    "razor, branches 0.5": Recipe("razor", RATIO, joint_budget=0.5, joint="branches"),
    "razor at 0.97": Recipe("razor", 0.97),
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "razor, joint budget 0.5": Recipe("razor", RATIO, joint_budget=0.5),
    "razor, int8 forward": Recipe("razor", RATIO, int8_forward=True),
}
CORE = list(CASES)[:7]  # those that run if no others are named
NARROW = {"weights": "bf16"}
STATES: dict[str, dict[str, Any]] = {  # what a job changes of weights and optimizer state
    "full, 8-bit state": {"optimizer": "adamw8bit"},
    "full, bf16 weights": NARROW,
    "full, update in backward": {"optimizer_in_backward": True},
    "full, state on the host": {"optimizer_state": "host"},
    "razor at 0.97, bf16 weights, state on the host": NARROW | {"optimizer_state": "host"},
    "razor at 0.97, bf16 weights, 8-bit state, update in backward": {
        **NARROW,
        "optimizer": "adamw8bit",
        "optimizer_in_backward": True,
    },
}
CASES |= {case: CASES[case.partition(", ")[0]] for case in STATES}
# Settings that each run or machine has, or no task here.
OWN = ("model", "dataset", "learning_rate", "seed", "temperature", "schedule")
LOSS_EVERY = 10  # steps between two losses that are kept
TURNS, WARM_UP = 15, 2
COLUMNS = (  # that are printed
    *(("learning_rate", 1, "g"), ("accuracy_mean", 1, ".4f"), ("accuracy_std", 1, ".4f")),
    *(("delta_vs_full", 1, "+.4f"), ("step_time_vs_full", 1, ".2f")),
    ("time_to_target_vs_full", 1, ".2f"),
)


@dataclass(frozen=True)
class Wanted:
    """A run."""

    task: str
    case: str
    seed: int
    rate: float


def job_of(task: Task, precision: Precision, cache: Path) -> Job:
    folders = {"model": str(task.model(cache)), "dataset": str(task.data(cache))}
    return replace(task.job, precision=precision, **folders)


def run(wanted: Wanted, precision: Precision, device: str, cache: Path, threads: int) -> Row:
    """Fine-tunes from files to the result; a row of `runs`."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    job = job_of(TASKS[wanted.task], precision, cache)
    settings = {"seed": wanted.seed, "learning_rate": wanted.rate}
    job = replace(job, **settings, **STATES.get(wanted.case, {}))
    recipe = replace(CASES[wanted.case], seed=wanted.seed)
    row: Row = asdict(wanted)
    with tempfile.TemporaryDirectory() as out:
        try:
            going = finetune(job, recipe, out=Path(out) / "run", device=device)
            losses = [step.loss for step in going]
            result = going.result()
        except RazorError as error:
            return row | {"error": str(error)}
    metric = result["metric"]
    curve = [(s.step, s.metrics[metric]) for s in going.history if s.metrics is not None]
    keys = ("metric", "steps", "saved_bytes", "full_saved_bytes", "peak_bytes")
    return row | {
        **{key: result[key] for key in keys},
        "score": result["metrics"][metric],
        "loss": going.history[-1].test_loss,
        "curve": curve,
        "losses": [round(loss, 5) for loss in losses[::LOSS_EVERY]],
        "error": None,
    }


def best_rate(runs: Iterable[Row], case: str) -> float:
    """The rate with the least loss on the validation split, in the mean of the seeds it has."""
    losses: dict[float, list[float]] = {}
    for row in (row for row in runs if row["case"] == case):
        finite = row["error"] is None and math.isfinite(row["loss"])
        losses.setdefault(row["rate"], []).append(row["loss"] if finite else math.inf)
    return min(losses, key=lambda rate: fmean(losses[rate]))


def time_steps(
    name: str, cases: Mapping[str, Recipe], precision: Precision, device: str, cache: Path
) -> Iterator[Row]:
    """The step of each case in seconds and in that of `full`, medians over turns."""
    place = torch.device(device)
    job = job_of(TASKS[name], precision, cache)
    family, _ = data.pair(job)
    job = job.resolved(family.defaults, sys.maxsize)
    trainings: dict[str, TimedTraining] = {}
    for case, recipe in cases.items():
        model = family.build(CLASSES, job.input_size).to(place)  # for its labels
        whole = JobForward(family, job)
        sparsify_within(model, recipe, whole.inputs(model, place), **whole.options)
        trainings[case] = TimedTraining(family, model, job, place)
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(WARM_UP + TURNS):
        for case, training in trainings.items():
            seconds[case].append(training.step()["step"])
    for case, taken in seconds.items():
        ratios = [a / b for a, b in zip(taken, seconds["full"], strict=True)]
        yield {
            "case": case,
            "step_seconds": median(taken[WARM_UP:]),
            "step_time_vs_full": median(ratios[WARM_UP:]),
        }


def reached(curve: list[tuple[int, float]], target: float, least: bool) -> int | None:
    """The step from which on a curve stays at or above a target; None if it ends below it."""
    step = None
    for at, value in curve:
        good = value <= target if least else value >= target
        step = (step or at) if good else None
    return step


def mean_curve(runs: list[Row]) -> list[tuple[int, float]]:
    """The mean over the seeds of each evaluation."""
    steps = [step for step, _ in runs[0]["curve"]]
    return [(step, fmean(run["curve"][i][1] for run in runs)) for i, step in enumerate(steps)]


def rows(name: str, document: Row) -> list[Row]:
    """A row for each case whose seeds are all run, or which cannot run; none before `full`."""
    times = {row["case"]: row for row in document["times"]}
    found: dict[str, list[Row]] = {}
    refused: dict[str, str] = {}
    for case in document["cases"]:
        every = [run for run in document["runs"] if run["case"] == case]
        runs = [run for run in every if run["rate"] == best_rate(every, case)]
        if errors := [run["error"] for run in runs if run["error"]]:
            refused[case] = errors[0]
        elif len(runs) == TASKS[name].seeds:
            found[case] = runs
    if "full" not in found:
        return []
    least = found["full"][0]["metric"] in LEAST
    best = (min if least else max)(value for _, value in mean_curve(found["full"]))
    target = best / TARGET if least else best * TARGET
    model, _, dataset = TASKS[name].summary.partition(", ")
    lines = []
    for case in [case for case in document["cases"] if case in found or case in refused]:
        recipe = asdict(CASES[case])
        settings = {key: recipe[key] for key in ("method", "ratio", "joint_budget", "attention")}
        line = {"task": name, "model": model, "dataset": dataset, "case": case, **settings}
        line |= {"state": STATES[case]} if case in STATES else {}
        if runs := found.get(case, []):
            line |= figures(runs, times.get(case, {}), reached(mean_curve(runs), target, least))
        lines.append(line | {"error": refused.get(case)})
    full = next(line for line in lines if line["case"] == "full")
    for line in (line for line in lines if not line["error"]):
        line["delta_vs_full"] = line["accuracy_mean"] - full["accuracy_mean"]
        pairs = [(r["steps_to_target"], r["step_time_vs_full"]) for r in (line, full)]
        ours, base = (steps and time and steps * time for steps, time in pairs)
        line["time_to_target_vs_full"] = ours / base if ours and base else None
    return lines


def figures(runs: list[Row], time: Row, steps: int | None) -> Row:
    """The figures of a row; steps: to the target."""
    keys = ("steps", "metric", "saved_bytes", "full_saved_bytes", "peak_bytes")
    return {
        "learning_rate": runs[0]["rate"],
        "seeds": [run["seed"] for run in runs],
        **{key: runs[0][key] for key in keys},
        "accuracy_mean": fmean(run["score"] for run in runs),
        "accuracy_std": stdev(run["score"] for run in runs),
        "step_seconds": time.get("step_seconds"),
        "step_time_vs_full": time.get("step_time_vs_full"),
        "steps_to_target": steps,
    }


def described(name: str, precision: Precision, device: str, cache: Path) -> Row:
    """The settings of a task that all its runs share, defaults among them."""
    job = job_of(TASKS[name], precision, cache)
    family, source = data.pair(job)
    settled = asdict(job.resolved(family.defaults, source.train_examples))
    settings = {k: v for k, v in settled.items() if k not in OWN and v not in (None, "", False)}
    task = TASKS[name]
    whole = {"job": settings, "rates": task.rates, "seeds": task.seeds, "target": TARGET}
    about = {"device": device_name(device), "versions": versions("torch", "timm", "transformers")}
    return {**about, "summary": task.summary, "settings": whole}


class Results:
    """The results of a task in their file, which is written after each run."""

    def __init__(
        self,
        name: str,
        precision: Precision,
        device: str,
        cache: Path,
        cases: Iterable[str],
        known: bool,
    ) -> None:
        self.name = name
        common = json.loads(json.dumps(described(name, precision, device, cache)))
        stem = f"accuracy-{name}{'' if precision == 'fp32' else f'-{precision}'}-{device}"
        paths = sorted(RESULTS.glob(f"{stem}-*.json"))
        self.path = RESULTS / f"{stem}-{date.today().isoformat()}.json"
        self.document: Row = {"runs": [], "times": [], "cases": []}
        for path in paths:
            document = json.loads(path.read_text())
            if {key: document[key] for key in common} == common:
                self.path, self.document = path, document
        every = {*self.document["cases"], *cases}
        ordered = [case for case in CASES if case in every]
        command = ["scripts/bench/accuracy.py", "--device", device, "--tasks", name]
        command += ["--known-rates"] * known if precision == "fp32" else ["--precision", precision]
        of_state = ["--states"] if ordered == ["full", *STATES] else ["--cases", *ordered]
        command += [] if ordered == CORE else of_state
        self.document |= {"command": shlex.join(command), **common, "cases": ordered}

    def left(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """The runs that the file lacks."""
        done = {(r["case"], r["seed"], r["rate"]) for r in self.document["runs"]}
        return [one for one in wanted if (one.case, one.seed, one.rate) not in done]

    def write(self) -> None:
        self.document["date"] = date.today().isoformat()
        self.document["rows"] = rows(self.name, self.document)
        write(self.path, self.document)


def found_rates(name: str, case: str, known: bool, device: str) -> tuple[float, ...]:
    """The learning rates to try for a case: all of the task, or the one last found in fp32."""
    if known:
        for path in sorted(RESULTS.glob(f"accuracy-{name}-{device}-*.json"), reverse=True):
            rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
            for other in (case, CASES[case].method):
                if other in rows and not rows[other]["error"]:
                    return (rows[other]["learning_rate"],)
    return TASKS[name].rates


def execute(
    wanted: list[Wanted], results: Results, precision: Precision, device: str, cache: Path
) -> None:
    """Runs, on a CPU one for each core at once."""
    workers = len(os.sched_getaffinity(0)) if device == "cpu" else 1
    threads = 1 if device == "cpu" else torch.get_num_threads()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        one = partial(run, precision=precision, device=device, cache=cache, threads=threads)
        for future in as_completed([pool.submit(one, each) for each in wanted]):
            row = future.result()
            results.document["runs"].append(row)
            results.write()
            value = row["error"] or f"{row['metric']} {row['score']:.4f}"
            print(f"{row['task']} {row['case']} seed {row['seed']} lr {row['rate']:g}: {value}")


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = on_a_device(argparse.ArgumentParser(description=__doc__, formatter_class=form))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=CORE)
    states = {"action": "store_const", "const": ["full", *STATES], "dest": "cases"}
    parser.add_argument("--states", help="the cases of weights and optimizer state", **states)
    parser.add_argument("--known-rates", action="store_true", help="those of earlier results")
    parser.add_argument("--no-times", action="store_true", help="the machine is not idle")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    cases, where = args.cases, (args.precision, args.device)
    known = args.known_rates or args.precision != "fp32"
    for name in args.tasks:
        # Writes the files too, before processes want them.
        results = Results(name, *where, args.cache, cases, known)
        rates = {case: found_rates(name, case, known, args.device) for case in cases}
        trials = [Wanted(name, case, 0, rate) for case in cases for rate in rates[case]]
        execute(results.left(trials), results, *where, args.cache)
        results.write()
        while True:  # what the other seeds say of a rate can make another one the best
            runs = [
                Wanted(name, case, seed, best_rate(results.document["runs"], case))
                for seed in range(TASKS[name].seeds)
                for case in cases
            ]
            if not (left := results.left(runs)):
                break
            execute(left, results, *where, args.cache)
        ran = [row["case"] for row in results.document["rows"] if not row["error"]]
        done = {case: CASES[case] for case in ran if case not in STATES}
        timed = {row["case"] for row in results.document["times"]}
        if not args.no_times and not timed.issuperset(done):
            results.document["times"] = list(time_steps(name, done, *where, args.cache))
            results.write()
        print(listing(results.document["rows"], ("case", "error"), COLUMNS))


if __name__ == "__main__":
    main()
