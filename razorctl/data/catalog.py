"""Data sets by name.

Each file of data sets in `razorctl.data` is imported and defines `DATASETS`, a tuple of `Source`
entries.
"""

from pathlib import Path

from razorctl import folders
from razorctl.config import registry
from razorctl.data.source import Source

DATASETS: dict[str, Source] = {
    source.name: source
    for file in registry.modules(
        "razorctl.data", [str(Path(__file__).parent)], skip=("own", "catalog", "source")
    )
    for source in file.DATASETS
}


def find(name: str) -> Source:
    """The registered data set of that name.

    Raises UsageError, with the nearest name, if there is none.
    """
    return registry.find("data set", name, DATASETS)


def place(name: str) -> str:
    """The name of a data set, which for files and folders of one's own is their absolute path."""
    if name in DATASETS or not folders.exists(Path(name).expanduser()):
        return name
    return str(Path(name).expanduser().resolve())
