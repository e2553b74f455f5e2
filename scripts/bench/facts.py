"""What README.md says that no other bench measures: bytes of an installation, the largest model.

    .venv/bin/python scripts/bench/facts.py

Writes results/facts.json. The bytes are of the files of all distributions that razorctl needs
without extras. The models are those that accuracy.py trains.
"""

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from pretrained import CACHE, EVERY
from record import head, options, write


def needed(name: str, extras: frozenset[str] = frozenset()) -> dict[str, int]:
    """Distribution -> bytes of its files, of one and all that it needs on this machine."""
    sizes: dict[str, int] = {}
    wanted = [(name, extras)]
    seen = set(wanted)
    while wanted:
        name, extras = wanted.pop()
        one = distribution(name)
        paths = (Path(str(one.locate_file(file))) for file in one.files or ())
        sizes[one.name] = sum(path.stat().st_size for path in paths if path.is_file())
        for requirement in map(Requirement, one.requires or ()):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in ("", *extras)):
                continue
            more = requirement.name, frozenset(requirement.extras)
            if more not in seen:
                seen.add(more)
                wanted.append(more)
    return sizes


def main() -> None:
    args = options(__doc__, "facts").parse_args()
    sizes = needed("razorctl")
    weights = {
        task.summary: sum(p.numel() for p in task.build(CACHE).parameters()) for task in EVERY
    }
    largest = dict(sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:5])
    document = {
        **head(None, *largest),
        "installed_bytes": sum(sizes.values()),
        "largest": largest,
        "most_weights": max(weights.values()),
        "weights": weights,
    }
    write(args.out, document)


if __name__ == "__main__":
    main()
