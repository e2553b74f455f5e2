import json
from types import SimpleNamespace

import pytest
import torch
from triton.errors import TritonError

from razorctl.ops import kernels
from razorctl.ops.triton import tuning

WORK = (SimpleNamespace(device=torch.device("cpu")),)


def slow(x) -> None: ...


def quick(x) -> None: ...


WAYS = {"slow": slow, "quick": quick}


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """The ways that are timed; the file of choices is in `tmp_path`."""
    calls = []

    def milliseconds(way, work):
        calls.append(way)
        way(*work)
        return 1.0 if way is quick else 2.0

    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(tuning, "_card", lambda device: "a card")
    monkeypatch.setattr(tuning, "_file", lambda: tmp_path / "folder" / "kernels.json")
    monkeypatch.setattr(tuning.torch.cuda, "is_current_stream_capturing", lambda: False)
    tuning._chosen.cache_clear()
    yield calls
    tuning._chosen.cache_clear()
    tuning._short.clear()
    tuning._uncompiled.clear()
    kernels._failed_ways.clear()


def test_the_fastest_is_timed_once_and_kept(timed, tmp_path):
    assert [tuning.fastest(WAYS, WORK, "key") for _ in range(3)] == [quick] * 3
    assert timed == [slow, quick]
    assert tuning.fastest(WAYS, WORK, "other") is quick
    tuning._chosen.cache_clear()  # as a new process
    assert tuning.fastest(WAYS, WORK, "key") is quick
    assert len(timed) == 4
    choices = json.loads((tmp_path / "folder" / "kernels.json").read_text())
    assert choices == {"a card": {"key": "quick", "other": "quick"}}
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


def failing(error):
    def fails(x):
        raise error

    return fails


SHORT = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", SHORT)
def test_nothing_is_kept_while_memory_is_too_short_for_a_way(error, timed, tmp_path):
    ways = {"quick": failing(error), "slow": slow}
    for _ in range(tuning.TRIES):
        assert tuning.fastest(ways, WORK, "key") is slow
    assert tuning.fastest(WAYS, WORK, "key") is slow  # this process goes on with it
    assert len(timed) == 2 * tuning.TRIES
    assert not kernels.failures()
    tuning._chosen.cache_clear()  # as a new process
    assert tuning.fastest(WAYS, WORK, "key") is quick


def test_memory_that_sufficed_later_leaves_a_choice(timed):
    assert tuning.fastest({"quick": failing(SHORT[0]), "slow": slow}, WORK, "key") is slow
    assert tuning.fastest(WAYS, WORK, "key") is quick


def test_ways_that_fail_are_named_and_not_chosen(timed, tmp_path):
    ways = {"quick": failing(TritonError("not in\nthis release")), "slow": slow}
    for key in ("gemm 8x8", "gemm 8x8", "gemm 16x8"):
        assert tuning.fastest(ways, WORK, key) is slow
    assert kernels.failures() == {("gemm by quick", "cuda"): "TritonError: not in\nthis release"}
    assert not kernels.replaced()
    assert timed == [ways["quick"], slow, slow]
    ways["quick"] = failing(RuntimeError("not for these sizes"))
    tuning._uncompiled.clear()
    assert [tuning.fastest(ways, WORK, key) for key in ("gemm 4x4", "gemm 2x2")] == [slow, slow]
    assert tuning.fastest(WAYS, WORK, "gemm 6x6") is quick
    choices = json.loads((tmp_path / "folder" / "kernels.json").read_text())
    assert choices == {"a card": {"gemm 6x6": "quick"}}  # the next process reports failures too


@pytest.mark.parametrize("error", [ValueError("no way"), SHORT[0]])
def test_nothing_is_kept_if_every_way_fails(error, timed, tmp_path):
    ways = {"slow": failing(ValueError("no way")), "quick": failing(error)}
    for _ in range(2):
        with pytest.raises(type(error)):
            tuning.fastest(ways, WORK, "key")
    assert len(timed) == 4
    assert not (tmp_path / "folder").exists()


def test_a_card_that_runs_nothing_more_ends_the_timing(timed):
    dead = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        tuning.fastest({"quick": failing(dead), "slow": slow}, WORK, "key")
    assert len(timed) == 1
    assert not kernels.failures()


class Card:
    """A card and the clock of its host; a launch takes the host some cycles. Times are cycles."""

    def __init__(self, launch):
        self.launch, self.now, self.done = launch, 0, 0

    def run(self, cycles):
        self.now += self.launch
        self.done = max(self.now, self.done) + cycles

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.card.run(0)
        self.at = self.card.done

    def query(self):
        return self.card.now >= self.at

    def synchronize(self):
        self.card.now = max(self.card.now, self.at)

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize(("launch", "gaps"), [(1_000, False), (500_000, False), (2e6, True)])
def test_launching_takes_no_part_of_the_time(launch, gaps, monkeypatch):
    """The exception is launching that takes longer than the longest wait."""
    card = Card(launch)
    monkeypatch.setattr(tuning.torch.cuda, "_sleep", card.run, raising=False)
    monkeypatch.setattr(tuning.torch.cuda, "Event", card.event)

    def way(x):
        for _ in range(10):
            card.run(20_000)

    assert (tuning._milliseconds(way, WORK) > 200_000) == gaps
