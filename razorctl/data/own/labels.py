"""Labels: as files have them, as numbers of classes, and the names of classes."""

import ast
import json
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.tasks import NO_LABEL
from razorctl.data.own.raw import Faults, RawRows
from razorctl.errors import DataError, raise_lack
from razorctl.system import documents

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Numbers = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the number of each row's class, or -1

WHOLE = re.compile(r"[+-]?\d+(\.0+)?")
SEVERAL = "which are for multi-label (--task multi-label), not classes"
NUMBERS = "which are for regression (--task regression), not classes"
NAMES, NUMBERED = "classes.txt", "id2label.json"
DECIMAL = re.compile(r"[+-]?\d*\.\d+")
# Texts that programs write where there is no value.
UNSAID = ("-", "_", "nan", "NaN", "None", "NULL", "null", "NA", "N/A", "n/a", "<NA>", "#N/A")
# Texts and numbers that mean no value as often as they are classes.
DOUBTED = re.compile(r"(?i)[-?]+|n[./]?a\.?|nan|none|null|nil|unknown|missing|#\w+[!?]|-99+|999+")
COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*")  # a number with a decimal comma
# Or with signs of percent, currency or thousands.
MARKED = re.compile(r"\s*[$€£¥]?\s*[+-]?[\d.,]*\d\s*(?:[%$€£¥]|EUR|USD)?\s*")
# An item of a list, as JSON, Python or NumPy write it, and a text that is such a list.
ITEM = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[+-]?\d+(?:\.\d*)?|(?i:true|false)(?![^\s,\]])"""
)
WRITTEN = re.compile(rf"\s*\[\s*(?:(?:{ITEM.pattern})(?:[\s,]+|(?=\s*\])))*\]\s*")
BRACKETS = re.compile(r"(?s)^\s*[({](\s*['\"].*)[)}]\s*$")  # of a tuple or a set of texts


def class_numbers(raw: RawRows, bad: Faults) -> tuple[tuple[str, ...], Numbers, list[str]]:
    """The class names, the number of each row's class, and notes on labels.

    Classes come from the type of the column, or else from the labels of rows that are not bad, in
    the order of numbers or letters. The number of a row without a label is -1; for tasks without
    classes all are 0. Raises DataError if labels are not classes or not of one type.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if raw.task != "classification":
        zeros = {split: np.zeros(len(rows), np.int64) for split, rows in raw.splits.items()}
        return raw.class_names or (), zeros, []
    columns = {split: _wide(rows.data.column("label")) for split, rows in raw.splits.items()}
    kinds = {column.type for column in columns.values()}
    if len(kinds) > 1:
        raise DataError(
            f"labels of {raw.name} are of mixed type, {' and '.join(sorted(map(str, kinds)))}; "
            "give all splits one type."
        )
    kind = kinds.pop()
    if pa.types.is_nested(kind):
        raise DataError(
            f"labels of {raw.name} are not single values but {kind}, {SEVERAL}; choose another "
            "column with --label-column."
        )
    if raw.class_names is not None:
        classes, notes, labels = raw.class_names, list[str](), list(range(len(raw.class_names)))
        table = np.array([*labels, -1])
    else:
        counts = Counter[Any]()
        for split, column in columns.items():
            used = np.setdiff1d(np.arange(len(column)), list(bad.get(split, ())))
            for pair in pc.value_counts(column.take(used)).to_pylist():
                counts[pair["values"]] += pair["counts"]
        names, _, notes = named_classes(raw, counts)
        labels = _ordered(raw, {*names})
        classes = tuple(dict.fromkeys(names[label] for label in labels))
        find = finder(classes)
        table = np.array([*(find(names[label]) for label in labels), -1])  # -1 is no label
    values = pa.array(labels, kind)
    indices = {s: pc.fill_null(pc.index_in(c, value_set=values), -1) for s, c in columns.items()}
    return classes, {split: table[of.to_numpy()] for split, of in indices.items()}, notes


def _wide(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """The labels, in single precision if they are in half, which pyarrow cannot look up."""
    import pyarrow as pa

    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column


def is_missing(value: Any) -> bool:
    """Whether a value stands for no label: None, NaN or a blank text."""
    # NaN is the only value that differs from itself.
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def no_labels(values: Collection[Any], opinions: bool = True) -> set[Any]:
    """The values that mean no label: empty, in UNSAID, -100, and -1 beside other labels.

    -1 is a class if a number is below it. opinions: whether -1, 0 and 1 alone are classes, too.
    """
    numbers = {value: float(value) for value in values if WHOLE.fullmatch(str(value))}
    words = [v for v in values if not is_missing(v) and v not in UNSAID]
    whole = {*numbers.values()} - {NO_LABEL}
    signed = len(words) == len(numbers) and (
        min(whole, default=0) < -1 or (opinions and len(whole) > 1 and whole <= {-1, 0, 1})
    )
    none = {NO_LABEL} if signed else {NO_LABEL, -1}
    return {v for v in values if is_missing(v) or v in UNSAID or numbers.get(v) in none}


def named_classes(
    raw: RawRows, counts: Mapping[Any, int]
) -> tuple[dict[Any, str], set[Any], list[str]]:
    """The class name of each label, the labels that mean none, and notes on both.

    All spellings of a label have one class. counts: label -> its number of rows.
    """
    of_rows = raw.task == "classification"
    missing = {*filter(is_missing, counts)}
    none = missing if raw.sorted else no_labels(counts, of_rows)
    spelled: dict[str, list[Any]] = {}
    for label in sorted(counts.keys() - none, key=str):
        spelled.setdefault(canonical(class_name(label)), []).append(label)
    names: dict[Any, str] = {}
    notes = []
    for name, same in spelled.items():
        names |= {label: name if len(same) > 1 else class_name(label) for label in same}
        if len(same) > 1:
            notes.append(f"the labels {' and '.join(map(ascii, same))} are one class, {name}.")
    doubted = [*filter(DOUBTED.fullmatch, spelled)]
    doubted += ["-1"] if {"-1"} < spelled.keys() <= {"-1", "0", "1"} else []
    for name in () if raw.sorted else doubted:
        notes.append(f"the label {name} is learned as a class; leave it empty where it means none.")
    if said := none - missing if of_rows else none:  # rows without one are bad
        each = (f"{counts[v]:,} of {'nothing' if v in missing else v}" for v in said)
        what = "are ignored in loss and metrics; rename one that is a class"
        notes.append(f"missing labels, {' and '.join(sorted(each))}, {what}.")
    return names, none, notes


def canonical(name: str) -> str:
    """A class name in its one spelling: "+3.0" -> "3", "True" -> "true", Unicode in form C."""
    name = unicodedata.normalize("NFC", name)
    name = name.partition(".")[0].removeprefix("+") if WHOLE.fullmatch(name) else name
    return name.lower() if name.lower() in ("true", "false") else name


def finder(classes: Sequence[str]) -> Callable[[str], int]:
    """A function that returns the number of the class of a name in any spelling, or -1."""
    exact = {name: number for number, name in enumerate(classes)}
    alike = {canonical(name): number for number, name in enumerate(classes)}
    return lambda name: exact.get(name, alike.get(canonical(name), -1))


def class_name(value: Any) -> str:
    """The class name for a label: True -> 'true', 3.0 -> '3'."""
    if isinstance(value, float):
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_list(value: Any) -> list[Any] | None:
    """A value as a list: a list itself, or a text such as '["a"]', "('a', 'b')"; None for others.

    A text is read as JSON or else, item by item, as Python writes lists, sets and tuples.
    """
    if not begins_list(value) or isinstance(value, list):
        return value if isinstance(value, list) else None
    value = BRACKETS.sub(r"[\1]", value)
    with suppress(ValueError):
        return list(documents.parse(value))
    if not WRITTEN.fullmatch(value):
        return None
    with warnings.catch_warnings(), suppress(ValueError, SyntaxError):  # of odd escapes
        warnings.simplefilter("ignore")
        return [ast.literal_eval(_cased(item)) for item in ITEM.findall(value)]
    return None


def begins_list(value: Any) -> bool:
    """Whether a value is a list, or a text that begins as one, which may be malformed."""
    begins = isinstance(value, str) and (value.lstrip()[:1] == "[" or BRACKETS.match(value))
    return isinstance(value, list) or bool(begins)


def _cased(item: str) -> str:
    return item.title() if item[0].isalpha() else item  # true or false


def halved(value: Any) -> str | None:
    """The fault of a JSON value that has a lone surrogate; None without one."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a character: a lone surrogate"
    return None


def in_order(names: set[str]) -> tuple[str, ...]:
    """Names sorted as numbers if all are whole numbers, else as texts."""
    if all(map(WHOLE.fullmatch, names)):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))


def _ordered(raw: RawRows, values: set[Any]) -> list[Any]:
    """The values in order; raises DataError if they are not classes."""
    if odd := [value for value in values if type(value) not in (str, int, bool, float)]:
        raise DataError(
            f"labels of {raw.name} are not single values, such as {odd[0]!r}; choose another "
            "column with --label-column."
        )
    texts = [value for value in values if isinstance(value, str)]
    parts: list[Any] = [v for v in values if isinstance(v, float) and not v.is_integer()]
    if raw.untyped:
        whole = [text for text in texts if WHOLE.fullmatch(text)]
        parts = [text for text in texts if DECIMAL.fullmatch(text) and text not in whole]
        if whole and not parts and len(whole) < len(texts):
            other = min(set(texts) - set(whole))
            raise DataError(
                f"labels of {raw.name} are of mixed type, numbers such as {min(whole)} and text "
                f"such as {other!r}; give all of them one type."
            )
    if parts:
        raise DataError(
            f"labels of {raw.name} are decimal numbers, such as {min(parts)}, {NUMBERS}; "
            "choose another column with --label-column."
        )
    if texts and all(map(WHOLE.fullmatch, texts)):
        return sorted(texts, key=lambda text: (float(text), text))
    return sorted(values)


def label_text(value: Any, place: str, kinds: dict[str, str]) -> str | None:
    """A label of a line as text; None is no label.

    kinds: type -> the place of the first label of this type; it is updated. Raises DataError for a
    value that is no class, and for a second type.
    """
    if value is None or value in UNSAID:
        return None if value is None else str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    kind = {bool: "true or false", int: "a number", str: "text"}.get(type(value))
    if kind is None:
        why = {list: f", {SEVERAL}", float: f", {NUMBERS}"}.get(type(value), "")
        raise DataError(
            f"the label at {place} is {value!r}{why}; give text or whole numbers, or choose "
            "another column with --label-column."
        )
    kinds.setdefault(kind, place)
    if len(kinds) > 1:
        both = " and ".join(f"{kind} ({where})" for kind, where in kinds.items())
        raise DataError(f"labels are of mixed type, {both}; give all of them one type.")
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def renumbered(
    name: str,
    labels: "np.ndarray[Any, Any]",
    names: Sequence[str],
    classes: Sequence[str],
    rows: "np.ndarray[Any, Any] | None" = None,
) -> "np.ndarray[Any, Any]":
    """Labels [n] of a data set, numbered by the classes of a run.

    Raises DataError that names the labels that the run lacks.

    Args:
        name: the name of the data set.
        labels: the numbers of the labels; -1 is none.
        names: the classes of the data set.
        classes: the classes of the run.
        rows: the rows that count; None is all.
    """
    import numpy as np

    used = np.unique(labels if rows is None else labels[rows])
    table = np.array([*map(finder(classes), names), -1])  # -1 is no label
    refuse_unknown(name, [names[n] for n in used if table[n] < 0], classes)
    return np.asarray(table[labels])


def refuse_unknown(name: str, unknown: Sequence[str], classes: Sequence[str]) -> None:
    """Raises DataError if there are `unknown` labels, those that are no classes of a run."""
    if unknown:
        few = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        run_few = ", ".join(map(repr, classes[:5])) + (", ..." if len(classes) > 5 else "")
        raise DataError(
            f"{name} has labels that are not classes of the run: {few}; its classes are {run_few}, "
            "so correct them, or choose another column with --label-column."
        )


def class_names_in(folder: Path, least: int = 2) -> tuple[str, ...] | None:
    """The names of the classes by a file in the folder; None without such a file.

    classes.txt has a name on each line, from the value 0 on; id2label.json is an object of values
    and names. Raises DataError if it cannot be used, or names fewer classes than `least`.
    """
    file = folder / NAMES
    if not file.exists():
        file = folder / NUMBERED
        if not file.exists():
            return None
    mend = f"give {NAMES} with a name on each line, or leave it out"
    try:
        text = documents.read_bytes(file, documents.LARGEST_FOREIGN).decode("utf-8-sig")
        if file.name == NUMBERED:
            by_value = {int(value): str(name) for value, name in documents.parse(text).items()}
            names = [by_value[value] for value in range(len(by_value))]
        else:
            names = [line.strip() for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise_lack(error)
        raise DataError(f"{file} cannot be read ({error.strerror}); {mend}.") from None
    except (ValueError, AttributeError, KeyError):
        raise DataError(f"{file} does not name the values from 0 on; {mend}.") from None
    if len(set(names)) < max(len(names), least):
        few = units.count(least, "class")
        raise DataError(f"{file} does not name {few} or more, each once; {mend}.")
    return tuple(names)
