"""Times, bytes, shares and counts in words: the one place that writes them for people."""

import math
from collections.abc import Callable

MINUTE, HOUR, DAY = 60, 3600, 86_400  # in seconds


def count(number: float, noun: str) -> str:
    """A number of things: 1 step, 2,000 steps, 8 micro-batches, 1.5 epochs."""
    shown = f"{number:,.0f}" if number == round(number) else f"{number:,g}"
    if number != 1:
        noun += "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{shown} {noun}"


def size(number: float, rounding: Callable[[float], int] = round) -> str:
    """Bytes: 512 bytes, 9.5 KiB, 98 MiB, 1.0 GiB.

    rounding: of the last digit; `math.ceil` for needed bytes, `math.floor` for available ones.
    """
    if number < 1 << 10:
        return count(number, "byte")
    for unit, power in (("KiB", 10), ("MiB", 20)):
        value = number / (1 << power)
        if (tenths := rounding(10 * value)) < 100:
            return f"{tenths / 10:.1f} {unit}"
        if (whole := rounding(value)) < 1 << 10:
            return f"{whole:,} {unit}"
    return f"{rounding(10 * number / (1 << 30)) / 10:,.1f} GiB"


def duration(seconds: float) -> str:
    """A time: 9.1 ms, 152 ms, 45 s, 3 min 20 s, 51 min, 1 h 27 min, 2 days 4 h, 12 days."""
    if 0 < seconds < 0.00005:
        return "below 0.1 ms"
    if seconds < 0.9995:
        return f"{_short(1000 * seconds)} ms"
    if seconds < MINUTE - 0.5:
        return f"{_short(seconds)} s"
    if seconds < 10 * MINUTE - 0.5:
        return _two(seconds, "min", MINUTE, "s", 1)
    if seconds < HOUR - MINUTE / 2:
        return f"{seconds / MINUTE:.0f} min"
    if seconds < DAY - MINUTE / 2:
        return _two(seconds, "h", HOUR, "min", MINUTE)
    if seconds < 10 * DAY - HOUR / 2:
        days = round(seconds / HOUR) // 24
        return _two(seconds, "day" if days == 1 else "days", DAY, "h", HOUR)
    return count(round(seconds / DAY), "day")


def _short(value: float) -> str:
    return f"{value:.{1 if value < 9.95 else 0}f}"


def _two(seconds: float, large: str, of_large: int, small: str, of_small: int) -> str:
    """A time in two units; without the second one if it is 0."""
    many, few = divmod(round(seconds / of_small), of_large // of_small)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


def between(low: float, high: float) -> str:
    """A time as a range, if the ends differ: 100-140 ms, 50 s to 1 min 10 s."""
    least, most = duration(low), duration(high)
    if least == most:
        return least
    (one, *first), (other, *second) = least.split(), most.split()
    if first == second and len(first) == 1:
        return f"{one}-{other} {first[0]}"
    return f"{least} to {most}"


def percent(share: float, digits: int | None = None) -> str:
    """A share: 1.0 %, 88 %, 99.7 %, and 5 % or 12.5 % of what is exactly that.

    What is not all or nothing is never written so. digits: so many after the point, if given.
    """
    value = 100 * share
    if digits is not None:
        return f"{value:,.{digits}f} %"
    if 0 < value < 0.05:
        return "below 0.1 %"
    if 99.95 <= value < 100:
        return "above 99.9 %"
    if math.isclose(value, round(value, 1), abs_tol=1e-9):
        return f"{round(value, 1):,g} %"
    return f"{value:,.{1 if value < 9.95 or 99 < value < 100 else 0}f} %"


def against(part: int, whole: int) -> str:
    """How much less or more than `whole` `part` is."""
    if part == whole:
        return "all of it"
    share = abs(1 - part / whole)
    if share < 0.0005:
        return "about all of it"
    return f"{percent(share)} {'less' if part < whole else 'more'}"
