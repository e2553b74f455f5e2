"""The tags of the tokens of texts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from razorctl.models.transformers.tagging import words_of
from razorctl.step import autocast
from razorctl.training.predicting.inference import RowOfFile, check_finite

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

ROWS = 256  # rows that are tagged at once
Place = tuple[str, int | None]


@dataclass(frozen=True)
class Tagging(RowOfFile):
    """The tokens of a row, with the tag of each."""

    tokens: tuple[str, ...]
    tags: tuple[str, ...]


def predict_tags(trained: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Tagging]:
    """The tags of all tokens in the rows of files, in their order.

    Tokens that do not fit into the input of the model are tagged in a second input, without the
    tokens before them.
    """
    for part in parts:
        every = zip(part.places, part.data, strict=True)
        while rows := list(islice(every, ROWS)):
            places = [place for place, _ in rows]
            words = [words_of({name: [of] for name, of in row.items()})[0] for _, row in rows]
            every_tag = _tags(trained, places, words)
            for place, tokens, tags in zip(places, words, every_tag, strict=True):
                yield Tagging(*place, tuple(tokens), tuple(tags))


@torch.no_grad()
def _tags(
    trained: "Trained", places: Sequence[Place], words: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The tag of each word of each row; a word without pieces has the tag "O", or "" without it."""
    from datasets import Dataset

    blank = "O" if "O" in trained.classes else ""
    done: list[list[str]] = [[] for _ in words]
    while left := [row for row, of_row in enumerate(words) if len(done[row]) < len(of_row)]:
        rows = Dataset.from_dict({"tokens": [words[row][len(done[row]) :] for row in left]})
        numbers = iter(left)
        with trained.in_memory():
            for batch in trained.batches(rows, trained.transform):
                with autocast(trained.device, trained.job):
                    logits = trained.family.logits(trained.model, batch["inputs"])
                in_batch = [next(numbers) for _ in logits]
                check_finite(logits, [places[row] for row in in_batch])
                guesses, firsts = logits.argmax(-1).tolist(), batch["words"].tolist()
                for row, tags, numbered in zip(in_batch, guesses, firsts, strict=True):
                    pairs = zip(numbered, tags, strict=True)
                    tag_of = {word: trained.classes[tag] for word, tag in pairs if word != -1}
                    count = max(tag_of, default=0) + 1  # 1 for a word that has no piece or room
                    done[row] += [tag_of.get(word, blank) for word in range(count)]
    return done
