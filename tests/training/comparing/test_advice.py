"""The row of a comparison to take, by rows that nobody trained."""

from typing import Any

import pytest

from razorctl.training.comparing.advice import sentence, take

FULL: dict[str, Any] = {
    "label": "full",
    "method": "full",
    "exact": True,
    "score": 0.9,
    "saved_bytes": 1000,
    "step_seconds": 1.0,
    "time_to_target": None,
    "seeds": [0, 1],
}
CHECKPOINT = FULL | {
    "label": "checkpoint",
    "method": "checkpoint",
    "saved_bytes": 200,
    "step_seconds": 1.3,
}
RAZOR = FULL | {
    "label": "razor 0.9",
    "method": "razor",
    "exact": False,
    "score": 0.898,
    "saved_bytes": 120,
    "step_seconds": 0.71,
}
ONE = {"seeds": [0]}


def advised(*rows: dict[str, Any], metric: str = "accuracy", alike: bool = True) -> str:
    return sentence(take(rows, "saved_bytes", metric, alike))


def test_one_sentence_says_what_to_take_and_what_it_costs():
    assert advised(FULL, CHECKPOINT, RAZOR) == (
        "Take razor 0.9: 0.2 points below full (2 seeds), 12 % of its memory, 0.71x its step time."
    )
    assert advised(FULL, CHECKPOINT, RAZOR | {"score": 0.8949}) == (
        "Take full: no approximate method is within half a point of the exact ones (2 seeds); "
        "razor 0.9 is nearest, 0.5 points below full."
    )
    assert advised(FULL, RAZOR | {"step_seconds": 0.96}) == (
        "Take full: no approximate method within half a point is 5 % faster (2 seeds); razor 0.9 "
        "needs 12 % of its memory and 0.96x its step time."
    )


NO_EXACT = "No choice yet: no exact method has a result; compare full too."


@pytest.mark.parametrize(
    ("rows", "start", "part"),
    [
        ([FULL | ONE, RAZOR | ONE | {"score": 0.91}], "Take razor", "1.0 points above full (1 se"),
        ([FULL, RAZOR | {"saved_bytes": 1004}], "Take razor", " 100.4 % of its memory"),
        ([FULL, RAZOR | {"saved_bytes": 82}], "Take razor", " 8.2 % of its memory"),
        ([FULL, RAZOR | {"score": 0.895}], "Take razor", "0.5 points below"),  # half a point
        ([FULL, CHECKPOINT], "Take full", ": the fastest exact method (2 seeds)."),
        ([FULL, CHECKPOINT | {"step_seconds": 1.0}], "Take checkpoint", ""),  # of less memory
        ([FULL, RAZOR, RAZOR | {"label": "half", "saved_bytes": 500}], "Take razor", ""),
        ([RAZOR], NO_EXACT, ""),
        ([FULL | {"score": None, "seeds": []}, RAZOR], NO_EXACT, ""),
    ],
)
def test_by_the_time_of_a_step(rows, start, part):
    line = advised(*rows)
    assert line.startswith(start)
    assert part in line


def test_the_first_at_the_target_comes_before_the_fastest_step():
    slow = RAZOR | {"label": "int8", "step_seconds": 1.2, "time_to_target": 60.0}
    late = RAZOR | {"time_to_target": 90.0}
    full = FULL | {"time_to_target": 80.0}
    line = advised(full, late, slow)
    assert line.startswith("Take int8: 0.2 points below full (2 seeds)")
    assert line.endswith(", 1.20x its step time, 0.75x its time to the target.")
    assert advised(full, late) == (
        "Take full: no approximate method within half a point is 5 % faster to the target "
        "(2 seeds); razor 0.9 needs 12 % of its memory and 0.71x its step time."
    )
    assert advised(full | {"time_to_target": 63.0}, slow).startswith("Take full")
    assert advised(FULL, slow).startswith("Take full")  # which misses the target by chance


def test_of_perplexity_less_is_better():
    full, razor = FULL | {"score": 20.0}, RAZOR | {"score": 20.2}
    assert advised(full, razor, metric="perplexity").startswith(
        "Take razor 0.9: 1 % more perplexity than full (2 seeds)"
    )
    worse = advised(full, razor | {"score": 20.3}, metric="perplexity")
    assert worse.startswith("Take full: no approximate method is within 1 % of the exact ones")
    assert worse.endswith("razor 0.9 is nearest, 1.5 % more perplexity than full.")
    better = advised(full, razor | {"score": 15.0}, metric="perplexity")
    assert "25 % less perplexity than full" in better


def test_of_runs_that_differ_otherwise_there_is_none():
    assert take([FULL, RAZOR], "saved_bytes", "accuracy", False) == {
        "label": None,
        "why": "the runs differ in more than the method, so their times do not compare",
    }
