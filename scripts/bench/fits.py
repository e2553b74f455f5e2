"""Finds the largest batch of models that fits cards in one pass, by what `plan` predicts.

    .venv/bin/python scripts/bench/fits.py

Each is what `--batch-size auto` takes: with the model's default optimizer, of `full`, `checkpoint`,
and `razor` at the largest ratio that `plan` calls close. Where not even one example fits, STATES
are tried too. Batches above MOST are not counted. The script writes results/fits.json, where rows
of models that are not asked for stay. It measures nothing: every figure is predicted, on fake
tensors.
"""

import itertools
import json
import platform
import sys
from dataclasses import replace

from pages import Row
from record import head, options, write

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.memory import trace_cache as traces
from razorctl.methods import DEFAULT_METHOD, METHODS
from razorctl.planning import gpus
from razorctl.planning.batch import largest_batch
from razorctl.planning.gpus import Gpu
from razorctl.planning.search import Search
from razorctl.planning.states import State
from razorctl.rules.allocation import width

# All of them have bf16, so only their memory tells them apart.
GPUS = ("rtx-4060", "rtx-3060", "rtx-4080", "rtx-4090", "rtx-5090", "rtx-a6000")
MOST = 1024  # examples
# Model -> data set and input size, which for texts is the default number of tokens.
MODELS = {
    **dict.fromkeys(("dinov2-s", "vit-b16", "vit-l16"), ("cifar100", 224)),
    **dict.fromkeys(("swin-t", "convnext-t", "resnet50"), ("cifar100", 224)),
    "bert-base": ("sst2", 128),
    "vit-g14": ("cifar100", 224),
    **dict.fromkeys(("gpt2", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b"), ("wikitext2", 1024)),
    **dict.fromkeys(("qwen2.5-7b", "llama-3.1-8b"), ("wikitext2", 1024)),
}
STATES = {
    "lean": State("adamw8bit", "bf16", optimizer_in_backward=True),
    "host": State("adamw", "bf16", optimizer_state="host"),
}
FLAGS = {
    "lean": "--optimizer adamw8bit --weights bf16 --optimizer-in-backward",
    "host": "--optimizer adamw --weights bf16 --optimizer-state host",
}
LIBRARIES = ("torch", "timm", "transformers")


def fitting(job: Job, card: Gpu, recipe: Recipe, cache: traces.Cache) -> int | None:
    """The largest batch, up to MOST, that fits a card in one pass; None if not one example does."""
    budget = card.memory_bytes
    size = largest_batch(job, card, recipe, budget, most=MOST, cache=cache)
    search = Search(replace(job, batch_size=size), card, budget, recipe, cache)
    return size if search.needed_bytes(recipe) <= budget else None


def razor(job: Job, card: Gpu, cache: traces.Cache) -> Recipe:
    """The largest ratio at which the gradient of such models was measured to be close."""
    family = Search(job, card, card.memory_bytes, None, cache).family
    close = METHODS[DEFAULT_METHOD].close_up_to(family, width("bf16"))
    return Recipe(ratio=min(Job.max_ratio, close))


def row(job: Job, gpu: str, card: Gpu, cache: traces.Cache) -> Row:
    """The largest batches of a job on a card, None if nothing fits; and what needs STATES."""
    checkpoint = Recipe("full", activation_checkpointing=True)
    recipes = {"full": Recipe("full"), "checkpoint": checkpoint, "razor": razor(job, card, cache)}
    batches = {name: fitting(job, card, recipe, cache) for name, recipe in recipes.items()}
    needing: dict[str, list[str]] = {state: [] for state in STATES}
    for name, (state, of_job) in itertools.product(recipes, STATES.items()):
        if batches[name] is None:
            batches[name] = fitting(replace(job, **of_job._asdict()), card, recipes[name], cache)
            needing[state] += [name] if batches[name] else []
    settled = Search(job, card, card.memory_bytes, None, cache).job
    return {
        "model": job.model,
        "data": job.dataset,
        "input_size": job.input_size,
        "optimizer": settled.optimizer,
        "ratio": recipes["razor"].ratio,
        "gpu": gpu,
        "memory_gib": round(card.memory_bytes / 2**30, 2),
        **batches,
        **needing,
    }


def main() -> None:
    parser = options(__doc__, "fits")
    parser.add_argument("--gpus", nargs="+", default=GPUS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    cache = traces.Cache()
    document = head(f"none; traced on a CPU, {platform.machine()}", *LIBRARIES)
    document |= {"most": MOST, "ratio": Job.max_ratio, "flags": FLAGS}
    old = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows_of = {model: [row for row in old if row["model"] == model] for model in MODELS}
    for model in args.models:
        data, size = MODELS[model]
        job = Job(model, data, input_size=size, precision="bf16")
        rows_of[model] = []
        for gpu in args.gpus:
            rows_of[model].append(row(job, gpu, gpus.load(gpu), cache))
            print(rows_of[model][-1], flush=True)
        rows = [one for of_model in rows_of.values() for one in of_model]
        write(args.out, {**document, "rows": rows})


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(str(error))
