"""Finds which bits `razor` gives to which layer kind; writes razorctl/rules/allocations.json.

    .venv/bin/python scripts/bench/allocate.py

The script starts from 8 bits everywhere and gives fewer bits to one layer kind at a time. It
measures what that adds to the squared relative error of the whole gradient, on each task of
gradients.py, and smooths it over the bits of a kind. It traces what that takes from the kept
bytes, on the models of these tasks and on large ones, in single and in half precision. Both figures
add up over layer kinds, so they are known for every combination. The combinations that no other
beats in both are written, the least error first. The error of a combination is that of the worst
task, and of two that are as bad on it the one that is better on all tasks comes first. The ratio is
the one that it meets on every model. The script needs the `bench` extra and takes ten minutes.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import transformers
from gradients import BATCH, TASKS, Subject, forward
from pretrained import CACHE
from record import head, options, write
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import razorctl.methods
from razorctl import Recipe, restore, sparsify
from razorctl.memory.saved import Forward, traced_bytes
from razorctl.methods import EXACT
from razorctl.ops import buckets

KINDS = ("linear", "conv", "norm", "channel-norm", "scale", "attention", "activation")
EIGHT, *FEWER = ("8-bit", "6-bit", "5-bit", "4-bit", "3-bit", "2-bit")
# Tiles of 128 rows take more bytes, which the widest activations are worth.
RULES = dict.fromkeys(KINDS, FEWER) | {
    "activation": [
        *FEWER,
        *(f"{bits}-blocks" for bits in FEWER),
        *(f"{bits}-bit-derivative" for bits in buckets.BITS),
    ]
}
EVEN = re.compile(r"([3-6])-bit(-blocks)?")  # rules of evenly spaced levels that clip nothing
BATCHES = 2
# How much the error of a task counts, if not in full. In 16 bits the ViT and the decoder would pay
# for the bits that the few linear copies of MobileNetV2 gain from.
WEIGHTS = {"mobilenet": 0.25}
PRECISIONS = {"wide": None, "narrow": torch.bfloat16}
OUT = Path(razorctl.__file__).parent / "rules" / "allocations.json"
TRIAL = "trial"


@dataclass(frozen=True)
class Footprint:
    """The bytes that a step of a model keeps.

    full: of method `full`. base: with 8 bits everywhere. less: by how much a rule of fewer bits
    lowers base.
    """

    full: int
    base: int
    less: Mapping[tuple[str, str], int]

    def ratio(self, rules: Mapping[str, str]) -> float:
        """The ratio of rules: the share of the bytes of `full` that a step does not keep."""
        return 1 - (self.base - sum(self.less.get(pair, 0) for pair in rules.items())) / self.full


def recipe(rules: Mapping[str, str]) -> Recipe:
    """A recipe of `razor` with rules of our own."""
    methods = razorctl.methods.METHODS
    fields = {k: v for k, v in vars(methods["int8"]).items() if k not in ("name", "rules", "int8")}
    methods[TRIAL] = razorctl.methods.Method(TRIAL, rules={**rules, **EXACT}, int8=True, **fields)
    return Recipe(TRIAL)


def fewer() -> list[tuple[str, str]]:
    """A layer kind and a rule of fewer bits, which it alone gets."""
    return [(kind, rule) for kind in KINDS for rule in RULES[kind]]


def with_recipe(model: nn.Module, rules: Mapping[str, str], action: Callable[[], Any]) -> Any:
    """Returns what `action` returns while the model is sparsified."""
    sparsify(model, recipe(rules))
    try:
        return action()
    finally:
        restore(model)


def footprint(
    model: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None
) -> Footprint:
    """The saved bytes of a model, traced. forward: as of `saved_bytes`."""

    def saved() -> int:
        return traced_bytes(model, inputs, autocast=autocast, forward=forward)

    base = dict.fromkeys(KINDS, EIGHT)
    eight = with_recipe(model, base, saved)
    less = {
        (kind, bits): eight - with_recipe(model, base | {kind: bits}, saved)
        for kind, bits in fewer()
    }
    return Footprint(saved(), eight, less)


def errors(subject: Subject, traced: Footprint) -> dict[tuple[str, str], float]:
    """The squared relative error of the whole gradient that fewer bits add.

    For no rule of fewer bits, it is the error of 8 bits everywhere. A rule that takes no bytes from
    what the model keeps, by its trace, is of a kind that the model lacks, and adds nothing.
    """
    exact = subject.gradients()["all"]

    def error() -> float:
        return ((subject.gradients()["all"] - exact).norm() / exact.norm()).item() ** 2

    base = dict.fromkeys(KINDS, EIGHT)
    eight = with_recipe(subject.model, base, error)
    added = {("", ""): eight}
    print(f"{subject.name} 8-bit: {eight:.2e}")
    for kind, bits in fewer():
        added[kind, bits] = 0.0
        if traced.less[kind, bits]:
            got = with_recipe(subject.model, base | {kind: bits}, error)
            added[kind, bits] = max(0.0, got - eight)
            print(f"{subject.name} {kind} {bits}: {added[kind, bits]:.2e}")
    return added


def smoothed(added: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Errors that obey the law of evenly spaced levels: c / (2^bits - 1)^2 for a layer kind.

    What few bits add is small beside the error that is there, and measured with its noise. c is
    the median over the bits of the kind.
    """
    smooth = dict(added)
    families: dict[tuple[str, str | None], dict[str, int]] = {}
    for kind, rule in added:
        if even := EVEN.fullmatch(rule):
            families.setdefault((kind, even[2]), {})[rule] = 2 ** int(even[1]) - 1
    for (kind, _), levels in families.items():
        c = median(added[kind, rule] * count**2 for rule, count in levels.items())
        smooth |= {(kind, rule): c / count**2 for rule, count in levels.items()}
    return smooth


def weighted(name: str, added: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Errors of a task, as they count."""
    return {rule: WEIGHTS.get(name, 1.0) * error for rule, error in added.items()}


def frontier(
    added: list[Mapping[tuple[str, str], float]], footprints: list[Footprint]
) -> list[dict[str, Any]]:
    """The combinations that no other beats in both ratio and error, of least error first.

    The last has the fewest bits everywhere.
    """
    choices: list[tuple[float, float, float, tuple[str, ...]]] = []
    for combination in itertools.product(*([EIGHT, *RULES[kind]] for kind in KINDS)):
        rules = dict(zip(KINDS, combination, strict=True))
        ratio = min(footprint.ratio(rules) for footprint in footprints)
        errors = [
            task["", ""] + sum(task[pair] for pair in rules.items() if pair in task)
            for task in added
        ]
        less = -math.floor(ratio * 1000) / 1000
        choices.append((max(errors), sum(errors), less, combination))
    fewest = next(choice for choice in choices if set(choice[-1]) == {FEWER[-1]})
    best: list[tuple[float, float, float, tuple[str, ...]]] = []
    for choice in sorted(choices):
        if not best or choice[2] < best[-1][2]:
            best.append(choice)
    best[-1] = fewest  # for models that keep more than the measured ones
    return [
        {
            "ratio": -less,
            "error": error,
            "rules": dict(zip(KINDS, combination, strict=True)) | {"dropout": "dense"},
        }
        for error, _, less, combination in best
    ]


def large_models() -> list[tuple[str, nn.Module, Any]]:
    """Models that are only traced."""
    with FakeTensorMode():
        images = torch.empty(128, 3, 224, 224)
        ids = torch.zeros(32, 128, dtype=torch.long)
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig())
    return [
        ("ViT-B/16, 224 px, batch 128", timm.create_model("vit_base_patch16_224"), images),
        ("BERT-base, 128 tokens, batch 32", bert, texts),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(out=OUT)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    steps = [(name, model, inputs, None) for name, model, inputs in large_models()]
    subjects = {
        name: Subject(task, task.load(args.cache)[0], args.cache, args.batches, BATCH)
        for name, task in TASKS.items()
    }
    steps += [
        (TASKS[name].summary, subject.model, subject.batches[0], forward)
        for name, subject in subjects.items()
    ]
    traced = {
        width: {name: footprint(*step, precision, run) for name, *step, run in steps}
        for width, precision in PRECISIONS.items()
    }
    added = {
        name: errors(subject, traced["wide"][TASKS[name].summary])
        for name, subject in subjects.items()
    }
    choices = {
        width: frontier(
            [weighted(name, smoothed(task)) for name, task in added.items()],
            list(footprints.values()),
        )
        for width, footprints in traced.items()
    }
    document = {
        **head(None, "torch"),
        "models": [name for name, *_ in steps],
        "errors": [
            {"task": name, **{" ".join(pair).strip() or "8-bit": e for pair, e in task.items()}}
            for name, task in added.items()
        ],
        "choices": choices,
    }
    write(args.out, document)
    for width, combinations in choices.items():
        for choice in combinations:
            rules = " ".join(f"{kind} {choice['rules'][kind]}" for kind in KINDS)
            print(f"{width} {choice['ratio']:.3f} {choice['error']:.2e} {rules}")


if __name__ == "__main__":
    main()
