"""Digests of rows, by which changed rows and duplicate rows are recognized.

A content is 64 bits of a row's digest. It does not depend on an image's name, so a renamed image
is noticed only if the order of rows changes.
"""

import json
from collections.abc import Iterable
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own.raw import content, inputs_in

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

BATCH = 256  # rows


def digest(contents: "np.ndarray[Any, Any]", labels: Any) -> str:
    """The digest of a split, from the contents [n] of its rows in order, and from their labels.

    labels: numbers of classes, or lists for other tasks; empty without labels.
    """
    import numpy as np

    if len(labels) and not isinstance(labels[0], (int, np.integer)):
        labels = [row_content([label]) for label in _plain(labels)]
    total = blake2b(digest_size=16)
    for column in (contents, labels):
        total.update(np.asarray(column, "<i8").tobytes())
    return total.hexdigest()


def row_contents(rows: "Dataset") -> "np.ndarray[Any, Any]":
    """The content [n], int64, of each row of images and masks, texts or conversations."""
    import numpy as np

    names = inputs_in(rows)
    plain = rows.select_columns(names).with_format("arrow")
    values = (
        row_content(row)
        for table in plain.iter(BATCH)
        for row in zip(*(table[name].to_pylist() for name in names), strict=True)
    )
    return np.fromiter(values, np.int64, len(rows))


def row_content(values: Iterable[Any]) -> int:
    """The content of a row with these values: texts, images, messages, or contents.

    Raises OSError for the path of an image that cannot be read.
    """
    total = blake2b(digest_size=8)
    for value in values:
        part = _part(value)
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return int.from_bytes(total.digest(), "little", signed=True)


def image_content(image: str | bytes) -> int:
    """The content of an image at a path or of bytes; raises as `row_content`."""
    return row_content([{"bytes": image if isinstance(image, bytes) else None, "path": image}])


def labels_in(rows: "Dataset") -> Any:
    """The labels of rows as in `Splits`, with boxes if there are any; empty without labels."""
    names = [name for name in ("label", "boxes", "crowd") if name in rows.column_names]
    columns = [rows[name][:] for name in names]
    return [*zip(*columns, strict=True)] if len(names) > 1 else columns[0] if names else ()


def _plain(labels: Any) -> list[Any]:
    """Labels as numbers and lists of Python."""
    return list(labels.tolist() if hasattr(labels, "tolist") else labels)


def _part(value: Any) -> bytes:
    if isinstance(value, dict):
        image = content(value)
        if not isinstance(image, str):
            return blake2b(image or b"").digest()
        with Path(image).open("rb") as file:
            return file_digest(file, blake2b).digest()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [{key: each for key, each in one.items() if each is not None} for one in value]
    return json.dumps(value).encode()
