"""The tags that a tagger gives to the tokens of texts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from razorctl.models.transformers.tagging import words_of
from razorctl.step import autocast
from razorctl.training.predicting.inference import check_finite

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

ROWS = 256  # that are tagged before the first of them is given
Place = tuple[str, int | None]


@dataclass(frozen=True)
class Tagging:
    """The tokens of a row of a file, with the tag of each."""

    file: str
    row: int | None
    tokens: tuple[str, ...]
    tags: tuple[str, ...]


def predict_tags(trained: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Tagging]:
    """The tags for the rows of files, in their order: for all tokens, also of long texts.

    Tokens that do not fit into the model's input are tagged after those before them, without these.
    """
    for part in parts:
        every = zip(part.places, part.data, strict=True)
        while rows := list(islice(every, ROWS)):
            places = [place for place, _ in rows]
            words = [words_of({name: [of] for name, of in row.items()})[0] for _, row in rows]
            for place, own, tags in zip(places, words, _tags(trained, places, words), strict=True):
                yield Tagging(*place, tuple(own), tuple(tags))


@torch.no_grad()
def _tags(
    trained: "Trained", places: Sequence[Place], words: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The tag of each word of each row; one without pieces has that of tokens outside, or none."""
    from datasets import Dataset

    blank = "O" if "O" in trained.classes else ""
    done: list[list[str]] = [[] for _ in words]
    while left := [row for row, own in enumerate(words) if len(done[row]) < len(own)]:
        rows = Dataset.from_dict({"tokens": [words[row][len(done[row]) :] for row in left]})
        numbers = iter(left)
        with trained.in_memory():
            for batch in trained.batches(rows, trained.transform):
                with autocast(trained.device, trained.job):
                    logits = trained.family.logits(trained.model, batch["inputs"])
                own_rows = [next(numbers) for _ in logits]
                check_finite(logits, [places[row] for row in own_rows])
                guesses = logits.argmax(-1).tolist()
                for row, tags, firsts in zip(
                    own_rows, guesses, batch["words"].tolist(), strict=True
                ):
                    found = {w: trained.classes[tag] for w, tag in zip(firsts, tags, strict=True)}
                    found.pop(-1, None)
                    # A word alone that does not fit, or has no piece, is left as it is.
                    count = max(found, default=0) + 1
                    done[row] += [found.get(word, blank) for word in range(count)]
    return done
