"""Files with a token on each line (CoNLL): which of their columns are the tokens and the tags."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from razorctl.config.tasks import ENTITY_TAG
from razorctl.data.own.labels import UNSAID

Sentences = Sequence[Sequence[str]]  # the values of each sentence
OUTSIDE = "O"
BARE = frozenset("OBIMELSU")  # tags without types
WORDS = frozenset(("word", "words", "token", "tokens", "form"))  # names of their column
NAMED = 3  # values of a column that a sentence names
NUMBER = re.compile(r"\d+")
RANGE = re.compile(r"\d+[-.]\d+")  # the number of what is no word of its own, as of CoNLL-U
UNIVERSAL, PART = tuple(map(str, range(2, 11))), "4"  # the columns of CoNLL-U, and its parts
# Chunks, of English and of German, which files of CoNLL have beside entities; and no tag alone.
CHUNK = re.compile("[BIOES]-((N|V|P|ADV|ADJ|CONJ|UC)P|[NVP]C|SBAR|PRT|INTJ|LST)|O")


def counts(column: Sentences) -> bool:
    """Whether a column numbers the tokens of each sentence, from any number on."""
    words = [[value for value in own if not RANGE.fullmatch(value)] for own in column]
    return any(words) and all(
        all(map(NUMBER.fullmatch, own)) and all(int(b) - int(a) == 1 for a, b in pairwise(own))
        for own in words
    )


def are_tags(values: Iterable[str]) -> bool:
    """Whether these are all tags of entities or words, or of tokens outside of them."""
    found = {*values}
    typed = {tag for tag in found if ENTITY_TAG.fullmatch(tag)}
    return found <= BARE | typed and bool(typed or OUTSIDE in found or len(found) > 2)


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line has names that are nowhere else, one of words or above tags alone."""
    first, *rest = rows or [[]]
    columns = [*zip(first, zip(*rest, strict=False), strict=False)]
    named = all(name.isidentifier() and name not in (*UNSAID, *own) for name, own in columns)
    of_words = not WORDS.isdisjoint(map(str.casefold, first))
    return named and (of_words or any(are_tags(own) and not are_tags([n]) for n, own in columns))


def tag_columns(columns: Mapping[str, Sentences]) -> list[str]:
    """The columns that may be the tags: one, or several if that is not clear.

    The tags are of entities, or else of chunks, the parts of speech of CoNLL-U, or the column of
    few values; of two the last. columns: their numbers and values.
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
    """Whether lines of as many columns each have tags of entities, or may have others.

    rows: the columns of each line; none of a line between sentences. sure: whether tags must be
    of entities; if not, they are few values beside words.
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


def seen(columns: Mapping[str, Sentences]) -> str:
    """The columns with their first values, for a sentence."""
    firsts = {name: [*dict.fromkeys(_values(column))] for name, column in columns.items()}
    return ", ".join(
        f"{name} ({', '.join(own[:NAMED])}{', ...' if len(own) > NAMED else ''})"
        for name, own in firsts.items()
    )


def _values(column: Sentences) -> list[str]:
    return [value for own in column for value in own]


def _says_nothing(column: Sentences) -> bool:
    """Whether a column counts, or has one value in each sentence, as its number."""
    longer = [own for own in column if len(own) > 1]
    return counts(column) or (len(longer) > 1 and all(len({*own}) == 1 for own in longer))
