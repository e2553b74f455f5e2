"""Faults of images: each image is decoded once, and again only if its file changes."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Condition
from typing import Any

from razorctl.data.own import contents
from razorctl.data.own.raw import ADDRESS, OUTSIDE, Fault, Faults, RawRows, content
from razorctl.data.own.store import stamp
from razorctl.errors import first_line, raise_lack
from razorctl.models.images import MODES, WIDE, converted
from razorctl.system import documents, folders
from razorctl.system.atomic import atomic_file

BATCH = 256  # images between two reports of the progress
THREADS = min(32, os.cpu_count() or 1)
ONE_BYTE = ("1", "L", "P")  # modes of PIL with a byte for a pixel; others have up to 4
VALUES = 12  # more bytes for a pixel whose value is looked at
See = Callable[[Any, tuple[int, int]], str | None]  # sees a decoded image and its size
Findings = Mapping[str, Mapping[int, Any]]  # split -> row -> the result for its image or mask


class Room:
    """A budget of bytes that threads share: each waits until its part, at most all, is free."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._changed = Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Reserves `size` bytes inside the block, or all if there are fewer."""
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


DECODED = Room(256 << 20)  # for all images that are decoded at once


def findings(raw: RawRows, faults: Faults, progress: Callable[[str], None]) -> Findings:
    """For each image its fault or "", its content, its highest value, and its size.

    Rows with a fault are left out. Content is as `contents.image_content` returns it, or 0 of a bad
    image. The highest value is None for modes that are not WIDE. The size is [width, height], or
    None of a bad image.
    """
    look = partial(_look, raw.root)
    kind = tuple[str, int, float | None, list[int] | None]
    return Inspector(raw, faults, ("image",), look, kind).findings(progress)


def image_faults(findings: Findings) -> dict[str, dict[int, str]]:
    """Split -> row -> the fault of its image."""
    return {
        split: {row: fault for row, (fault, *_) in rows.items() if fault}
        for split, rows in findings.items()
    }


def highest(findings: Mapping[int, Any]) -> float | None:
    """The highest value of the images of a split in WIDE modes; None without such images."""
    return max((top for _, _, top, _ in findings.values() if top is not None), default=None)


def size_of(root: Path | None, image: str | bytes | None) -> tuple[int, int] | None:
    """The width and height of an image by its EXIF orientation; None if it cannot be read.

    root: as in `image_fault`.
    """
    from razorctl.data.own import decoding

    if place_fault(root, image) is not None:
        return None
    try:
        with decoding.opened(image) as opened:  # type: ignore[arg-type]
            return _upright(opened, opened.size)
    except Exception as error:  # PIL raises many kinds; `content_fault` reports them
        raise_lack(error)
        return None


def _upright(image: Any, size: tuple[int, int]) -> tuple[int, int]:
    """The size as it is when the image is turned as its EXIF orientation demands."""
    from PIL.ExifTags import Base

    turned = image.getexif().get(Base.Orientation) in (5, 6, 7, 8)
    return size[::-1] if turned else size


def _look(root: Path | None, image: Any) -> tuple[str, int, float | None, list[int] | None]:
    top, size = None, None

    def see(opened: Any, upright: tuple[int, int]) -> str | None:
        nonlocal top, size
        size = [*upright]
        if opened.mode in WIDE:
            top = float(opened.getextrema()[1])
        return _unconvertible(opened)

    fault = image_fault(root, image, see)
    if fault:
        return fault, 0, None, None
    try:
        return "", contents.image_content(image), top, size
    except OSError as error:  # Inspector has read it
        raise_lack(error)
        return error.strerror or str(error), 0, None, None


def _unconvertible(opened: Any) -> str | None:
    """The fault of a decoded image if its first pixel does not convert to RGB and gray."""
    if opened.mode in MODES and "transparency" not in opened.info:
        return None
    pixel = opened.crop((0, 0, 1, 1))
    pixel.palette = opened.palette  # which is made up where the image has none
    try:
        for mode in MODES:
            converted(pixel).convert(mode)
    except Exception as error:  # PIL raises many kinds
        raise_lack(error)
        return f"of mode {opened.mode}, which cannot be converted to RGB: save it as PNG"
    return None


@dataclass(frozen=True)
class Inspector:
    """Looks at the images or masks of rows once, and stores the results in a file.

    Args:
        raw: the rows.
        faults: rows that are left out.
        columns: the columns whose paths or bytes are the arguments of `look`; it looks at the last.
        look: returns a tuple of JSON values.
        kind: the type of that tuple.
    """

    raw: RawRows
    faults: Faults
    columns: tuple[str, ...]
    look: Callable[..., tuple[Any, ...]]
    kind: Any

    def findings(self, progress: Callable[[str], None]) -> Findings:
        """The result of `look` for each row, from the file of earlier results if it fits."""
        file = self._file()
        findings = None if file is None else self._kept(file)
        if findings is not None:
            return findings
        findings = dict(self._looked_at(progress))
        if file is not None:
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(file, replace=True) as partial:
                    partial.write_text(documents.text(findings))
        return findings

    def _file(self) -> Path | None:
        """The file for the results of these images; None for images in memory."""
        files: list[Iterator[Any]] = []
        for split, rows in self.raw.splits.items():
            first: Any = next((images for _, images in self._items(split)), (b"",))
            if all(isinstance(image, str) for image in first):
                images = chain.from_iterable(images for _, images in self._items(split))
                files.append(image for image in images if isinstance(image, str))
            elif rows.cache_files:
                files.append(iter([file["filename"] for file in rows.cache_files]))
            else:
                return None
        sizes: Mapping[str, int] = {split: len(rows) for split, rows in self.raw.splits.items()}
        bad = {split: sorted(rows) for split, rows in self.faults.items()}
        more = [str(self.raw.root), *self.columns]
        digest = stamp(map(Path, chain.from_iterable(files)), sizes, bad, more)
        return folders.cache() / "images" / f"{digest}.json"

    def _kept(self, file: Path) -> Findings | None:
        """The results in a file; None without the file, or if it is of other rows."""
        document = documents.read_cached(file, dict[str, dict[str, self.kind]])  # type: ignore[name-defined]
        rows = {
            split: {str(row) for row in range(len(of)) if row not in self.faults[split]}
            for split, of in self.raw.splits.items()
        }
        if document is None or {split: of.keys() for split, of in document.items()} != rows:
            return None
        return {split: {int(row): of[row] for row in of} for split, of in document.items()}

    def _looked_at(
        self, progress: Callable[[str], None]
    ) -> Iterator[tuple[str, dict[int, tuple[Any, ...]]]]:
        """Looks at the rows; yields each split with its results."""
        from razorctl.data.own import decoding

        total = sum(map(len, self.raw.splits.values()))
        done = 0
        # Set for all threads at once; images beyond the limit are found by their size.
        with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
            warnings.simplefilter("ignore")
            decoding.formats()  # before several threads load PIL's decoders
            for split in self.raw.splits:
                findings: dict[int, Any] = {}
                items = (item for item in self._items(split) if item[0] not in self.faults[split])
                while batch := list(islice(items, BATCH)):
                    progress(f"checking {self.columns[-1]}s, {done:,} of {total:,}")
                    values = pool.map(lambda item: self.look(*item[1]), batch)
                    findings |= {row: of for (row, _), of in zip(batch, values, strict=True)}
                    done += len(batch)
                yield split, findings

    def _items(self, split: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """The number and the images of each row: paths, or bytes."""
        rows = self.raw.splits[split].select_columns(list(self.columns)).with_format("arrow")
        batches = (
            zip(*(map(content, table[name].to_pylist()) for name in self.columns), strict=True)
            for table in rows.iter(BATCH)
        )
        return enumerate(chain.from_iterable(batches))


def image_fault(
    root: Path | None,
    image: str | bytes | None,
    see: See | None = None,
    values: bool = False,
) -> str | None:
    """The fault of an image by its path or its bytes; None if there is none.

    root: the folder that the file must be in, links resolved; None if it may be anywhere. see,
    values: as in `content_fault`.
    """
    return place_fault(root, image) or content_fault(image, see, values)


def place_fault(root: Path | None, image: str | bytes | None) -> str | None:
    """The fault of the place of an image, which is not opened; root: as in `image_fault`."""
    if image is None:
        return "no image"
    if isinstance(image, bytes):
        return None
    if "\0" in image:
        return "no path"
    if "://" in image:
        return ADDRESS
    if root is not None:
        there, folder = Path(os.path.realpath(image)), Path(os.path.realpath(root))
        if not there.is_relative_to(folder) and not there.is_relative_to(_blobs(folder)):
            return OUTSIDE
    return _unreadable(image)


def _blobs(folder: Path) -> Path:
    """The folder that links in a snapshot of the hub's cache lead to; else the folder itself."""
    snapshot = next((part for part in folder.parents if part.name == "snapshots"), None)
    return folder if snapshot is None else snapshot.with_name("blobs")


def _unreadable(image: str) -> str | None:
    if "::" in image or any(part.suffix in (".zip", ".tar") for part in Path(image).parents):
        return "inside an archive: unpack it"
    try:
        size = os.stat(image).st_size  # noqa: PTH116
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        raise_lack(error)
        return error.strerror or str(error)
    if Path(image).is_dir():
        return "a folder"
    return None if size else "zero bytes"


def content_fault(image: Any, see: See | None = None, values: bool = False) -> str | None:
    """The fault of the content of an image by its path or its bytes; None if there is none.

    Waits until there is room in DECODED. see: called with the decoded image, unless it is bad,
    and with its size, upright; returns a fault too. values: whether `see` looks at the value of
    each pixel.
    """
    import PIL.Image

    from razorctl.data.own import decoding

    if image == b"":
        return "zero bytes"
    limit = PIL.Image.MAX_IMAGE_PIXELS
    try:
        with decoding.opened(image) as opened:
            width, height = whole = opened.size
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
                    decoding.upright(opened)
                    return _not_finite(opened) or (see and see(opened, _upright(opened, whole)))
                finally:
                    opened.close()  # frees the pixels before others are decoded
                    if THREADS * size > DECODED.size:
                        _give_back()
    except PIL.Image.DecompressionBombError:
        return f"more pixels than PIL's limit of {limit:,}"
    except PIL.UnidentifiedImageError:
        return "no image of a known format: save it as PNG"
    except Exception as error:  # PIL's decoders raise many kinds
        raise_lack(error)
        reason = first_line(error)
        return "truncated" if "truncated" in reason else f"damaged: {reason}"


def unreadable_image(row: Mapping[str, Any]) -> str | None:
    """The first image or mask of a row that cannot be read now, with its fault; None without one.

    row: a stored row, with paths, bytes or structs of both.
    """
    for column in ("image", "mask"):
        value = row.get(column)
        if value is None:
            continue
        stored = content(value)
        reason = _look(None, stored)[0] if column == "image" else image_fault(None, stored)
        if reason:
            path = value.get("path") if isinstance(value, dict) else value
            place = path if isinstance(path, str) else f"an {column} of the data"
            return str(Fault(place, reason))
    return None


def _give_back() -> None:
    """Returns freed memory to the system; glibc keeps the freed memory of each thread."""
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
