"""Which training rows are held out, a share of each class or whole images, and which are used."""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from razorctl.data.own.raw import RawRows, content

if TYPE_CHECKING:
    import numpy as np


def held_out_count(rows: int, share: float) -> int:
    """The number of rows to hold out of `rows`, if no class has too few."""
    return max(round(share * rows), int(share > 0))


def stratified(labels: "np.ndarray[Any, Any]", share: float, seed: int) -> "np.ndarray[Any, Any]":
    """The positions, ascending, of a share of the labels [n], about the same of each class.

    The numbers of classes are rounded by largest remainders; the seed decides between equal ones.
    Each class keeps a label.
    """
    import numpy as np

    draw = np.random.RandomState(seed)  # of the generators the one whose draws never change
    counts = np.bincount(labels)
    quota = share * counts
    most = np.maximum(counts - 1, 0)
    taken = np.minimum(quota.astype(int), most)
    left = held_out_count(len(labels), share) - taken.sum()
    for number in np.lexsort((draw.rand(len(counts)), taken - quota)):
        if left > 0 and taken[number] < most[number]:
            taken[number] += 1
            left -= 1
    shuffled = draw.permutation(len(labels))
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    ranges = [grouped[start : start + n] for start, n in zip(starts, taken, strict=True)]
    return np.sort(np.concatenate(ranges))


def limited(labels: "np.ndarray[Any, Any]", most: int | None, seed: int) -> "np.ndarray[Any, Any]":
    """The positions, ascending, of at most `most` of the labels [n], as many as they can be.

    Each class has about its share, and if `most` allows it a label. None is all.
    """
    import numpy as np

    every = np.arange(len(labels))
    if most is None or most >= len(labels):
        return every
    kept = np.setdiff1d(every, stratified(labels, 1 - most / len(labels), seed))
    return np.sort(np.random.RandomState(seed).permutation(kept)[:most])


def whole_images(images: "np.ndarray[Any, Any]", share: float, seed: int) -> "np.ndarray[Any, Any]":
    """The positions, ascending, of all rows of a share of the images, by their numbers [n]."""
    import numpy as np

    every, places = np.unique(images, return_inverse=True)
    return np.flatnonzero(np.isin(places, stratified(np.zeros(len(every), int), share, seed)))


def image_numbers(raw: RawRows) -> "np.ndarray[Any, Any]":
    """A number for the image of each training row, equal for equal paths or bytes."""
    import numpy as np

    seen: dict[Any, int] = {}
    images = (content(image.as_py()) for image in raw.splits["train"].data.column("image"))
    keys = (blake2b(key).digest() if isinstance(key, bytes) else key for key in images)
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.int64)
