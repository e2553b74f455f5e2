"""Writes every table, and every figure in prose, from results/*.json into the pages.

    .venv/bin/python scripts/bench/report.py [--check]

Pages are README.md, this folder's README.md and one for each topic: memory.md, time.md,
gradients.md, accuracy.md, models.md. In them `<!-- NAME: scripts/bench/report.py -->` begins what
the function of that name in front.py or tables.py returns, given what follows a hyphen. Other prose
is written in the pages. `front.figures` returns the figures in the sentences of README.md.
`--check` writes nothing and exits with 1 if a page differs from what the results say.
"""

import argparse
import re
import sys

import front
import tables
from pages import HERE, ROOT

README = ROOT / "README.md"
PAGES = [README, HERE / "README.md"]
PAGES += [HERE / f"{topic}.md" for topic in ("memory", "time", "gradients", "accuracy", "models")]
MARKS = re.compile(r"(<!-- (\S+): scripts/bench/report.py -->\n).*?(<!-- /\2 -->)", flags=re.DOTALL)


def with_blocks(text: str) -> str:
    """A page with each block between its two marks."""

    def written(mark: re.Match[str]) -> str:
        begin, name, end = mark.groups()
        function, _, more = name.partition("-")
        write = getattr(front, function, None) or getattr(tables, function)
        return f"{begin}{write(*more.split())}{end}"

    return MARKS.sub(written, text)


def with_figures(text: str) -> str:
    """README.md with current figures in its sentences, which are found by their other words.

    Raises ValueError if a sentence is absent or occurs twice.
    """
    for sentence, figures in front.figures().items():
        words = [re.escape(part).replace(r"\ ", r"\s") for part in sentence.split("{}")]
        found = list(re.finditer(r"[\d.,]*\d".join(f"({part})" for part in words), text))
        if len(found) != 1:
            raise ValueError(f"README.md has {len(found)} times: {sentence}")
        (at,) = found
        each = [*map(str, figures), ""]
        new = "".join(part + figure for part, figure in zip(at.groups(), each, strict=True))
        text = text[: at.start()] + new + text[at.end() :]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    wanted = {path: with_blocks(path.read_text()) for path in PAGES}
    wanted[README] = with_figures(wanted[README])
    stale = [path for path, text in wanted.items() if path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} differs from the results; run scripts/bench/report.py")
        else:
            path.write_text(wanted[path])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
