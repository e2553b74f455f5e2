"""Images are decoded by a list of formats, and whatever training could not decode is a bad row."""

import ast
import errno
import os
import subprocess
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as Feature
from PIL.ExifTags import Base

import razorctl
from razorctl import data
from razorctl.config.job import Job
from razorctl.data.own import decoding, images, masks, whole
from razorctl.errors import DataError, lacks_memory
from razorctl.models.images import MODES, converted
from razorctl.system import documents
from tests import local_hub
from tests.own import photos, picture, refuses

PIL.Image.init()
KNOWN = [name for name in decoding.FORMATS if name in PIL.Image.OPEN]
UNKNOWN = sorted({*PIL.Image.OPEN} - {*KNOWN})
UNREAD = "no image of a known format: save it as PNG"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(hostile) run\n"


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    """No process is started, and no image is opened by another list."""

    def refuse(*_, **__):
        raise AssertionError("a process")

    opened = PIL.Image.open

    def checked(fp, mode="r", formats=None):
        assert formats == tuple(KNOWN)
        return opened(fp, mode, formats)

    for module, names in ((subprocess, ("Popen",)), (os, ("system", "posix_spawn", "execv"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(PIL.Image, "open", checked)


def saved(kind: str, mode: str = "RGB") -> bytes | None:
    """An image of a format; None if PIL cannot write it."""
    content = BytesIO()
    try:
        PIL.Image.new(mode, (16, 16)).save(content, kind)
    except (KeyError, OSError, ValueError, SystemError, AttributeError):
        return None
    return content.getvalue()


@pytest.mark.parametrize("kind", KNOWN)
def test_formats_of_the_list_are_decoded(kind):
    picture(Path("a.png")).write_bytes(content := saved(kind))
    for image in (content, "a.png"):
        assert images.image_fault(None, image) is None
        stored = {"bytes": None, "path": image} if image == "a.png" else {"bytes": image}
        decoded = decoding.Decoded().decode_example({"path": None, **stored})
        assert (decoded.size, decoded.format) == ((16, 16), kind)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_formats_are_refused_with_the_file(kind, monkeypatch):
    """Whatever the file has, their decoders are not asked."""

    def decoder(*_):
        raise AssertionError(kind)

    monkeypatch.setitem(PIL.Image.OPEN, kind, (decoder, None))
    photos(Path("d"))
    content = saved(kind, "P" if kind == "GIF" else "RGB") or EPS
    Path("d/car/0.png").write_bytes(content)
    refuses(DataError, rf"1 bad row: car/0.png \({UNREAD}\)", "vit-micro", "d")
    assert images.image_fault(None, content) == UNREAD


def test_postscript_starts_nothing_wherever_it_lies():
    """Ghostscript would run it: in a folder, a table of bytes, a mask, and rows to predict."""
    photos(Path("d"))
    for file in (Path("d/car/eps.png"), Path("eps.png")):
        file.write_bytes(EPS)
    assert data.source_of(Job("vit-micro", "d", skip_bad=True)).load().skipped == (
        f"car/eps.png ({UNREAD})",
    )
    rows, skipped = whole.unlabeled(
        ["eps.png", "d/car/0.jpg"], Job("vit-micro", "none", skip_bad=True), "image"
    )
    assert skipped == (f"eps.png ({UNREAD})",)
    assert len(rows[0].data[:]["image"]) == 1
    assert masks._look(None, str(Path("d/car/0.jpg")), EPS)[0] == f"mask: {UNREAD}"
    assert images.size_of(None, EPS) is None
    with pytest.raises(PIL.UnidentifiedImageError):
        decoding.Decoded().decode_example({"bytes": EPS, "path": None})


def test_images_in_lists_are_not_decoded_to_see_what_a_set_of_the_hub_has(hub):
    columns = {"images": [[{"bytes": EPS, "path": None}]] * 8, "text": ["a b"] * 8}
    kinds = {"images": List(Feature()), "text": Value("string"), "label": Value("string")}
    rows = Dataset.from_dict({**columns, "label": ["x", "y"] * 4}, Features(kinds))
    local_hub.cache(hub, "dataset", "some/set", lambda to: rows.to_parquet(to / "a.parquet"))
    assert data.source_of(Job("bert-base", "hf:some/set")).load().classes == ("x", "y")


def test_rows_are_decoded_here_after_whatever_is_done_with_them():
    photos(Path("d"))
    splits = data.source_of(Job("vit-micro", "d")).load()
    digits = data.find("digits").load()
    for rows in (splits.train, digits.train, digits.test):
        for same in (
            rows,
            whole.whitened(rows.select([1, 0]), 255),
            rows.select_columns(["image"]),
        ):
            assert type(same.features["image"]) is decoding.Decoded
            assert same[0]["image"].size


MODES_OF_FILES = sorted({*PIL.Image.MODES, "I;16", "I;16B", "LAB", "HSV", "La", "RGBa", "PA"})


@pytest.mark.parametrize("kind", KNOWN)
def test_the_check_finds_all_that_cannot_be_converted(kind):
    contents = {mode: saved(kind, mode) for mode in MODES_OF_FILES}
    assert any(contents.values())
    for content in filter(None, contents.values()):
        if images._look(None, content)[0]:
            continue
        for mode in MODES:
            decoded = decoding.Decoded().decode_example({"bytes": content, "path": None})
            assert converted(decoded).convert(mode).size == (16, 16)


def chunk(kind: bytes, content: bytes) -> bytes:
    check = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + check


def png(*chunks: bytes, color: int = 3) -> bytes:
    head = bytes([0, 0, 0, 4, 0, 0, 0, 4, 8, color, 0, 0, 0])
    pixels = zlib.compress(bytes(20))
    every = (chunk(b"IHDR", head), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(every)


def turned(orientation: int, more: bytes = b"") -> bytes:
    exif, content = PIL.Image.Exif(), BytesIO()
    exif[Base.Orientation] = orientation
    PIL.Image.new("RGB", (9, 7)).save(content, "JPEG", exif=exif.tobytes() + more)
    return content.getvalue()


ODD = {
    "a palette without colors": (png(), "of mode P, which cannot be converted to RGB"),
    "a palette of one color": (png(chunk(b"PLTE", b"\1\2\3")), ""),
    "a transparent palette without colors": (png(chunk(b"tRNS", b"\0")), ""),
    "gray and transparent": (png(chunk(b"tRNS", b"\0\1"), color=0), ""),
    "LAB": (saved("TIFF", "LAB"), ""),
    "CMYK": (saved("JPEG", "CMYK"), ""),
    "on its side": (turned(6), ""),
    "turned as nobody knows": (turned(77), ""),
    "no bytes": (b"", "zero bytes"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_images_are_trained_on_or_bad_rows(case):
    content, said = ODD[case]
    fault, *_ = images._look(None, content)
    assert fault.startswith(said)
    assert bool(fault) == bool(said)
    if not fault:
        decoded = decoding.Decoded().decode_example({"bytes": content, "path": None})
        assert [converted(decoded).convert(mode).mode for mode in MODES] == [*MODES]
        assert decoded.size == ((7, 9) if case == "on its side" else decoded.size)


def test_what_cannot_be_converted_is_named_while_training():
    rows = {"image": {"bytes": png(), "path": "a/6.png"}}
    assert images.unreadable_image(rows).startswith("a/6.png (of mode P")


LINKS = {
    "a class again": ("bike", "car", None),
    "the folder itself": ("bike", ".", "bike (a link to a folder around it)"),
    "the folder around it": ("bike", "..", "bike (a link to a folder around it)"),
    "nothing": ("bike", "none", "bike (in no class folder)"),
    "a link to itself": ("bike", "bike", "bike (in no class folder)"),
    "an image to itself": ("car/x.png", "x.png", "car/x.png (Too many levels of symbolic links)"),
}


@pytest.mark.parametrize("case", LINKS)
def test_links_are_followed_or_bad_rows(case):
    link, to, said = LINKS[case]
    photos(Path("top/d"))
    Path("top/d", link).symlink_to(to)
    splits = data.source_of(Job("vit-micro", "top/d", skip_bad=True)).load()
    assert splits.skipped == (() if said is None else (said,))
    assert ("bike" in splits.classes) == (said is None)


def test_memory_that_runs_out_is_not_the_fault_of_an_image(monkeypatch):
    def lacks(*_):
        raise MemoryError

    monkeypatch.setattr(decoding, "opened", lacks)
    for look in (images.content_fault, partial(images.size_of, None)):
        with pytest.raises(MemoryError):
            look(b"an image")
    monkeypatch.undo()
    monkeypatch.setattr(images, "converted", lacks)
    with pytest.raises(MemoryError):
        images._look(None, saved("PNG", "P"))


@pytest.mark.parametrize("call", ["open", "stat"])
def test_memory_that_the_system_lacks_is_not_the_fault_of_a_file(call, monkeypatch):
    photos(Path("d"))
    Path("d/car/a.json").write_text("{}")
    real, lacking = getattr(os, call), OSError(errno.ENOMEM, "Cannot allocate memory")

    def lacks(path, *more, **settings):
        if str(path).startswith("d/car/"):
            raise lacking
        return real(path, *more, **settings)

    monkeypatch.setattr(os, call, lacks)
    reads = {"open": documents.read_foreign, "stat": images._unreadable}
    with pytest.raises((MemoryError, OSError)) as caught:
        reads[call]("d/car/a.json")
    assert lacks_memory(caught.value)


def test_nothing_else_opens_images():
    """Neither PIL nor a column of `datasets` decodes anywhere else in the package."""
    root = Path(razorctl.__file__).parent
    calls = {
        (file.relative_to(root).as_posix(), ast.unparse(node.func))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    }
    found = {(file, call) for file, call in calls if call.endswith(("Image.open", "Image"))}
    stored = ("data/own/in_memory.py", "datasets.Image")  # names a type of stored columns
    assert found == {("data/own/decoding.py", "PIL.Image.open"), stored}
    assert np.all([call != "Decoded" or "decoding" in file for file, call in calls])
