"""The scores of entities, against some counted by hand after seqeval's rules."""

import pytest
import torch

from razorctl.config.tasks import NO_LABEL
from razorctl.training.entities import EntityScores

TAGS = ("O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "ART")
# Labels, guesses -> entities in both, guessed and labeled; `/` begins another row.
CASES = {
    "right": ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", (2, 2, 2)),
    "an end too soon": ("B-PER I-PER O", "B-PER O O", (0, 1, 1)),
    "another type": ("B-PER O", "B-LOC O", (0, 1, 1)),
    "no beginning": ("B-PER I-PER", "I-PER I-PER", (1, 1, 1)),
    "a type within": ("B-PER I-LOC", "B-PER I-PER", (0, 1, 2)),
    "two in a row": ("B-PER B-PER I-PER", "B-PER I-PER I-PER", (0, 1, 2)),
    "ends": ("B-PER E-PER I-PER", "B-PER I-PER I-PER", (0, 1, 2)),
    "single": ("S-PER I-PER", "B-PER B-PER", (2, 2, 2)),
    "rows end entities": ("B-PER / I-PER", "B-PER / I-PER", (2, 2, 2)),
    "an entity over two rows": ("B-PER / I-PER", "B-PER / O", (1, 1, 2)),
    "without prefixes": ("ART ART O", "ART O O", (0, 1, 1)),
    "nothing": ("O O", "O O", (0, 0, 0)),
    "nothing guessed": ("B-PER O", "O O", (0, 0, 1)),
}


def numbers(text: str) -> torch.Tensor:
    """Tags [rows, tokens], with pieces between them that do not count."""
    rows = [[TAGS.index(tag) for tag in row.split()] for row in text.split("/")]
    longest = max(map(len, rows))
    padded = [[*row, *[NO_LABEL] * (longest - len(row))] for row in rows]
    spaced = torch.full((len(rows), 2 * longest + 1), NO_LABEL)
    spaced[:, 1::2] = torch.tensor(padded)
    return spaced


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    labels, guesses, (right, guessed, labeled) = CASES[case]
    labels = numbers(labels)
    scores = EntityScores(TAGS)
    guessed_tags = numbers(guesses)
    pieces = guessed_tags == NO_LABEL
    scores.update(torch.where(pieces, TAGS.index("B-LOC"), guessed_tags), labels)
    found = {name: value.item() for name, value in scores.compute().items()}
    assert found["precision"] == (right / guessed if guessed else 0)
    assert found["recall"] == (right / labeled if labeled else 0)
    assert found["f1"] == pytest.approx(2 * right / (guessed + labeled) if labeled else 0)
    counts = labels != NO_LABEL
    want = (numbers(guesses)[counts] == labels[counts]).float().mean().item()
    assert found["accuracy"] == pytest.approx(want)
