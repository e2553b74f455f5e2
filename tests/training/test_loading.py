"""The threads of torch while rows are loaded."""

import pytest
import torch

from razorctl.training import loading
from razorctl.training.loading import Kept, Loader


class Counting:
    """Rows that are the number of threads of torch while they are read; the last one is bad."""

    def __len__(self):
        return 5

    def __getitem__(self, number):
        if number == 4:
            raise OSError("a disk is gone")
        return torch.get_num_threads()


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_rows_are_loaded_with_one_thread_and_all_else_has_its_own(three_threads):
    loaded = iter(Loader(Counting(), batch_size=2))
    for _ in range(2):
        assert next(loaded).tolist() == [1, 1]
        assert torch.get_num_threads() == 3
    with pytest.raises(OSError, match="a disk is gone"):
        next(loaded)
    assert torch.get_num_threads() == 3


def test_each_pass_reads_all_rows_again(three_threads):
    loader = Loader(range(5), batch_size=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
        assert torch.get_num_threads() == 3


class Made:
    """Rows that count how often they are made."""

    def __init__(self, inputs):
        self.inputs, self.made = inputs, []

    def __len__(self):
        return len(self.inputs)

    def __getitems__(self, numbers):
        self.made += numbers
        return [{"inputs": self.inputs[number], "labels": number} for number in numbers]


def test_images_are_made_once_as_far_as_there_is_room(monkeypatch):
    monkeypatch.setattr(loading, "ROOM", 2 * 12)
    rows = Made(torch.arange(9.0).view(3, 3))
    kept = Kept(rows)
    for numbers in ([0, 2], [2, 1, 0], [1, 2]):
        found = kept.__getitems__(numbers)
        assert [row["labels"] for row in found] == numbers
        assert torch.equal(torch.stack([row["inputs"] for row in found]), rows.inputs[numbers])
    assert rows.made == [0, 2, 1, 1]
    assert len(kept) == 3


def test_texts_are_made_anew():
    rows = Made([{"input_ids": torch.ones(4)}])
    kept = Kept(rows)
    for _ in range(2):
        kept.__getitems__([0])
    assert rows.made == [0, 0]
