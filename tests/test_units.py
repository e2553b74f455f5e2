"""Times, bytes, shares and counts, at the ends of each range, and that nobody else writes them."""

import ast
import math
import re
from pathlib import Path

import pytest

from razorctl.units import against, between, count, duration, percent, size

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 ms"),
        (0.00001, "below 0.1 ms"),
        (0.0091, "9.1 ms"),
        (0.00996, "10 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (599.6, "10 min"),
        (3571, "1 h"),
        (5220, "1 h 27 min"),
        (90_000, "1 day 1 h"),
    ],
)
def test_duration(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1521, 0.1519, "152 ms"),
        (0.0997, 0.14, "100-140 ms"),
        (50, 70, "50 s to 1 min 10 s"),
        (5220, 7380, "1 h 27 min to 2 h 3 min"),
    ],
)
def test_between(low, high, words):
    assert between(low, high) == words


@pytest.mark.parametrize(
    ("number", "words", "up", "down"),
    [
        (1, "1 byte", "1 byte", "1 byte"),
        (1023, "1,023 bytes", "1,023 bytes", "1,023 bytes"),
        (9.96 * KIB, "10 KiB", "10 KiB", "9.9 KiB"),
        (1023.6 * KIB, "1.0 MiB", "1.0 MiB", "1,023 KiB"),
        (98.4 * MIB, "98 MiB", "99 MiB", "98 MiB"),
        (1023.6 * MIB, "1.0 GiB", "1.0 GiB", "1,023 MiB"),
        (GIB, "1.0 GiB", "1.0 GiB", "1.0 GiB"),
        (2000.04 * GIB, "2,000.0 GiB", "2,000.1 GiB", "2,000.0 GiB"),
    ],
)
def test_size(number, words, up, down):
    assert (size(number), size(number, math.ceil), size(number, math.floor)) == (words, up, down)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0, "0 %"),
        (0.0004, "below 0.1 %"),
        (0.0101, "1.0 %"),
        (1 - 0.9, "10 %"),
        (0.1243, "12 %"),
        (0.9904, "99.0 %"),
        (0.9996, "above 99.9 %"),
    ],
)
def test_percent(share, words):
    assert percent(share) == words


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (100_000, "all of it"),
        (99_999, "about all of it"),
        (99_700, "0.3 % less"),
        (10_000, "90 % less"),
        (0, "100 % less"),
        (101_000, "1 % more"),
        (100_400, "0.4 % more"),
    ],
)
def test_against(part, words):
    assert against(part, 100_000) == words


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 steps"), (1, "1 step"), (2000, "2,000 steps"), (1.5, "1.5 steps")]
)
def test_count(number, words):
    assert count(number, "step") == words
    nouns = "epoch", "micro-batch", "class", "process"
    shown = [count(2, noun) for noun in nouns]
    assert shown == ["2 epochs", "2 micro-batches", "2 classes", "2 processes"]


UNIT = re.compile(r" (ms|s|min|h|days?|[KMG]i?B|%)(?!\w)|%")
COUNTED = re.compile(
    r" (training |micro-)?(byte|row|step|epoch|seed|run|token|text|class|process|image|example|"
    r"field|kernel|batch|conversation)(s|es)\b"
)
FREE = {
    "units.py",
    "planning/candidates.py",  # micro-batches, of which there are two or more
}


def written_by_hand(file: Path) -> list[tuple[int, str]]:
    """The lines of a file whose formatted strings write a unit, a share or a plural themselves."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "(s)" in node.value:
            found.append((node.lineno, node.value))
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, after in zip(node.values, [*node.values[1:], None], strict=True):
            if not isinstance(value, ast.FormattedValue):
                continue
            form = ast.unparse(value.format_spec) if value.format_spec else ""
            words = after.value if isinstance(after, ast.Constant) else ""
            if "%" in form or UNIT.match(words) or COUNTED.match(words):
                found.append((node.lineno, words))
    return found


PACKAGE = Path(__file__).parents[1] / "razorctl"


def test_units_are_written_in_one_place():
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name not in FREE and not name.startswith("ops/triton/"):  # tests alone see those
            assert not written_by_hand(file), name
