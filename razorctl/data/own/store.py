"""Tables in memory if they are small, else in a memory-mapped Arrow file of datasets' cache."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.system import hub
from razorctl.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

SMALL = 64 << 20  # bytes of files that may be read into memory,
IN_MEMORY = 4 * SMALL  # and of what is read of them: files may be compressed
BATCH = 1000  # rows


def stamp(files: Iterable[Path], *more: Any) -> str:
    """A digest of `more`, of razorctl's version, and of the files' paths, sizes and times."""
    digest = sha256(repr((__version__, *more)).encode())
    for file in files:
        digest.update(os.fsencode(file.absolute()) + b"\0")
        with suppress(OSError, ValueError):
            status = file.stat()
            # ctime, too: a file that is moved into place of another may have the same mtime.
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
            digest.update(f"{status.st_size} {times}\0".encode())
    return digest.hexdigest()[:32]


def batches_of(
    rows: Iterable[Mapping[str, Any]], schema: "pa.Schema"
) -> Iterator["pa.RecordBatch"]:
    """Rows as batches; missing values are null."""
    import pyarrow as pa

    rows = iter(rows)
    while chunk := list(islice(rows, BATCH)):
        yield pa.RecordBatch.from_pylist(chunk, schema)


def text_table(rows: Iterable[Mapping[str, Any]], *names: str) -> "Dataset":
    """Rows in memory, with columns of text."""
    import datasets
    import pyarrow as pa

    schema = pa.schema([(name, pa.string()) for name in names])
    return datasets.Dataset(pa.Table.from_batches(batches_of(rows, schema), schema))


def stored_rows(
    files: Sequence[Path],
    schema: "pa.Schema",
    batches: Callable[[], Iterator["pa.RecordBatch"]],
    *key: Any,
) -> "Dataset":
    """The rows of batches, in memory if the files are small, else in a file of the cache.

    batches: reads `files`; it runs once for each `key` if they are large.
    """
    small = sum(file.stat().st_size for file in files) <= SMALL
    file = hub.cached(f"{stamp(files, schema.to_string(), *key)}.arrow")
    return hub.stored_batches(file, schema, batches(), IN_MEMORY if small else 0)
