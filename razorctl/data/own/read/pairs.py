"""Recognizes the texts of embeddings: pairs, triplets with negatives, and pairs with scores."""

import re
from collections.abc import Sequence

from razorctl.data.own.raw import NEGATIVE, TEXT_COLUMNS
from razorctl.data.own.read.column import Column
from razorctl.data.own.read.table import LABELS, PAIRS, SCORES, Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.errors import UsageError

# Names of the first and of the second text, as sentence-transformers, MTEB and MS MARCO call them.
FIRST = ("anchor", "query", "question", "title")
SECOND = ("positive", "pos", "passage", "document", "answer", "context", "body", "text")
NEGATIVES = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?")
SURE = ("positive", "pos")  # second texts that no other task has


def columns_of(table: Table) -> TableColumns | None:
    """The columns of texts that an embedding learns to be alike; None for other tasks.

    Without --task, a table must call a column positive. --text-column names the texts in their
    order: the first, the one that it finds, then negatives. Raises UsageError if they or the scores
    are not clear.
    """
    request = table.request
    if request.embeds != "text":
        return None
    texts = table.text_options or _by_names(table)
    if request.task is None and not (texts and {text.key for text in texts} & {*SURE}):
        return None
    if len(texts) < 2:
        raise UsageError(
            f"{request.name} has no two columns that are clearly pairs of texts, only "
            f"{table.listed}; name them with --text-column a,b."
        )
    if lists := [text.name for text in texts if text.has_lists()]:
        raise UsageError(
            f"column {lists[0]} of {request.name} has lists of texts; write one text in a cell, "
            "such as a column for each negative."
        )
    names = [*TEXT_COLUMNS, *(f"{NEGATIVE}{number}" for number in range(len(texts) - 2))]
    roles: dict[str, Column | None] = dict(zip(names, texts, strict=True))
    return TableColumns.of("embedding", **roles, number=_score(table, texts))


def _by_names(table: Table) -> tuple[Column, ...]:
    """The texts by the names of their columns; none if they have no such names."""
    first, second = table.first(FIRST), table.first(SECOND)
    if first is None or second is None:
        named = [tuple(map(table.by_key.get, pair)) for pair in PAIRS]
        whole = [pair for pair in named if all(pair)]
        return tuple(column for column in whole[0] if column) if len(whole) == 1 else ()
    negatives = [c for key, c in table.by_key.items() if NEGATIVES.fullmatch(key)]
    return (first, second, *negatives)


def _score(table: Table, texts: Sequence[Column]) -> Column | None:
    """The column of scores; None without one. Raises UsageError if a label is not a number."""
    columns = table.label_options or [
        column for key, column in table.by_key.items() if key in SCORES | LABELS
    ]
    score = table.only([c for c in columns if c not in texts], "score", "label-column")
    if score is not None and not score.numbers:
        raise UsageError(
            f"column {score.name} of {table.request.name} is not a score of its pair of texts, as "
            "its values are not numbers; write numbers, the higher the more alike, or leave it out."
        )
    if score is not None and len(texts) > 2:
        raise UsageError(
            f"{table.request.name} has scores in {score.name} beside negatives; leave one of them "
            "out, as with --text-column a,b."
        )
    return score
