"""The steps of a budget of time."""

import json

import pytest

from razorctl.errors import UsageError
from razorctl.training.comparing import budget
from razorctl.training.comparing.budget import Cost


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2 m", 120)]
)
def test_seconds(text, seconds):
    assert budget.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-5m", "0s", "10 minutes", "1e3s", "5d", ""])
def test_what_is_no_time(text):
    with pytest.raises(UsageError, match=r"is no time; give one such as 90s, 10m or 1\.5h"):
        budget.parse_seconds(text)


def test_steps_fill_the_share_and_no_more():
    assert budget.steps_by_method({"full": Cost(3.0), "razor": Cost(0.7)}, 10.0, 4) == {
        "full": 3,
        "razor": 14,
    }
    assert budget.steps_by_method({"full": Cost(10.0)}, 10.0, 4) == {"full": 1}
    assert budget.steps_by_method({"full-compiled": Cost(0.7, compiling=7.0)}, 10.0, 4) == {
        "full-compiled": 4
    }


def test_a_share_below_a_step_names_the_least_that_works():
    with pytest.raises(UsageError, match="one step of each run; give --budget 13s or more"):
        budget.steps_by_method({"full": Cost(0.1, 3.0), "razor": Cost(0.7)}, 3.0, 4)


def test_a_step_is_timed_where_it_is_steady(tmp_path):
    seconds = (9.0, 8.0, 7.0, 1.0, 5.0, 2.0, 3.0, 1.0)
    lines = "".join(json.dumps({"seconds": each}) + "\n" for each in seconds)
    (tmp_path / "metrics.jsonl").write_text(lines)
    for payoff, compiling in ((None, 0), ({"compile_seconds": 6.5}, 6.5)):
        (tmp_path / "result.json").write_text(json.dumps({"payoff": payoff}))
        assert budget.probe_cost(tmp_path) == Cost(2.0, compiling)


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (9, 1), (25, 2), (1000, 100)])
def test_a_curve_has_enough_points(steps, every):
    assert budget.evaluate_every(steps) == every
