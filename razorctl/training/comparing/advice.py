"""Advice: the row of a comparison to take, and why."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from razorctl import units
from razorctl.config.tasks import LEAST

# Most that a score may be behind the best exact one: points of a share, percent of a perplexity.
POINTS, PERCENT = 0.5, 1.0
GAIN = 0.05  # least share of an exact method's time that an approximation must save

Row = Mapping[str, Any]


def take(
    rows: Sequence[Row], memory: str, metric: str | None, alike: bool
) -> dict[str, str | None]:
    """The `label` of the row to take, and `why`, without a period; None if no row can be chosen.

    Candidates have a score near the best exact row's, or a better one. The first of them at the
    target is taken; if no exact row reaches the target, the one of the fastest step; of equal ones
    the one of least memory. An exact row that is hardly slower is preferred.

    Args:
        rows: of a comparison.
        memory: the column by which memory is compared.
        metric: the figure of the scores.
        alike: whether the runs have the same device and settings, so that times can be compared.
    """
    done = [row for row in rows if row["score"] is not None]
    if all(row["time_to_target"] is None for row in done if row["exact"]):
        done = [{**row, "time_to_target": None} for row in done]
    exact = [row for row in done if row["exact"]]
    if not exact:
        return {"label": None, "why": "no exact method has a result; compare full too"}
    if not alike:
        return {
            "label": None,
            "why": "the runs differ in more than the method, so their times do not compare",
        }
    least = metric in LEAST
    best = (min if least else max)(exact, key=lambda row: row["score"])

    def order(row: Row) -> tuple[float, ...]:
        return _time_to(row), row["step_seconds"], row[memory]

    near = [row for row in done if _lost(row, best, least) <= (PERCENT if least else POINTS)]
    first = min(near, key=order)
    hardly_slower = [row for row in near if row["exact"] and not _clearly_faster(first, row)]
    chosen = min(hardly_slower, key=order, default=first)
    if chosen["exact"]:
        why = _why_exact(chosen, best, done, near, memory, least)
    else:
        full = next((row for row in exact if row["method"] == "full"), best)
        why = _why(chosen, full, memory, least)
    return {"label": chosen["label"], "why": why}


def sentence(advice: Mapping[str, str | None]) -> str:
    """The result of `take` as a sentence."""
    start = "No choice yet" if advice["label"] is None else f"Take {advice['label']}"
    return f"{start}: {advice['why']}."


def _time_to(row: Row) -> float:
    return inf if row["time_to_target"] is None else float(row["time_to_target"])


def _lost(row: Row, best: Row, least: bool) -> float:
    """By how much a score is worse than another: in points, or in percent if less is better."""
    if least:
        return round(100 * (float(row["score"]) / float(best["score"]) - 1), 9)
    return round(100 * (float(best["score"]) - float(row["score"])), 9)


def _clearly_faster(row: Row, other: Row) -> bool:
    """Whether a row takes GAIN less time than another: to the target if known, else for a step."""
    if row["time_to_target"] is None:
        return bool(row["step_seconds"] <= (1 - GAIN) * other["step_seconds"])
    return _time_to(row) <= (1 - GAIN) * _time_to(other)


def _why(row: Row, full: Row, memory: str, least: bool) -> str:
    """The reason for an approximation, compared with an exact row."""
    words = [
        f"{_behind(row, full, least)} {full['label']} {_seeds(row, full)}",
        f"{units.percent(row[memory] / full[memory])} of its memory",
        f"{row['step_seconds'] / full['step_seconds']:.2f}x its step time",
    ]
    if row["time_to_target"] and full["time_to_target"]:
        words.append(f"{_time_to(row) / _time_to(full):.2f}x its time to the target")
    return ", ".join(words)


def _why_exact(
    chosen: Row, best: Row, done: Sequence[Row], near: Sequence[Row], memory: str, least: bool
) -> str:
    """The reason for an exact row, compared with the approximations."""
    approximations = [row for row in done if not row["exact"]]
    if not approximations:
        last = "" if chosen["time_to_target"] is None else " to the target"
        return f"the fastest exact method{last} {_seeds(chosen)}"
    within = "1 %" if least else "half a point"
    candidates = [row for row in near if not row["exact"]]
    if not candidates:
        nearest = min(approximations, key=lambda row: _lost(row, best, least))
        return (
            f"no approximate method is within {within} of the exact ones "
            f"{_seeds(chosen, nearest)}; {nearest['label']} is nearest, "
            f"{_behind(nearest, best, least)} {best['label']}"
        )
    smallest = min(candidates, key=lambda row: row[memory])
    how = "faster" if chosen["time_to_target"] is None else "faster to the target"
    why = f"no approximate method within {within} is {units.percent(GAIN)} {how} "
    why += _seeds(chosen, smallest)
    if smallest[memory] < chosen[memory]:
        share = units.percent(smallest[memory] / chosen[memory])
        why += (
            f"; {smallest['label']} needs {share} of its memory and "
            f"{smallest['step_seconds'] / chosen['step_seconds']:.2f}x its step time"
        )
    return why


def _behind(row: Row, other: Row, least: bool) -> str:
    """Words that compare a score with another, such as "0.3 points below"."""
    lost = round(_lost(row, other, least), 1)
    if not lost:
        return "level with"
    if least:
        return f"{units.percent(abs(lost) / 100)} {'more' if lost > 0 else 'less'} perplexity than"
    return f"{abs(lost):.1f} points {'below' if lost > 0 else 'above'}"


def _seeds(*rows: Row) -> str:
    return f"({units.count(min(len(row['seeds']) for row in rows), 'seed')})"
