"""Kills training runs at random instants, resumes them, and compares the weights at the end.

    .venv/bin/python scripts/bench/crash.py

A run is a process that is forked from this one, so that libraries are imported once, and calls
`finetune(resume=True)` as `finetune --resume` does. It gets SIGKILL at a random instant of its
preparation, of its steps or of a save, and another one goes on, until the run is finished; then the
next run begins, until there were as many kills as asked for. The weights at the end of every run
must be those of one that nothing has killed, to the bit. The script writes results/crash.json, and
exits with 1 if a run fails or if any weight differs.
"""

import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import device_name
from record import head, options, write
from safetensors.torch import load_file

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.training.checkpoints import Checkpoints
from razorctl.training.run import finetune
from razorctl.training.rundir import RESULT

RECIPES = {
    "full": Recipe("full"),
    "razor": Recipe("razor"),
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", joint_budget=0.5),
}
JOB = Job("vit-micro", "digits", batch_size=8, steps=40, evaluate_every=20, save_every=2)
# What a process is doing, in memory that it shares with this one.
PREPARING, STEPPING, SAVING = range(3)
# A kill is aimed at one of these, as often as the first number says, and comes up to as many
# seconds as the second says after that has begun.
AIMS = {PREPARING: (1, 0.5), STEPPING: (4, 0.3), SAVING: (5, 0.06)}
LONGEST = 300.0  # seconds that nothing may take


class Phase:
    """A byte that a process and its children see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def get(self) -> int:
        return self._memory[0]

    def set(self, phase: int) -> None:
        self._memory[0] = phase


def watched(phase: Phase) -> None:
    """Makes saves of this process set the phase."""
    save = Checkpoints.save

    def saving(*args: Any) -> None:
        phase.set(SAVING)
        save(*args)
        phase.set(STEPPING)

    Checkpoints.save = saving  # type: ignore[method-assign, assignment]


def train(out: Path, job: Job, recipe: Recipe, phase: Phase) -> None:
    """Trains to the end in this process."""
    watched(phase)
    if (out / RESULT).exists():  # it was killed when nothing was left to do
        return
    run = finetune(job, recipe, out=out, device="cpu", resume=True)
    phase.set(STEPPING)
    for _ in run:
        pass


def forked(work: Callable[[], None]) -> int:
    """The id of a new process that does `work`."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(process: int) -> None:
    """Waits for a process; raises RuntimeError if it fails."""
    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise RuntimeError(f"a run ended with code {code}")


def kill(process: int, phase: Phase, draw: random.Random) -> int | None:
    """Kills a process at a random instant.

    Returns the phase it was in, None if it had ended before; raises RuntimeError if it failed.
    """
    (aim,) = draw.choices(list(AIMS), [weight for weight, _ in AIMS.values()])
    deadline, end = time.monotonic() + LONGEST, None
    while end is None or time.monotonic() < end:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            if code := os.waitstatus_to_exitcode(status):
                raise RuntimeError(f"a run ended with code {code}")
            return None
        if end is None and phase.get() == aim:
            end = time.monotonic() + draw.uniform(0, AIMS[aim][1])
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise RuntimeError("a run hangs")
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return phase.get()


def case(recipe: Recipe, job: Job, kills: int, draw: random.Random) -> dict[str, Any]:
    """Kills runs of a recipe so many times, and says what became of them."""
    killed, runs, equal, phase = Counter[int](), 0, True, Phase()
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference"
        finish(forked(partial(train, reference, job, recipe, phase)))
        weights = load_file(reference / "model.safetensors")
        while killed.total() < kills:
            out = Path(folder) / f"run-{runs}"
            at: int | None = PREPARING
            while at is not None:
                phase.set(PREPARING)
                process = forked(partial(train, out, job, recipe, phase))
                if killed.total() == kills:  # nothing is left but to finish
                    finish(process)
                    break
                at = kill(process, phase, draw)
                if at is not None:
                    killed[at] += 1
            runs += 1
            lines = (out / "metrics.jsonl").read_text().splitlines()
            equal &= [json.loads(line)["step"] for line in lines] == list(range(1, job.steps + 1))
            equal &= same(weights, load_file(out / "model.safetensors"))
    return {
        "kills": killed.total(),
        "kills_in_preparation": killed[PREPARING],
        "kills_in_a_save": killed[SAVING],
        "kills_between_saves": killed[STEPPING],
        "runs": runs,
        "bit_identical": equal,
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def main() -> None:
    parser = options(__doc__, "crash")
    parser.add_argument("--kills", type=int, default=50, help="for each method")
    parser.add_argument("--steps", type=int, default=JOB.steps)
    parser.add_argument("--methods", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # torch's threads do not survive a fork
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"}
        )
    draw, job = random.Random(args.seed), replace(JOB, steps=args.steps)
    document = {
        **head(device_name(), "torch"),
        "job": asdict(job),
        "steps": job.steps,
        "seed": args.seed,
        "cases": {},
    }
    for name in args.methods:
        document["cases"][name] = row = case(RECIPES[name], job, args.kills, draw)
        print(f"{name}: {row}", flush=True)
        write(args.out, document)
    if not all(row["bit_identical"] for row in document["cases"].values()):
        sys.exit("a run that was killed ended with other weights")


if __name__ == "__main__":
    main()
