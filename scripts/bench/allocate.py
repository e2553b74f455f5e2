"""Finds which bits `razor` gives to which layer kind: results/allocate.json, allocations.json.

    .venv/bin/python scripts/bench/allocate.py

The script starts from 8 bits everywhere and gives fewer bits to one layer kind at a time. It
measures what that adds to the squared relative error of the whole gradient, on each task of
gradients.py, and smooths it over the bits of a kind. It traces what that takes from the stored
bytes, on the models of these tasks and on large ones, in single and in half precision. Both figures
add up over layer kinds, so they are known for every combination. It does so at each of LEVELS,
which differ in what is recomputed in the backward pass. For each family of models the combinations
that no other beats in ratio, error and level are written. The error of a combination is that of the
worst task, and of two that are as bad on it the one that is better on all tasks is written. The
ratio is the one that it meets on every model but UNBOUNDED. The errors of tasks that are not asked
for are those of the file. Those combinations that `razor` has for each ratio go to
razorctl/rules/allocations.json; with --chosen nothing is measured, and this file alone is written.
The script needs the `bench` extra and takes half an hour.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
import transformers
from gradients import BATCH, TASKS, Subject, forward
from numpy.typing import NDArray
from pages import Row
from pretrained import CACHE, CONVOLUTIONAL
from record import head, options, write
from torch import nn

import razorctl.methods
from razorctl import Recipe, restore, sparsify
from razorctl.memory.fake_mode import TraceMode
from razorctl.memory.saved import Forward, traced_bytes
from razorctl.methods import CLOSE, EXACT, FAMILIES, Family
from razorctl.rules.allocation import FILE

# The layer kinds of each family of models; the rules of one do not depend on those of the other.
KINDS: dict[Family, tuple[str, ...]] = {
    "attention": ("linear", "patch", "norm", "scale", "attention", "activation"),
    "convolution": ("conv", "channel-norm"),
}
EIGHT, *FEWER = ("8-bit", "6-bit", "5-bit", "4-bit", "3-bit", "2-bit")
# Tiles of 128 rows take more bytes, which are worth it for the widest activations, and for those
# that others are made again from.
BLOCKS = [f"{bits}-blocks" for bits in FEWER]
RULES = dict.fromkeys(itertools.chain(*KINDS.values()), FEWER) | {
    kind: [*FEWER, *BLOCKS] for kind in ("norm", "activation")
}
BASE = dict.fromkeys(RULES, EIGHT)
# The layer kinds whose activations are made again where they can be; a level takes more operations
# than those before it.
LEVELS: tuple[tuple[str, ...], ...] = (
    (),
    ("linear",),  # attention, which runs again anyway
    ("linear", "activation"),
    ("linear", "activation", "attention"),
    ("linear", "activation", "attention", "norm", "scale"),
)
EVEN = re.compile(r"([2-6])-bit(-blocks)?")  # rules of fewer bits
BATCHES = 2
UNBOUNDED = ("decoder",)  # its ratio does not count: the head of so small a model keeps 2 %
PRECISIONS = {"wide": None, "narrow": torch.bfloat16}
TRIAL = "trial"
# Up to this squared relative error of a gradient fewer operations are worth more than less error.
ENOUGH = 0.01
Grid = NDArray[np.float64]  # a figure of every combination, with an axis for each layer kind
Errors = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Footprint:
    """The bytes that a step of a model keeps at a level.

    full: of method `full`. base: with 8 bits everywhere. less: by how much a rule of fewer bits
    lowers base.
    """

    full: int
    base: int
    less: Mapping[tuple[str, str], float]

    def ratios(self, kinds: tuple[str, ...]) -> Grid:
        """The ratio of every combination: the share of the bytes of `full` that is not kept."""
        return 1 - (self.base - sums(self.less, kinds)) / self.full


def sums(of_rule: Mapping[tuple[str, str], float], kinds: tuple[str, ...]) -> Grid:
    """The sums over layer kinds of a figure of their rules, for every combination."""
    total: Grid = np.zeros((1,) * len(kinds))
    for axis, kind in enumerate(kinds):
        shape = [-1 if axis == other else 1 for other in range(len(kinds))]
        each = [of_rule.get((kind, rule), 0.0) for rule in (EIGHT, *RULES[kind])]
        total = total + np.array(each).reshape(shape)
    return total


def at(level: tuple[str, ...], rules: Mapping[str, str]) -> dict[str, str]:
    """The rules, with those of a level making their activations again."""
    return {kind: f"{rule}-again" if kind in level else rule for kind, rule in rules.items()}


def with_rules(model: nn.Module, rules: Mapping[str, str], action: Callable[[], Any]) -> Any:
    """Returns what `action` returns while the model is sparsified, with rules of our own."""
    methods = razorctl.methods.METHODS
    fields = {k: v for k, v in vars(methods["int8"]).items() if k not in ("name", "rules", "int8")}
    methods[TRIAL] = razorctl.methods.Method(TRIAL, rules={**rules, **EXACT}, int8=True, **fields)
    sparsify(model, Recipe(TRIAL))
    try:
        return action()
    finally:
        restore(model)


def footprints(
    model: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None
) -> list[Footprint]:
    """The kept bytes of a model at each level, traced. forward: as of `saved_bytes`."""

    trace = partial(traced_bytes, model, inputs, autocast=autocast, forward=forward)

    def kept(level: tuple[str, ...], **rules: str) -> int:
        every: int = with_rules(model, at(level, BASE | rules), trace)
        return every

    full = trace()
    levels: list[Footprint] = []
    for level in LEVELS:
        base = kept(level)
        if levels and base == levels[-1].base:  # nothing more is made again
            levels.append(levels[-1])
            continue
        less: dict[tuple[str, str], float] = {}
        for kind in RULES:
            for rule in RULES[kind]:
                if rule[0] in "26":
                    less[kind, rule] = base - kept(level, **{kind: rule})
            for bits in (5, 4, 3):  # bytes are linear in bits
                for tile in ("", "-blocks"):
                    if f"{bits}-bit{tile}" in RULES[kind]:
                        six, two = (less[kind, f"{end}-bit{tile}"] for end in (6, 2))
                        less[kind, f"{bits}-bit{tile}"] = two + (six - two) * (bits - 2) / 4
        levels.append(Footprint(full, base, less))
    return levels


def errors(subject: Subject, traced: list[Footprint]) -> list[dict[tuple[str, str], float]]:
    """The squared relative error of the whole gradient that fewer bits add at each level.

    For no rule of fewer bits, it is the error of 8 bits everywhere. A rule that takes no bytes from
    what the model keeps, by its trace, is of a kind that the model lacks, and adds nothing.
    """
    exact = subject.gradients()["all"]

    def error() -> float:
        return ((subject.gradients()["all"] - exact).norm() / exact.norm()).item() ** 2

    levels: list[dict[tuple[str, str], float]] = []
    for number, (level, footprint) in enumerate(zip(LEVELS, traced, strict=True)):
        if number and footprint is traced[number - 1]:
            levels.append(levels[-1])
            continue
        eight = with_rules(subject.model, at(level, BASE), error)
        added = {("", ""): eight}
        print(f"{subject.name} level {number} 8-bit: {eight:.2e}", flush=True)
        for kind in RULES:
            for rule in RULES[kind]:
                added[kind, rule] = 0.0
                if footprint.less[kind, rule]:
                    rules = at(level, BASE | {kind: rule})
                    added[kind, rule] = max(0.0, with_rules(subject.model, rules, error) - eight)
                    words = f"{subject.name} level {number} {kind} {rule}"
                    print(f"{words}: {added[kind, rule]:.2e}", flush=True)
        levels.append(added)
    return levels


def smoothed(added: Errors) -> dict[tuple[str, str], float]:
    """Errors that obey the law of evenly spaced levels: c / (2^bits - 1)^2 for a layer kind.

    What few bits add is small beside the error that is there, and measured with its noise. c is
    the median over the bits of the kind. Two bits are as measured.
    """
    smooth = dict(added)
    families: dict[tuple[str, str | None], dict[str, int]] = {}
    for kind, rule in added:
        even = EVEN.fullmatch(rule)
        if even and even[1] != "2":
            families.setdefault((kind, even[2]), {})[rule] = 2 ** int(even[1]) - 1
    for (kind, _), levels in families.items():
        c = median(added[kind, rule] * count**2 for rule, count in levels.items())
        smooth |= {(kind, rule): c / count**2 for rule, count in levels.items()}
    return smooth


@dataclass(frozen=True)
class Choice:
    """A combination of rules, by layer kind, with its ratio at a level.

    error: of the worst task. total: the sum of the errors of all tasks.
    """

    ratio: float
    error: float
    total: float
    level: int
    rules: Mapping[str, str]

    def beats(self, other: "Choice") -> bool:
        """Whether it is no worse in anything, and not the same."""
        closer = self.error <= other.error and self.total <= other.total
        return self != other and closer and self.ratio >= other.ratio and self.level <= other.level


def front_of_level(
    number: int,
    kinds: tuple[str, ...],
    added: Mapping[str, list[Errors]],
    traced: Mapping[str, list[Footprint]],
) -> list[Choice]:
    """The combinations that no other of the level beats, of least error first."""
    bounding = [levels[number] for name, levels in traced.items() if name not in UNBOUNDED]
    ratio = reduce(np.minimum, [footprint.ratios(kinds) for footprint in bounding])
    ratio = np.floor(ratio * 1000 + 1e-6) / 1000
    errors = [sums(task[number], kinds) + task[number]["", ""] for task in added.values()]
    worst, total = reduce(np.maximum, errors), reduce(np.add, errors)
    front: list[Choice] = []

    def choice(place: tuple[Any, ...], rules: Mapping[str, str]) -> Choice:
        figures = (float(figure[place]) for figure in (ratio, worst, total))
        return Choice(*figures, number, rules)

    for index in np.lexsort((-ratio.ravel(), total.ravel(), worst.ravel())):
        place = np.unravel_index(index, ratio.shape)
        if not front or ratio[place] > front[-1].ratio:
            names = [(EIGHT, *RULES[kind])[i] for kind, i in zip(kinds, place, strict=True)]
            rules = dict(zip(kinds, names, strict=True))
            front.append(choice(place, rules))
    # The last is for models that keep more than these.
    fewest = dict.fromkeys(kinds, FEWER[-1])
    place = tuple((EIGHT, *RULES[kind]).index(rule) for kind, rule in fewest.items())
    front[-1] = choice(place, fewest)
    return front


def frontier(
    family: Family, added: Mapping[str, list[Errors]], traced: Mapping[str, list[Footprint]]
) -> list[Choice]:
    """The combinations that no other beats in ratio, error and level, of least error first.

    added, traced: the errors of the task of each model, and its bytes, at each level.
    """
    kinds = KINDS[family]
    levels = LEVELS if family == "attention" else LEVELS[:1]
    every = [front_of_level(number, kinds, added, traced) for number in range(len(levels))]
    choices: list[Choice] = []
    for choice in sorted(itertools.chain(*every), key=lambda c: (c.error, c.total, c.level)):
        if any(other.beats(choice) for other in itertools.chain(*every)):
            continue
        level = levels[choice.level]
        # In models unlike these it is packed as where nothing is made again, as far as that is
        # close: a cosine c is a squared error of about 2 (1 - c).
        close = [c for c in every[0] if c.error <= 2 * (1 - CLOSE)] or every[0]
        packed = next((c for c in close if c.ratio >= choice.ratio), close[-1])
        rest = {kind: packed.rules[kind] for kind in unused(choice.level, traced)}
        choices.append(replace(choice, rules=at(level, {**choice.rules, **rest})))
    return choices


def unused(number: int, traced: Mapping[str, list[Footprint]]) -> list[str]:
    """The layer kinds that a level makes again wherever they are in these models."""
    prints, fewest = [levels[number] for levels in traced.values()], FEWER[-1]
    return [k for k in LEVELS[number] if all(f.less[k, fewest] < 1e-3 * f.full for f in prints)]


def of_family(name: str) -> Family:
    """The family of a model."""
    return "convolution" if name in CONVOLUTIONAL else "attention"


def large_models() -> list[tuple[str, nn.Module, Any]]:
    """Models that are only traced."""
    with TraceMode():
        images = torch.empty(128, 3, 224, 224)
        ids = torch.zeros(32, 128, dtype=torch.long)
        texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig())
    vit = "ViT-B/16, 224 px, batch 128", timm.create_model("vit_base_patch16_224"), images
    return [vit, ("BERT-base, 128 tokens, batch 32", bert, texts)]


def read(file: Path) -> dict[str, list[dict[tuple[str, str], float]]]:
    """The errors of each task in a file that `main` wrote, at each level."""
    rows = json.loads(file.read_text())["errors"] if file.exists() else []

    def pairs(one: dict[str, float]) -> Any:
        return {("", "") if n == EIGHT else tuple(n.split()): e for n, e in one.items()}

    return {row["task"]: list(map(pairs, row["levels"])) for row in rows}


def allocations(measured: Row) -> Row:
    """The document of allocations.json: choices of each family and width, for rising ratios."""
    return {
        **{part: measured[part] for part in ("command", "date", "versions", "models")},
        "choices": {
            family: {width: chosen(choices) for width, choices in of_width.items()}
            for family, of_width in measured["choices"].items()
        },
    }


def chosen(choices: list[Row]) -> list[Row]:
    """The choices for rising ratios, without those that a larger ratio's beats.

    So a smaller ratio never has more error, nor fewer bits of anything.
    """
    of_ratio = {choice["ratio"]: _lowest(choices, choice["ratio"]) for choice in choices}
    picks = list({pick["ratio"]: pick for pick in of_ratio.values()}.values())
    picks.sort(key=itemgetter("ratio"))
    return [c for i, c in enumerate(picks) if not any(_beats(other, c) for other in picks[i + 1 :])]


def _lowest(choices: list[Row], ratio: float) -> Row:
    """The choice of the lowest level that meets the ratio with error ENOUGH, or the closest."""
    meeting = [choice for choice in choices if choice["ratio"] >= ratio]
    close = [choice for choice in meeting if choice["error"] <= ENOUGH]
    level = min((choice["level"] for choice in close), default=None)
    alike = [choice for choice in close if choice["level"] == level] or meeting
    return min(alike, key=itemgetter("error", "total"))


def _beats(other: Row, choice: Row) -> bool:
    """Whether a choice that keeps fewer bytes has less error, or is close and has more bits.

    The errors are those of few models, on some of which fewer bits cost nothing.
    """
    return other["error"] < choice["error"] or (finer(other, choice) and other["error"] <= ENOUGH)


def finer(other: Row, choice: Row) -> bool:
    """Whether a choice has more bits of some layer kind, and fewer of none."""
    pairs = [(bits, _bits(choice)[kind]) for kind, bits in _bits(other).items()]
    return all(more >= less for more, less in pairs) and any(more > less for more, less in pairs)


def _bits(choice: Row) -> dict[str, int]:
    """The bits of each layer kind; what is made again of norms has theirs."""
    rules: dict[str, str] = choice["rules"]
    again = {kind for kind, rule in rules.items() if rule.endswith("again")} - {"norm"}
    return {kind: int(rules["norm" if kind in again else kind][0]) for kind in rules}


def main() -> None:
    parser = options(__doc__, "allocate")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--chosen", action="store_true", help="only write allocations.json again")
    args = parser.parse_args()
    if args.chosen:
        write(FILE, allocations(json.loads(args.out.read_text())))
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    steps = [(name, model, inputs, None) for name, model, inputs in large_models()]
    size = args.batches, BATCH
    subjects = {n: Subject(t, t.load(args.cache), args.cache, *size) for n, t in TASKS.items()}
    steps += [(n, each.model, each.batches[0], forward) for n, each in subjects.items()]
    traced = {
        width: {name: footprints(*step, precision, run) for name, *step, run in steps}
        for width, precision in PRECISIONS.items()
    }
    new = {name: errors(subjects[name], traced["wide"][name]) for name in args.tasks}
    added = read(args.out) | new
    smooth = {name: [smoothed(one) for one in levels] for name, levels in added.items()}

    def flat(of_rule: Errors) -> dict[str, float]:
        return {" ".join(pair).strip() or EIGHT: error for pair, error in of_rule.items()}

    def own(of_name: dict[str, Any], family: Family) -> dict[str, Any]:
        return {name: each for name, each in of_name.items() if of_family(name) == family}

    choices = {
        f: {width: frontier(f, own(smooth, f), own(models, f)) for width, models in traced.items()}
        for f in FAMILIES
    }
    document = {
        **head(None, "torch"),
        "models": [TASKS[name].summary if name in TASKS else name for name, *_ in steps],
        "levels": LEVELS,
        "errors": [
            {"task": name, "levels": [flat(one) for one in levels]}
            for name, levels in added.items()
        ],
        "choices": {
            family: {width: list(map(asdict, front)) for width, front in fronts.items()}
            for family, fronts in choices.items()
        },
    }
    write(args.out, document)
    write(FILE, allocations(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
