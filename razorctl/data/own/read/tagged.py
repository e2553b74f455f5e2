"""Finds the columns of tokens and of tags in files with a token on each line (CoNLL)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from razorctl.config.tasks import ENTITY_TAG
from razorctl.data.own.labels import UNSAID

Sentences = Sequence[Sequence[str]]  # the values of each sentence
OUTSIDE = "O"
BARE = frozenset("OBIMELSU")  # tags without types
WORDS = frozenset(("word", "words", "token", "tokens", "form"))  # names of their column
SHOWN = 3  # values of a column in a sentence
NUMBER = re.compile(r"\d+")
RANGE = re.compile(r"\d+[-.]\d+")  # numbers of CoNLL-U of several words, or of none
UNIVERSAL, PART = tuple(map(str, range(2, 11))), "4"  # the columns of CoNLL-U, and its parts
# Chunks of English and of German, which files of CoNLL have beside entities, or O.
CHUNK = re.compile("[BIOES]-((N|V|P|ADV|ADJ|CONJ|UC)P|[NVP]C|SBAR|PRT|INTJ|LST)|O")


def counts(column: Sentences) -> bool:
    """Whether a column numbers the tokens of each sentence, from any number on."""

    def rises(numbers: Sequence[str]) -> bool:
        whole = all(map(NUMBER.fullmatch, numbers))
        return whole and all(int(b) - int(a) == 1 for a, b in pairwise(numbers))

    words = [[value for value in values if not RANGE.fullmatch(value)] for values in column]
    return any(words) and all(map(rises, words))


def are_tags(values: Iterable[str]) -> bool:
    """Whether all values are tags: with types such as B-PER, or bare letters such as O and B."""
    tags = {*values}
    typed = {tag for tag in tags if ENTITY_TAG.fullmatch(tag)}
    return tags <= BARE | typed and bool(typed or OUTSIDE in tags or len(tags) > 2)


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line has names of columns.

    No name occurs below, and one is a name of words or stands above tags alone.
    """
    first, *rest = rows or [[]]
    columns = [*zip(first, zip(*rest, strict=False), strict=False)]
    named = all(name.isidentifier() and name not in (*UNSAID, *below) for name, below in columns)
    of_words = not WORDS.isdisjoint(map(str.casefold, first))
    of_tags = any(are_tags(below) and not are_tags([name]) for name, below in columns)
    return named and (of_words or of_tags)


def tag_columns(columns: Mapping[str, Sentences]) -> list[str]:
    """The columns that may be the tags; several if that is not clear.

    The first of these that there are: tags of entities, tags of chunks, the parts of speech of
    CoNLL-U, columns of few values, all columns but the first. columns: number -> values.
    """
    values = {name: _values(column) for name, column in columns.items()}
    if entities := [name for name in columns if are_tags(values[name])]:
        return [n for n in entities if not all(map(CHUNK.fullmatch, values[n]))] or entities
    if (*columns,) == UNIVERSAL:
        return [PART]
    varied = [name for name, column in columns.items() if not _says_nothing(column)]
    most = max((len({*values[name]}) for name in varied), default=0)
    few = [name for name in varied if 2 <= len({*values[name]}) <= most // 2]
    return [name for name in few if OUTSIDE in values[name]] or few or varied[1:]


def look_tagged(rows: Sequence[Sequence[str]], sure: bool) -> bool:
    """Whether lines with the same number of columns have a column of tags.

    rows: the columns of each line; none for a line between sentences. sure: whether tags must be
    tags of entities; otherwise one column of few values beside words is enough.
    """
    columns = [*zip(*filter(None, rows), strict=True)]
    kinds = [len({*column}) for column in columns]
    few = [n for n in kinds if 2 <= n <= max(kinds) // 2]
    words = not any(" " in value for column in columns for value in column)
    may_be = not sure and not all(rows[:-1]) and words and len(few) == 1
    return may_be or any(map(are_tags, columns))


def token_column(columns: Mapping[str, Sentences], tags: Sequence[str]) -> str | None:
    """The first column of many words beside the tags; None if there is none."""
    rest = {name: column for name, column in columns.items() if name not in tags}
    words = {
        name: len({*_values(column)})
        for name, column in rest.items()
        if not _says_nothing(column) and not all(map(NUMBER.fullmatch, _values(column)))
    }
    many = [name for name, kinds in words.items() if 2 * kinds > max(words.values())]
    return next(iter([*many, *rest]), None)


def listed(columns: Mapping[str, Sentences]) -> str:
    """The columns with their first values, for a sentence: `2 (the, of), 3 (O, B-PER)`."""
    parts = []
    for name, column in columns.items():
        values = [*dict.fromkeys(_values(column))]
        parts.append(f"{name} ({', '.join(values[:SHOWN])}{', ...' * (len(values) > SHOWN)})")
    return ", ".join(parts)


def _values(column: Sentences) -> list[str]:
    """All values of a column."""
    return [value for values in column for value in values]


def _says_nothing(column: Sentences) -> bool:
    """Whether a column counts tokens, or repeats one value in each sentence, such as its number."""
    longer = [values for values in column if len(values) > 1]
    return counts(column) or (len(longer) > 1 and all(len({*values}) == 1 for values in longer))
