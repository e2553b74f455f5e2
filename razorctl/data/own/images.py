"""Images that cannot be used: each is opened and decoded once, and again only if it changes."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from threading import Condition
from typing import Any

from razorctl import documents, folders
from razorctl.data.own import contents
from razorctl.data.own.raw import ADDRESS, OUTSIDE, Fault, Faults, Raw, content
from razorctl.data.own.store import stamp
from razorctl.models.images import WIDE

BATCH = 256  # images that are read before the progress is told
THREADS = min(32, os.cpu_count() or 1)
ONE_BYTE = ("1", "L", "P")  # modes of PIL with a byte for a pixel; others have up to 4
VALUES = 12  # more bytes for a pixel whose value is looked at
Said = Mapping[str, Mapping[int, Any]]  # split -> row -> what is said of it


class Room:
    """Memory that threads share: each waits until as much as it needs is left, at most all."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Has so many bytes inside the block."""
        size = min(size, self.size)
        with self._changed:
            self._changed.wait_for(lambda: self.left >= size)
            self.left -= size
        try:
            yield
        finally:
            with self._changed:
                self.left += size
                self._changed.notify_all()


DECODED = Room(256 << 20)  # of all images that are decoded at once


def looked(raw: Raw, known: Faults, progress: Callable[[str], None]) -> Said:
    """The fault of each image, or "", with its content and the highest of its wide values.

    Rows in `known` are not looked at. The content is as of `contents.of`, 0 of a bad image; the
    highest value is None of an image whose mode is not WIDE.
    """
    look = partial(_look, raw.root)
    return seen(raw, known, progress, ("image",), look, tuple[str, int, float | None])


def faults(said: Said) -> dict[str, dict[int, str]]:
    """The rows whose images cannot be used, of what `looked` returns."""
    return {
        split: {row: fault for row, (fault, *_) in of.items() if fault}
        for split, of in said.items()
    }


def highest(said: Mapping[int, Any]) -> float | None:
    """The highest of the wide values in one split of what `looked` returns; None without any."""
    return max((top for *_, top in said.values() if top is not None), default=None)


def _look(root: Path | None, image: Any) -> tuple[str, int, float | None]:
    top = None

    def see(opened: Any) -> None:
        nonlocal top
        if opened.mode in WIDE:
            top = float(opened.getextrema()[1])

    bad = fault(root, image, see)
    if bad:
        return bad, 0, None
    try:
        return "", contents.of_image(image), top
    except OSError as error:  # it has just been there
        return error.strerror or str(error), 0, None


def seen(
    raw: Raw,
    known: Faults,
    progress: Callable[[str], None],
    columns: tuple[str, ...],
    see: Callable[..., tuple[Any, ...]],
    kind: Any,
) -> Said:
    """The values that `see` returns for the contents of each row; kept in a file.

    columns: those whose contents are the arguments of `see`; the last one is what is looked at.
    see: returns values of JSON, of the type `kind`. Rows in `known` are not looked at.
    """
    verdicts = _verdicts(raw, known, columns)
    if verdicts is not None and (kept := _kept(verdicts, raw, known, kind)) is not None:
        return kept
    found = dict(_checked(raw, known, progress, columns, see))
    if verdicts is not None:
        with suppress(OSError):
            verdicts.parent.mkdir(parents=True, exist_ok=True)
            verdicts.write_text(documents.text(found))
    return found


def _kept(file: Path, raw: Raw, known: Faults, kind: Any) -> Said | None:
    """The values that `seen` has kept in a file; None if it is not there, or is anything else."""
    found = documents.read_cached(file, dict[str, dict[str, kind]])
    wanted = {
        split: {str(row) for row in range(len(of)) if row not in known[split]}
        for split, of in raw.splits.items()
    }
    if found is None or {split: of.keys() for split, of in found.items()} != wanted:
        return None
    return {split: {int(row): said for row, said in of.items()} for split, of in found.items()}


def _checked(
    raw: Raw,
    known: Faults,
    progress: Callable[[str], None],
    columns: tuple[str, ...],
    see: Callable[..., tuple[Any, ...]],
) -> Iterator[tuple[str, dict[int, Any]]]:
    import PIL.Image

    total = sum(map(len, raw.splits.values()))
    done = 0
    # Set for all threads at once; images beyond the limit are found by their size.
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")
        PIL.Image.init()
        for split in raw.splits:
            found: dict[int, Any] = {}
            unknown = (item for item in _items(raw, split, columns) if item[0] not in known[split])
            while batch := list(islice(unknown, BATCH)):
                progress(f"checking {columns[-1]}s, {done:,} of {total:,}")
                said = pool.map(lambda item: see(*item[1]), batch)
                found |= {row: values for (row, _), values in zip(batch, said, strict=True)}
                done += len(batch)
            yield split, found


def _items(
    raw: Raw, split: str, columns: tuple[str, ...] = ("image",)
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The number and the images of each row: paths, or bytes."""
    rows = raw.splits[split].select_columns(list(columns)).with_format("arrow")
    batches = (
        zip(*(map(content, table[name].to_pylist()) for name in columns), strict=True)
        for table in rows.iter(BATCH)
    )
    return enumerate(chain.from_iterable(batches))


def fault(
    root: Path | None,
    image: str | bytes | None,
    see: Callable[[Any], str | None] | None = None,
    values: bool = False,
) -> str | None:
    """What is wrong with an image, at a path or of bytes; None if nothing is.

    root: the folder in which the file must be, links followed; None if it may be anywhere. see,
    values: as of `undecodable`.
    """
    return unreachable(root, image) or undecodable(image, see, values)


def unreachable(root: Path | None, image: str | bytes | None) -> str | None:
    """As `fault`, of the image's place alone."""
    if image is None:
        return "no image"
    if isinstance(image, bytes):
        return None
    if "\0" in image:
        return "no path"
    if "://" in image:
        return ADDRESS
    if root is not None:
        there, folder = Path(os.path.realpath(image)), os.path.realpath(root)
        if not there.is_relative_to(folder):
            return OUTSIDE
    return _unreadable(image)


def _unreadable(image: str) -> str | None:
    if "::" in image or any(part.suffix in (".zip", ".tar") for part in Path(image).parents):
        return "inside an archive: unpack it"
    try:
        size = os.stat(image).st_size  # noqa: PTH116
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return error.strerror or str(error)
    if Path(image).is_dir():
        return "a folder"
    return None if size else "zero bytes"


def undecodable(
    image: Any, see: Callable[[Any], str | None] | None = None, values: bool = False
) -> str | None:
    """As `fault`, of the image's content alone; see: is given the decoded image, unless it is bad.

    What `see` returns is a fault too; values: whether it looks at the value of each pixel. Waits
    until there is room in DECODED.
    """
    import PIL.Image

    if image == b"":
        return "zero bytes"
    limit = PIL.Image.MAX_IMAGE_PIXELS
    try:
        with PIL.Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
            width, height = opened.size
            if limit is not None and width * height > limit:
                return f"{width} x {height} pixels, more than PIL's limit of {limit:,}"
            # A JPEG is then decoded at an eighth of its size, but all of it is read.
            opened.draft(None, (1, 1))
            width, height = opened.size
            pixel = 1 if opened.mode in ONE_BYTE else 4
            pixel += VALUES if values or opened.mode in WIDE else 0
            size = width * height * pixel
            with DECODED.taken(size):
                try:
                    opened.load()
                    opened.getexif()  # which loading it for a model reads too
                    return _not_finite(opened) or (see and see(opened))
                finally:
                    opened.close()  # frees the pixels before others are decoded
                    if THREADS * size > DECODED.size:
                        _give_back()
    except PIL.Image.DecompressionBombError:
        return f"more pixels than PIL's limit of {limit:,}"
    except PIL.UnidentifiedImageError:
        return "no image"
    except Exception as error:  # PIL's decoders raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "truncated" if "truncated" in reason else f"damaged: {reason}"


def unreadable(row: Mapping[str, Any]) -> str | None:
    """The first image or mask of a row that cannot be read now, and why; None if all can.

    row: as it is stored, with paths, bytes or structs of both.
    """
    for column in ("image", "mask"):
        value = row.get(column)
        if value is not None and (reason := fault(None, content(value))) is not None:
            path = value.get("path") if isinstance(value, dict) else value
            place = path if isinstance(path, str) else f"an {column} of the data"
            return str(Fault(place, reason))
    return None


def _give_back() -> None:
    """Gives freed memory back to the system; glibc keeps what each thread has freed."""
    if sys.platform == "linux":
        import ctypes  # here alone: it would slow the start of every command

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _not_finite(image: Any) -> str | None:
    import numpy as np

    if image.mode != "F":
        return None
    bad = np.count_nonzero(~np.isfinite(np.asarray(image)))
    return f"{bad:,} of its pixels are NaN or infinite" if bad else None


def _verdicts(raw: Raw, known: Faults, columns: tuple[str, ...]) -> Path | None:
    """The file of what was found in these very images; None if they cannot be told from others."""
    files: list[Iterator[Any]] = []
    for split, rows in raw.splits.items():
        first: Any = next((images for _, images in _items(raw, split, columns)), (b"",))
        if all(isinstance(image, str) for image in first):
            listed = chain.from_iterable(images for _, images in _items(raw, split, columns))
            files.append(image for image in listed if isinstance(image, str))
        elif rows.cache_files:
            files.append(iter([file["filename"] for file in rows.cache_files]))
        else:
            return None
    sizes: Mapping[str, int] = {split: len(rows) for split, rows in raw.splits.items()}
    bad = {split: sorted(rows) for split, rows in known.items()}
    digest = stamp(map(Path, chain.from_iterable(files)), sizes, bad, [str(raw.root), *columns])
    return folders.cache() / "images" / f"{digest}.json"
