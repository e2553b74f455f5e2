"""Images that cannot be used: each is opened and decoded once, and again only if it changes."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from razorctl import folders
from razorctl.data.own.raw import OUTSIDE, Raw
from razorctl.data.own.rows import Faults
from razorctl.data.own.store import stamp

T = TypeVar("T")
BATCH = 256  # images that are read before the progress is told
THREADS = min(32, os.cpu_count() or 1)


def faults(raw: Raw, known: Faults, progress: Callable[[str], None]) -> dict[str, dict[int, str]]:
    """The rows whose images cannot be used, beside those in `known`, which are not looked at."""
    return seen(raw, known, progress, ("image",), partial(fault, raw.root))


def seen(
    raw: Raw,
    known: Faults,
    progress: Callable[[str], None],
    columns: tuple[str, ...],
    see: Callable[..., T | None],
) -> dict[str, dict[int, T]]:
    """Split -> row -> what `see` says of its contents, unless that is None; kept in a file.

    columns: those whose contents are the arguments of `see`; the last one is what is looked at.
    see: returns a value of JSON. Rows in `known` are not looked at.
    """
    verdicts = _verdicts(raw, known, columns)
    if verdicts is not None and verdicts.exists():
        with suppress(OSError, ValueError):
            found = json.loads(verdicts.read_text())
            return {
                split: {int(row): said for row, said in of.items()} for split, of in found.items()
            }
    found = dict(_checked(raw, known, progress, columns, see))
    if verdicts is not None:
        with suppress(OSError):
            verdicts.parent.mkdir(parents=True, exist_ok=True)
            verdicts.write_text(json.dumps(found))
    return found


def _checked(
    raw: Raw,
    known: Faults,
    progress: Callable[[str], None],
    columns: tuple[str, ...],
    see: Callable[..., T | None],
) -> Iterator[tuple[str, dict[int, T]]]:
    import PIL.Image

    total = sum(map(len, raw.splits.values()))
    done = 0
    # Set for all threads at once; images beyond the limit are found by their size.
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")
        PIL.Image.init()
        for split in raw.splits:
            found: dict[int, T] = {}
            unknown = (item for item in _items(raw, split, columns) if item[0] not in known[split])
            while batch := list(islice(unknown, BATCH)):
                progress(f"checking {columns[-1]}s, {done:,} of {total:,}")
                said = pool.map(lambda item: see(*item[1]), batch)
                pairs = zip(batch, said, strict=True)
                found |= {row: value for (row, _), value in pairs if value is not None}
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


def content(image: Any) -> Any:
    """The path or the bytes of an image as a row has it."""
    if isinstance(image, dict):
        return image["path"] if image["bytes"] is None else image["bytes"]
    return image


def fault(root: Path | None, image: str | bytes | None) -> str | None:
    """What is wrong with an image, at a path or of bytes; None if nothing is.

    root: the folder in which the file must be, links followed; None if it may be anywhere.
    """
    return unreachable(root, image) or undecodable(image)


def unreachable(root: Path | None, image: str | bytes | None) -> str | None:
    """As `fault`, of the image's place alone."""
    if image is None:
        return "no image"
    if isinstance(image, bytes):
        return None
    if "\0" in image:
        return "no path"
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


def undecodable(image: Any, see: Callable[[Any], str | None] = lambda _: None) -> str | None:
    """As `fault`, of the image's content alone; see: is given the decoded image, unless it is bad.

    What `see` returns is a fault too.
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
            opened.load()
            opened.getexif()  # which loading it for a model reads too
            return see(opened)
    except PIL.Image.DecompressionBombError:
        return f"more pixels than PIL's limit of {limit:,}"
    except PIL.UnidentifiedImageError:
        return "no image"
    except Exception as error:  # PIL's decoders raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "truncated" if "truncated" in reason else f"damaged: {reason}"


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
