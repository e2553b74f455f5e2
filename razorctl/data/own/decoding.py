"""The one way to decode images: by a list of formats, and upright."""

from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import PIL.Image
from datasets import Dataset, Image
from PIL.ExifTags import Base
from PIL.ImageOps import exif_transpose

from razorctl.data.own.raw import content

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

# PIL's own decoders, and the libraries in it, read them; others open files inside with any decoder
# (IPTC), or start another program (EPS). TGA has no signature, so it is last.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "JPEG2000", "AVIF", "TGA")


@cache
def formats() -> tuple[str, ...]:
    """The FORMATS that the installed PIL has."""
    PIL.Image.init()
    return tuple(name for name in FORMATS if name in PIL.Image.OPEN)


def opened(image: str | bytes) -> "ImageFile":
    """An image by its path or its bytes, not yet decoded; raises what PIL raises."""
    return PIL.Image.open(BytesIO(image) if isinstance(image, bytes) else image, "r", formats())


def upright(image: PIL.Image.Image) -> PIL.Image.Image:
    """A decoded image, turned as its EXIF orientation demands."""
    return image if image.getexif().get(Base.Orientation) is None else exif_transpose(image)


class Decoded(Image):  # type: ignore[misc]
    """A column of images that are decoded here; `datasets` would use all decoders of PIL."""

    def decode_example(self, value: Any, token_per_repo_id: Any = None) -> Any:
        if not isinstance(value, (dict, str)):
            return value
        image = opened(content(value))
        image.load()  # which closes the file
        return upright(image)


def as_images(rows: Dataset) -> Dataset:
    """Rows whose columns of images and masks are `Decoded`, whatever type the files give them."""
    for name in sorted({"image", "mask"} & {*rows.column_names}):
        rows = rows.cast_column(name, Decoded())
    return rows
