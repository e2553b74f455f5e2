"""Advice: the row of a comparison to take, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

from razorctl import units
from razorctl.config.tasks import LEAST

# Most that a score may be behind the best exact one: points of a share, percent of a perplexity.
POINTS, PERCENT = 0.5, 1.0
GAIN = 0.05  # least share of time or memory by which rows differ

Row = Mapping[str, Any]
Advice = dict[str, str | None]


def take(
    rows: Sequence[Row], memory: str, metric: str | None, alike: bool, budget: int | None = None
) -> Advice:
    """The `label` of the row to take, and `why`, without a period; None if no row can be chosen.

    Candidates fit the budget, and their score is near the best exact row's, or a better one. The
    first of them at the target is taken; if no exact row reaches the target, the one of the fastest
    step. Of rows that are at most GAIN slower, approximate ones whose score ties with the best
    exact one are as good as exact ones, and exact ones are better than others. The one of least
    memory is taken, and of about the same memory the one of least loss. If only rows of worse
    scores fit, the one of the best score is taken.

    Args:
        rows: of a comparison.
        memory: the column by which memory is compared.
        metric: the figure of the scores.
        alike: whether the runs have the same device and settings, so that times can be compared.
        budget: bytes that a row must fit; None if there is no limit.
    """
    done = [row for row in rows if row["score"] is not None]
    if all(row["time_to_target"] is None for row in done if row["exact"]):
        done = [{**row, "time_to_target": None} for row in done]
    exact = [row for row in done if row["exact"]]
    fitting = done if budget is None else [row for row in done if row["fits"]]
    if budget is not None and done and not fitting:
        return nothing_fits(done, budget)
    if not exact:
        return {"label": None, "why": "no exact method has a result; compare full too"}
    if not alike:
        return {
            "label": None,
            "why": "the runs differ in more than the method, so their times do not compare",
        }
    best = (min if metric in LEAST else max)(exact, key=lambda row: row["score"])
    chosen, why = _Judge(memory, metric or "score", best).choice(fitting)
    misfits = [row["label"] for row in done if row["fits"] is False]
    if budget is not None and misfits:
        verb = "does" if len(misfits) == 1 else "do"
        why += f"; {' and '.join(misfits)} {verb} not fit {units.size(budget)}"
    return {"label": chosen["label"], "why": why}


def nothing_fits(rows: Sequence[Row], budget: int) -> Advice:
    """The advice if no row fits a budget in bytes, or if the peaks are not known."""
    known = [row for row in rows if row["needed_bytes"] is not None]
    if not known:
        return {"label": None, "why": "the peaks are not known"}
    least = min(known, key=lambda row: row["needed_bytes"])
    needs = f"{least['label']} needs the least, {units.size(least['needed_bytes'], ceil)}"
    return {"label": None, "why": f"no method fits {units.size(budget)}; {needs}"}


def sentence(advice: Mapping[str, str | None]) -> str:
    """The result of `take` as a sentence."""
    start = "No choice yet" if advice["label"] is None else f"Take {advice['label']}"
    return f"{start}: {advice['why']}."


@dataclass(frozen=True)
class _Judge:
    """Compares rows by the column `memory`, by `metric`, and with the exact row of the best score.

    Scores tie if they differ by at most the spread of the seeds of that row.
    """

    memory: str
    metric: str
    best: Row

    def choice(self, rows: Sequence[Row]) -> tuple[Row, str]:
        """The row to take of those that fit, and why."""
        most = PERCENT if self.least else POINTS
        near = [row for row in rows if self.lost(row) <= most or self.level(row)]
        if not near:
            chosen = min(rows, key=lambda row: (self.lost(row), self.order(row)))
            return chosen, f"the best score that fits; {self.beside(chosen, self.best)}"
        first = min(near, key=self.order)
        even = [
            row
            for row in near
            if (row["exact"] or self.level(row)) and not _clearly_faster(first, row)
        ]
        chosen = self.smallest(even) if even else first
        if not chosen["exact"]:
            return chosen, self.why(chosen, self.rival(rows))
        if first["exact"] and first is not chosen:
            return chosen, self.why(chosen, first)
        return chosen, self.why_exact(chosen, rows, near, fastest=chosen is first)

    @property
    def least(self) -> bool:
        """Whether a lower score is better."""
        return self.metric in LEAST

    def lost(self, row: Row, other: Row | None = None) -> float:
        """Points by which a score is worse than another or the best; percent if less is better."""
        score, best = float(row["score"]), float((other or self.best)["score"])
        return round(100 * (score / best - 1 if self.least else best - score), 9)

    def level(self, row: Row, other: Row | None = None) -> bool:
        """Whether a score is worse than another or the best by no more than the known noise."""
        other, spread = other or self.best, self.best["score_std"]
        if spread is None or min(len(row["seeds"]), len(other["seeds"])) < 2:
            return False
        behind = (row["score"] - other["score"]) * (1 if self.least else -1)
        return bool(round(behind - spread, 12) <= 0)

    def ties(self, row: Row, other: Row) -> bool:
        """Whether the scores of two rows differ by no more than the noise."""
        return self.level(row, other) and self.level(other, row)

    def order(self, row: Row) -> tuple[float, ...]:
        """A sort key: the first at the target, the fastest step, the least memory."""
        return _time_to(row), row["step_seconds"], row[self.memory]

    def smallest(self, rows: Sequence[Row]) -> Row:
        """The row of least memory; of about the same, the one of least loss, then an exact one."""
        most = min(row[self.memory] for row in rows) / (1 - GAIN)
        small = [row for row in rows if row[self.memory] <= most]
        return min(small, key=lambda row: (_loss(row), not row["exact"], self.order(row)))

    def rival(self, rows: Sequence[Row]) -> Row:
        """The exact row that a choice is compared with: full, or the fastest, if one fits."""
        exact = [row for row in rows if row["exact"]]
        fastest = min(exact, key=self.order, default=self.best)
        return next((row for row in exact if row["method"] == "full"), fastest)

    def why(self, row: Row, other: Row) -> str:
        """The reason for a row, compared with another one."""
        name = row["label"]
        mine, others = row[self.memory], other[self.memory]
        words = [f"{'as much' if mine == others else units.against(mine, others)} memory"]
        words.append(f"{row['step_seconds'] / other['step_seconds']:.2f}x the step time")
        if row["time_to_target"] and other["time_to_target"]:
            words.append(f"{_time_to(row) / _time_to(other):.2f}x the time to the target")
        why = f"{self.beside(row, other)}; {name} needs {', '.join(words)}"
        if self.ties(row, other) and abs(mine / others - 1) <= GAIN and _loss(row) < _loss(other):
            why += f"; its loss is {_loss(row):.4f}, and {_loss(other):.4f} by {other['label']}"
        return why

    def why_exact(
        self, chosen: Row, rows: Sequence[Row], near: Sequence[Row], fastest: bool
    ) -> str:
        """The reason for an exact row, which may be the fastest, beside the approximate ones."""
        approximations = [row for row in rows if not row["exact"]]
        last = "" if chosen["time_to_target"] is None else " to the target"
        if not approximations:
            return f"the fastest exact method{last} {_seeds(chosen)}"
        within = "1 %" if self.least else "half a point"
        candidates = [row for row in near if not row["exact"]]
        if not candidates:
            nearest = min(approximations, key=self.lost)
            return (
                f"no approximate method is within {within} of the exact ones; "
                f"{self.beside(nearest, self.best)}"
            )
        smallest = min(candidates, key=lambda row: row[self.memory])
        why = f"no approximate method within {within} is {units.percent(GAIN)} faster{last}"
        if fastest and self.ties(smallest, chosen):
            why = f"it is the fastest{last}"
        less = smallest[self.memory] < chosen[self.memory]
        compared = self.why(smallest, chosen) if less else self.beside(smallest, chosen)
        return f"{why}; {compared}"

    def beside(self, row: Row, other: Row) -> str:
        """Words that compare scores: "a is 0.3 points below b (2 seeds)", or that they tie."""
        one, two, lost = row["label"], other["label"], round(self.lost(row, other), 1)
        if self.ties(row, other):
            return f"{one} and {two} tie in {self.metric.replace('_', ' ')} {_seeds(row, other)}"
        words = f"is {abs(lost):.1f} points {'below' if lost > 0 else 'above'}"
        if self.least:
            more = "more" if lost > 0 else "less"
            words = f"has {units.percent(abs(lost) / 100)} {more} {self.metric} than"
        return f"{one} {words if lost else 'is level with'} {two} {_seeds(row, other)}"


def _time_to(row: Row) -> float:
    return inf if row["time_to_target"] is None else float(row["time_to_target"])


def _loss(row: Row) -> float:
    return inf if row["loss"] is None else float(row["loss"])


def _clearly_faster(row: Row, other: Row) -> bool:
    """Whether a row takes GAIN less time than another: to the target if known, else for a step."""
    if row["time_to_target"] is None:
        return bool(row["step_seconds"] <= (1 - GAIN) * other["step_seconds"])
    return _time_to(row) <= (1 - GAIN) * _time_to(other)


def _seeds(*rows: Row) -> str:
    return f"({units.count(min(len(row['seeds']) for row in rows), 'seed')})"
