import json
from types import SimpleNamespace

import pytest

from razorctl.ops.triton import tuning

WORK = (SimpleNamespace(device="a card"),)


def slow(x) -> None: ...


def quick(x) -> None: ...


WAYS = {"slow": slow, "quick": quick}


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """The ways that were timed; the file of choices is in `tmp_path`."""
    calls = []

    def milliseconds(way, work):
        calls.append(way)
        return 1.0 if way is quick else 2.0

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "_card", str)
    monkeypatch.setattr(tuning, "_file", lambda: tmp_path / "folder" / "kernels.json")
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: False)
    tuning._chosen.cache_clear()
    yield calls
    tuning._chosen.cache_clear()


def test_the_fastest_is_timed_once_and_kept(timed, tmp_path):
    assert [tuning.fastest(WAYS, WORK, "key") for _ in range(3)] == [quick] * 3
    assert timed == [slow, quick]
    assert tuning.fastest(WAYS, WORK, "other") is quick
    tuning._chosen.cache_clear()  # as a new process
    assert tuning.fastest(WAYS, WORK, "key") is quick
    assert len(timed) == 4
    kept = json.loads((tmp_path / "folder" / "kernels.json").read_text())
    assert kept == {"a card": {"key": "quick", "other": "quick"}}
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_a_choice_that_is_no_longer_offered_is_made_again(timed):
    tuning.fastest(WAYS, WORK, "key")
    assert tuning.fastest({"slow": slow, "third": slow}, WORK, "key") is slow


def test_nothing_is_timed_if_there_is_no_choice_or_while_a_graph_is_captured(timed, monkeypatch):
    assert tuning.fastest({"slow": slow}, WORK, "key") is slow
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.fastest(WAYS, WORK, "key") is slow
    assert not timed
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuning.fastest(WAYS, WORK, "key") is quick


@pytest.mark.parametrize("text", ["", "[]", "3", '{"a card": 3}', '{"a card": ["key"]}'])
def test_a_file_that_says_nothing_counts_as_empty(text, timed, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kernels.json").write_text(text)
    assert tuning.fastest(WAYS, WORK, "key") is quick
    assert json.loads((tmp_path / "folder" / "kernels.json").read_text())["a card"]


def test_a_file_that_cannot_be_written_is_done_without(timed, tmp_path):
    (tmp_path / "folder").write_text("no folder")
    assert tuning.fastest(WAYS, WORK, "key") is quick
    assert tuning.fastest(WAYS, WORK, "key") is quick
    assert len(timed) == 2


def test_ways_that_fail_are_not_chosen():
    def fails(x):
        raise RuntimeError("not on this card")

    assert tuning._milliseconds(fails, WORK) == float("inf")
