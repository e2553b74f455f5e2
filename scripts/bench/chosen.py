"""Writes razorctl/rules/allocations.json: the rules for each ratio, of results/allocate.json.

.venv/bin/python scripts/bench/chosen.py
"""

from operator import itemgetter

from pages import Row, load
from record import write

from razorctl.rules.allocation import FILE

# Up to this squared relative error of a gradient fewer operations are worth more than less error.
ENOUGH = 0.01


def document() -> Row:
    """The choices of each family and width of activations, for rising ratios."""
    measured = load("allocate")
    return {
        **{part: measured[part] for part in ("command", "date", "versions", "models")},
        "choices": {
            family: {width: front(choices) for width, choices in of_width.items()}
            for family, of_width in measured["choices"].items()
        },
    }


def front(choices: list[Row]) -> list[Row]:
    """The choices for rising ratios, without those that a larger ratio's beats.

    So a smaller ratio never has more error, nor fewer bits of anything.
    """
    of_ratio = {choice["ratio"]: _lowest(choices, choice["ratio"]) for choice in choices}
    picks = list({pick["ratio"]: pick for pick in of_ratio.values()}.values())
    picks.sort(key=itemgetter("ratio"))
    return [c for i, c in enumerate(picks) if not any(_beats(other, c) for other in picks[i + 1 :])]


def _lowest(choices: list[Row], ratio: float) -> Row:
    """The choice of the lowest level among those that meet the ratio and have at most ENOUGH error.

    If none have, that of least error among those that meet the ratio.
    """
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


if __name__ == "__main__":
    write(FILE, document())
