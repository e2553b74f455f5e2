"""Data sets by name.

Each file of data sets in `razorctl.data` is imported and defines `DATASETS`, a tuple of `Source`
entries.
"""

import os
from pathlib import Path

from razorctl import registry
from razorctl.data.source import Source
from razorctl.system import folders

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
    """The name of a data set; for a user's files and folders it is their absolute path.

    Links are not followed: in the hub's cache only the link to a file has its ending.
    """
    if name in DATASETS or not folders.exists(Path(name).expanduser()):
        return name
    path = Path(name).expanduser()
    plain = os.path.abspath(path)  # noqa: PTH100
    same = os.path.realpath(plain) == os.path.realpath(path)  # a/../b stays if a is a link
    return plain if same else str(path.absolute())
