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
    "score_std": 0.001,
    "loss": 0.4,
    "needed_bytes": 1200,
    "fits": None,
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
ONE = {"seeds": [0], "score_std": None}


def advised(*rows: dict[str, Any], metric: str = "accuracy", budget: int | None = None) -> str:
    return sentence(take(rows, "saved_bytes", metric, True, budget))


def test_one_sentence_says_what_to_take_and_what_it_costs():
    assert advised(FULL, CHECKPOINT, RAZOR) == (
        "Take razor 0.9: razor 0.9 is 0.2 points below full (2 seeds); razor 0.9 needs 88 % less "
        "memory, 0.71x the step time."
    )
    assert advised(FULL, CHECKPOINT, RAZOR | {"score": 0.8949}) == (
        "Take full: no approximate method is within half a point of the exact ones; "
        "razor 0.9 is 0.5 points below full (2 seeds)."
    )
    assert advised(FULL, RAZOR | {"step_seconds": 0.96}) == (
        "Take full: no approximate method within half a point is 5 % faster; razor 0.9 is 0.2 "
        "points below full (2 seeds); razor 0.9 needs 88 % less memory, 0.96x the step time."
    )


NO_EXACT = "No choice yet: no exact method has a result; compare full too."


@pytest.mark.parametrize(
    ("rows", "start", "part"),
    [
        ([FULL | ONE, RAZOR | ONE | {"score": 0.91}], "Take razor", "1.0 points above full (1 se"),
        ([FULL, RAZOR | {"saved_bytes": 1004}], "Take razor", " needs 0.4 % more memory, 0.71x"),
        ([FULL, RAZOR | {"saved_bytes": 82}], "Take razor", " needs 91.8 % less memory, "),
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
    assert line.startswith("Take int8: int8 is 0.2 points below full (2 seeds)")
    assert line.endswith(", 1.20x the step time, 0.75x the time to the target.")
    assert advised(full, late) == (
        "Take full: no approximate method within half a point is 5 % faster to the target; "
        "razor 0.9 is 0.2 points below full (2 seeds); razor 0.9 needs 88 % less memory, 0.71x the "
        "step time, 1.12x the time to the target."
    )
    assert advised(full | {"time_to_target": 63.0}, slow).startswith("Take full")
    assert advised(FULL, slow).startswith("Take full")  # which misses the target by chance


def test_of_perplexity_less_is_better():
    full, razor = FULL | {"score": 20.0}, RAZOR | {"score": 20.2}
    assert advised(full, razor, metric="perplexity").startswith(
        "Take razor 0.9: razor 0.9 has 1 % more perplexity than full (2 seeds)"
    )
    worse = advised(full, razor | {"score": 20.3}, metric="perplexity")
    assert worse.startswith("Take full: no approximate method is within 1 % of the exact ones")
    assert worse.endswith("razor 0.9 has 1.5 % more perplexity than full (2 seeds).")
    better = advised(full, razor | {"score": 15.0}, metric="perplexity")
    assert "25 % less perplexity than full" in better


def test_of_runs_that_differ_otherwise_there_is_none():
    assert take([FULL, RAZOR], "saved_bytes", "accuracy", False) == {
        "label": None,
        "why": "the runs differ in more than the method, so their times do not compare",
    }


TIED = RAZOR | {"score": 0.8992, "step_seconds": 1.0}


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([FULL, TIED], "Take razor"),  # of less memory, as fast
        ([FULL, TIED | {"score": 0.8988}], "Take full"),  # by more than the spread of full
        ([FULL, TIED | {"score": 0.8988, "score_std": 0.01}], "Take full"),
        ([FULL | {"score_std": 0.02}, TIED | {"score": 0.881}], "Take razor"),
        ([FULL | ONE, TIED | ONE], "Take full"),  # of one seed the spread is not known
        ([FULL, TIED | {"step_seconds": 1.06}], "Take full"),
        ([FULL, TIED | {"saved_bytes": 960}], "Take full"),  # about the same memory, and loss
        ([FULL, TIED | {"saved_bytes": 960, "loss": 0.39}], "Take razor"),
        ([FULL, TIED | {"saved_bytes": 1040, "loss": 0.39}], "Take razor"),
        ([FULL, CHECKPOINT | {"step_seconds": 1.04}], "Take checkpoint"),
    ],
)
def test_scores_that_tie_are_as_good_and_memory_then_loss_decides(rows, start):
    assert advised(*rows).startswith(start)


def test_a_tie_is_named():
    assert advised(CHECKPOINT, TIED | {"step_seconds": 1.3}) == (
        "Take razor 0.9: razor 0.9 and checkpoint tie in accuracy (2 seeds); razor 0.9 needs 40 % "
        "less memory, 1.00x the step time."
    )
    assert advised(FULL, TIED | {"saved_bytes": 960, "loss": 0.39}).endswith(
        "needs 4 % less memory, 1.00x the step time; its loss is 0.3900, and 0.4000 by full."
    )
    assert advised(FULL, TIED | {"step_seconds": 1.2}) == (
        "Take full: it is the fastest; razor 0.9 and full tie in accuracy (2 seeds); razor 0.9 "
        "needs 88 % less memory, 1.20x the step time."
    )


LARGE = FULL | {"fits": False, "needed_bytes": 3 << 30}
FITS = {"fits": True, "needed_bytes": 1 << 30}


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            [LARGE, CHECKPOINT | FITS, TIED | FITS],
            "Take razor 0.9: razor 0.9 and checkpoint tie in accuracy (2 seeds); razor 0.9 needs "
            "40 % less memory, 0.77x the step time; full does not fit 2.0 GiB.",
        ),
        (
            [LARGE, CHECKPOINT | FITS, TIED | {"fits": False}],
            "Take checkpoint: the fastest exact method (2 seeds); full and razor 0.9 do not fit "
            "2.0 GiB.",
        ),
        (
            [LARGE, RAZOR | FITS | {"score": 0.8}, RAZOR | FITS | {"label": "b", "score": 0.85}],
            "Take b: the best score that fits; b is 5.0 points below full (2 seeds); full does not "
            "fit 2.0 GiB.",
        ),
        ([LARGE, CHECKPOINT | FITS, TIED], "Take checkpoint: the fastest exact method (2 seeds);"),
        (
            [LARGE, CHECKPOINT | {"fits": False, "needed_bytes": (2 << 30) + 1}],
            "No choice yet: no method fits 2.0 GiB; checkpoint needs the least, 2.1 GiB.",
        ),
        ([TIED | {"fits": False}], "No choice yet: no method fits 2.0 GiB; razor 0.9 needs"),
    ],
)
def test_only_what_fits_is_taken(rows, line):
    assert advised(*rows, budget=2 << 30).startswith(line)
