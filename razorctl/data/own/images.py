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
from typing import Any

from razorctl.data.own.raw import OUTSIDE, Raw
from razorctl.data.own.rows import Faults
from razorctl.data.own.store import stamp

BATCH = 256  # images that are read before the progress is told
THREADS = min(32, os.cpu_count() or 1)


def faults(raw: Raw, known: Faults, progress: Callable[[str], None]) -> dict[str, dict[int, str]]:
    """The rows whose images cannot be used, beside those in `known`, which are not looked at."""
    verdicts = _verdicts(raw, known)
    if verdicts is not None and verdicts.exists():
        with suppress(OSError, ValueError):
            found = json.loads(verdicts.read_text())
            return {
                split: {int(row): reason for row, reason in bad.items()}
                for split, bad in found.items()
            }
    found = dict(_checked(raw, known, progress))
    if verdicts is not None:
        with suppress(OSError):
            verdicts.parent.mkdir(parents=True, exist_ok=True)
            verdicts.write_text(json.dumps(found))
    return found


def _checked(
    raw: Raw, known: Faults, progress: Callable[[str], None]
) -> Iterator[tuple[str, dict[int, str]]]:
    import PIL.Image

    total = sum(map(len, raw.splits.values()))
    done = 0
    # Set for all threads at once; images beyond the limit are found by their size.
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as pool:
        warnings.simplefilter("ignore")
        PIL.Image.init()
        for split in raw.splits:
            bad: dict[int, str] = {}
            unknown = (item for item in _items(raw, split) if item[0] not in known[split])
            while batch := list(islice(unknown, BATCH)):
                progress(f"checking images, {done:,} of {total:,}")
                reasons = pool.map(partial(fault, raw.root), [image for _, image in batch])
                found = zip(batch, reasons, strict=True)
                bad |= {row: reason for (row, _), reason in found if reason is not None}
                done += len(batch)
            yield split, bad


def _items(raw: Raw, split: str) -> Iterator[tuple[int, Any]]:
    """The number and the image of each row: a path, or bytes."""
    rows = raw.splits[split].select_columns("image").with_format("arrow")
    batches = (table["image"].to_pylist() for table in rows.iter(BATCH))
    return enumerate(map(content, chain.from_iterable(batches)))


def content(image: Any) -> Any:
    """The path or the bytes of an image as a row has it."""
    if isinstance(image, dict):
        return image["path"] if image["bytes"] is None else image["bytes"]
    return image


def fault(root: Path | None, image: str | bytes | None) -> str | None:
    """What is wrong with an image, at a path or of bytes; None if nothing is.

    root: the folder in which the file must be, links followed; None if it may be anywhere.
    """
    if image is None:
        return "no image"
    if isinstance(image, bytes):
        return _undecodable(image)
    if "\0" in image:
        return "no path"
    if root is not None:
        there, folder = Path(os.path.realpath(image)), os.path.realpath(root)
        if not there.is_relative_to(folder):
            return OUTSIDE
    return _unreadable(image) or _undecodable(image)


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


def _undecodable(image: str | bytes) -> str | None:
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
    except PIL.Image.DecompressionBombError:
        return f"more pixels than PIL's limit of {limit:,}"
    except PIL.UnidentifiedImageError:
        return "no image"
    except Exception as error:  # PIL's decoders raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "truncated" if "truncated" in reason else f"damaged: {reason}"
    return None


def _verdicts(raw: Raw, known: Faults) -> Path | None:
    """The file of what was found in these very images; None if they cannot be told from others."""
    from platformdirs import user_cache_dir

    files: list[Iterator[Any]] = []
    for split, rows in raw.splits.items():
        if isinstance(next((image for _, image in _items(raw, split)), b""), str):
            files.append(image for _, image in _items(raw, split) if isinstance(image, str))
        elif rows.cache_files:
            files.append(iter([file["filename"] for file in rows.cache_files]))
        else:
            return None
    sizes: Mapping[str, int] = {split: len(rows) for split, rows in raw.splits.items()}
    bad = {split: sorted(rows) for split, rows in known.items()}
    digest = stamp(map(Path, chain.from_iterable(files)), sizes, bad, [str(raw.root)])
    return Path(user_cache_dir("razorctl")) / "images" / f"{digest}.json"
