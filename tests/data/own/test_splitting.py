"""Rows that are held out for validation."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from razorctl.data.own.held_out import stratified


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.floats(0.01, 0.9),
    st.integers(0, 2**32 - 1),
)
def test_each_class_gives_its_share_and_keeps_a_row(labels, share, seed):
    found = stratified(np.array(labels), share, seed)
    assert list(found) == sorted(set(found))
    counts, taken = Counter(labels), Counter(labels[row] for row in found)
    for label, count in counts.items():
        assert taken[label] <= count - 1
        assert taken[label] <= int(share * count) + 1
        assert taken[label] > share * count - 1 or taken[label] == count - 1
    most = sum(min(int(share * n) + 1, n - 1) for n in counts.values())
    assert len(found) == min(max(1, round(share * len(labels))), most)


def test_a_tenth_of_a_thousand_rows():
    labels = np.repeat([0, 1, 2], [700, 200, 100])
    found = stratified(labels, 0.1, 3)
    assert np.bincount(labels[found]).tolist() == [70, 20, 10]
    assert (found == stratified(labels, 0.1, 3)).all()
    assert (found != stratified(labels, 0.1, 4)).any()
    assert np.ptp(found[:70]) > 500  # not the first or last rows of a class


@pytest.mark.parametrize("share", [0, 0.1])
def test_nothing_is_taken_of_no_share_or_of_single_rows(share):
    labels = np.arange(9) if share else np.zeros(9, int)
    assert len(stratified(labels, share, 0)) == 0
