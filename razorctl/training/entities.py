"""Entities in tags of tokens, counted as seqeval does: one is right if its ends and type are."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from razorctl.config.tasks import ENTITY_TAG, NO_LABEL

# Prefix of a tag -> position of the token in its entity. BILOU has L for E and U for S, BMES has M
# for I.
OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}


class EntityScores(Metric):
    """Precision, recall and F1 of entities, and the accuracy of tokens.

    Entities are counted as seqeval without a scheme (Nakayama, 2018) and conlleval do. An entity
    begins with B, or with the first token inside. It ends before another type, before a token
    outside, and before the begin of another entity. A tag without a prefix, except O, is inside.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, tags: Sequence[str]) -> None:
        """tags: the names of the classes."""
        super().__init__()
        stands, types = zip(*map(_described, tags), strict=True)
        names = sorted({*types})
        self.stands = torch.tensor(stands)
        self.types = torch.tensor([names.index(kind) for kind in types])
        # Entities: right, guessed, labeled. Tokens: right, all.
        self.add_state("counts", torch.zeros(5, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, guesses: Tensor, labels: Tensor) -> None:
        """guesses, labels: numbers of tags [rows, tokens]; tokens with NO_LABEL do not count."""
        counted = labels != NO_LABEL
        rows = counted.nonzero()[:, 0]
        guesses, labels = guesses[counted], labels[counted]
        guessed, labeled = self._entities(guesses, rows), self._entities(labels, rows)
        both = torch.unique(torch.cat([guessed, labeled]), dim=0)
        right = len(guessed) + len(labeled) - len(both)
        hits = int((guesses == labels).sum())
        numbers = [right, len(guessed), len(labeled), hits, len(labels)]
        self.counts += torch.tensor(numbers, device=self.counts.device)

    def compute(self) -> dict[str, Tensor]:
        right, guessed, labeled, hits, tokens = self.counts.double()
        return {
            "precision": right / guessed.clamp(min=1),
            "recall": right / labeled.clamp(min=1),
            "f1": 2 * right / (guessed + labeled).clamp(min=1),
            "accuracy": hits / tokens.clamp(min=1),
        }

    def _entities(self, tags: Tensor, rows: Tensor) -> Tensor:
        """The first and the last token and the type of each entity [entities, 3].

        tags, rows: the tag and the row of each token that counts.
        """
        stands, types = self.stands.to(tags.device)[tags], self.types.to(tags.device)[tags]
        inside = stands != OUTSIDE
        first = torch.ones_like(inside)  # whether a token inside an entity is its first
        first[1:] = (rows[1:] != rows[:-1]) | ~inside[:-1] | (types[1:] != types[:-1])
        first |= (stands == BEGIN) | (stands == SINGLE)
        first[1:] |= (stands[:-1] == END) | (stands[:-1] == SINGLE)
        begins = inside & first
        last = inside.clone()
        last[:-1] &= ~inside[1:] | first[1:]
        starts = begins.nonzero()[:, 0]
        return torch.stack([starts, last.nonzero()[:, 0], types[starts]], 1)


def _described(tag: str) -> tuple[int, str]:
    """The position of a token in its entity, and the type of the entity, by the token's tag."""
    if tag == "O":
        return OUTSIDE, ""
    match = ENTITY_TAG.fullmatch(tag)
    return (PREFIXES[match[1]], match[2]) if match else (INSIDE, tag)
