"""Held-out rows with labels and predictions: a picture of images, or an HTML page of texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from razorctl.cli.views import html
from razorctl.cli.views.common import title
from razorctl.cli.views.terminal import clean
from razorctl.units import count, percent

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from razorctl.training.predicting.examples import Example, Examples

COLUMNS, ROWS = 3, 8  # cells
SIDE, GAP = 300, 12  # pixels of a cell, and between cells
SIZE, LINE = 28, 36  # pixels of text, which is legible where the picture is 360 pixels wide
SHORT, LONG = 20, 58  # characters of a line in a cell, and in the heading
DARK, RED = "#1f2328", "#c0262d"  # on white
WRONG = f'style="color:{html.COLORS["red"]}"'  # in a page, whose theme is the browser's
LONGEST, MOST = 500, 30  # characters of a text, and classes of a legend
Color = tuple[int, ...]
Cell = tuple["Image", Sequence[str], str]  # an image, the lines below, and the color of the last


def _heading(examples: "Examples") -> str:
    rows = count(len(examples.rows), "held-out row")
    if examples.wrong is None:
        return f"{rows}, the largest errors first."
    return f"{examples.wrong:,} of {rows} predicted wrong, the worst first."


def picture(examples: "Examples") -> "Image":
    """The images with labels and predictions, for screens of 360 to 1,200 pixels."""
    from PIL import Image, ImageDraw

    job, palette = examples.run.job, _palette(examples)
    cells = [cell for each in examples.examples for cell in _cells(examples, each, palette)]
    cells = cells[: COLUMNS * ROWS]
    about = "Below an image: its label, then the prediction, red if it is wrong."
    if len(cells) > len(examples.examples):
        about = "From left to right: an image, its label, the prediction."
    texts = (title(job.model, job.dataset), _heading(examples), about)
    head = [line for text in texts for line in wrap(clean(text), LONG)]
    legend = [*_legend(examples, palette)][:MOST]
    begin = GAP + LINE * (len(head) + -(-len(legend) // COLUMNS)) + GAP
    deep = SIDE + 2 * LINE + GAP
    size = COLUMNS * (SIDE + GAP) + GAP, begin + deep * -(-len(cells) // COLUMNS)
    names, below = [name for name, _ in legend], [line for cell in cells for line in cell[1]]
    sheet, font = Image.new("RGB", size, "white"), _font("".join((*head, *names, *below)))
    draw = ImageDraw.Draw(sheet)
    for at, line in enumerate(head):
        draw.text((GAP, GAP + at * LINE), line, DARK, font)
    for at, (name, color) in enumerate(legend):
        left, top = GAP + at % COLUMNS * (SIDE + GAP), GAP + LINE * (len(head) + at // COLUMNS)
        draw.rectangle((left, top + 6, left + 24, top + 30), color)
        draw.text((left + LINE, top), _cut(name, font, SIDE - LINE), DARK, font)
    for at, (image, lines, end) in enumerate(cells):
        left, top = GAP + at % COLUMNS * (SIDE + GAP), begin + at // COLUMNS * deep
        sheet.paste(image, (left + (SIDE - image.width) // 2, top + SIDE - image.height))
        for place, line in enumerate(lines[:2]):
            ink = end if line is lines[-1] else DARK
            draw.text((left, top + SIDE + place * LINE), _cut(line, font, SIDE), ink, font)
    return sheet


def _cells(examples: "Examples", example: "Example", palette: Sequence[Color]) -> Iterator[Cell]:
    """A cell with an image; in segmentation and detection also one for the label and the guess."""
    image = _image(examples, example)
    if example.parts is None:
        yield image, (example.label, example.guess), RED if example.wrong else DARK
        return
    masks, classes = example.wrong is None, examples.run.classes
    scale = image.width / examples.rows[example.index]["image"].width
    error = f"{percent(example.error)} of pixels wrong" if masks else f"{example.error:g} wrong"
    yield image, wrap(error, SHORT), DARK
    for words, part in zip((example.label, example.guess), example.parts, strict=True):
        if masks:
            shown = _painted(image, part, palette)
        else:
            shown = _boxed(image, part, scale, dict(zip(classes, cycle(palette), strict=False)))
        yield shown, wrap(words or "no label", SHORT), DARK


def _image(examples: "Examples", example: "Example") -> "Image":
    """The image of a row, which fits a cell; pixels of small images stay sharp."""
    from PIL import Image, ImageOps

    from razorctl.models.images import converted

    row = examples.rows[example.index]
    image = converted(row["image"], row.get("white")).convert("RGB")
    small = max(image.size) < SIDE // 2
    way = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return ImageOps.contain(image, (SIDE, SIDE), way)


def _palette(examples: "Examples") -> Sequence[Color]:
    """Red, green and blue of each class; in detection the first one is not black."""
    from razorctl.training.predicting import masks

    numbers = iter(masks.palette(examples.run.job.mask_colors))
    colors = [*zip(numbers, numbers, numbers, strict=True)]
    return colors[1:] if examples.run.job.task == "detection" else colors


def _legend(examples: "Examples", palette: Sequence[Color]) -> Iterator[tuple[str, Color]]:
    """The classes in the labels and guesses of the shown rows, with their colors."""
    masks = examples.run.job.task == "segmentation"
    parts = [part for each in examples.examples[:ROWS] for part in each.parts or ()]
    names = set() if masks else {one.label for objects in parts for one in objects}
    for number, name in enumerate(examples.run.classes):
        if name in names or (masks and any((mask == number).any() for mask in parts)):
            yield name, palette[number % len(palette)]


def _boxed(image: "Image", objects: Any, scale: float, colors: Mapping[str, Color]) -> "Image":
    """An image with the boxes of objects in the colors of their classes."""
    from PIL import ImageDraw

    shown = image.copy()
    for one in objects:
        box = [scale * side for side in (one.left, one.top, one.right, one.bottom)]
        ImageDraw.Draw(shown).rectangle(box, outline=colors[one.label], width=4)
    return shown


def _font(text: str) -> Any:
    """The font of matplotlib, or an installed one that lacks fewer letters of a text.

    That of matplotlib has Latin, Greek, Cyrillic and Arabic letters.
    """
    from matplotlib import get_data_path
    from matplotlib.font_manager import findSystemFonts
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    def lacks(font: FT2Font) -> int:
        return len(letters.difference(font.get_charmap()))

    letters = {ord(letter) for letter in text if not letter.isspace()}
    best = FT2Font(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf")
    for file in sorted(findSystemFonts()) if lacks(best) else ():
        with suppress(OSError, RuntimeError):  # one of emoji has a size of its own
            font = FT2Font(file)
            # The last resort has a sign for a block of letters.
            plain = font.style_name == "Regular" and "LastResort" not in font.postscript_name
            if plain and lacks(font) < lacks(best) and ImageFont.truetype(file, SIZE):
                best = font
    return ImageFont.truetype(best.fname, SIZE)


def _cut(text: str, font: Any, width: int) -> str:
    """The text on one line that is at most `width` pixels wide."""
    shown = text = clean(" ".join(text.split()))[:LONGEST]
    while text and font.getlength(shown) > width:
        text = text[:-1]
        shown = f"{text}…"
    return shown


def _painted(image: "Image", mask: "Tensor", palette: Sequence[Color]) -> "Image":
    """An image with the colors of a mask [height, width] over it, but for pixels without label."""
    import numpy as np
    from PIL import Image

    pixels, colors = np.asarray(image), np.array(palette)
    sized = Image.fromarray(mask.int().numpy()).resize(image.size, Image.Resampling.NEAREST)
    numbers = np.asarray(sized)[..., None]
    mixed = 0.4 * pixels + 0.6 * colors[numbers[..., 0] % len(colors)]
    return Image.fromarray(np.where(numbers < 0, pixels, mixed).astype(np.uint8))


def page(examples: "Examples") -> str:
    """The texts with labels and predictions, as a whole HTML page."""
    tags = examples.run.job.task == "token-classification"
    show = _tagged if tags else _text
    about = "Below a text: its label, then the prediction, red if it is wrong."
    if tags:
        about = "Tokens with their tags; where the prediction is wrong, it follows in red."
    parts = [f"<p>{escape(_heading(examples))} {about}</p>"]
    parts += [show(examples.rows[each.index], each) for each in examples.examples]
    job = examples.run.job
    return clean(html.whole(f"Predictions: {title(job.model, job.dataset)}", parts))


def _text(row: Any, example: "Example") -> str:
    texts = [str(row[name])[:LONGEST] for name in ("text", "text_pair") if row.get(name)]
    guess = escape(example.guess)
    if example.wrong:
        guess = f"<span {WRONG}>{guess}</span>"
    said = " <b>|</b> ".join(map(escape, texts))
    return f"<hr><p>{said}</p><p><b>{escape(example.label)}</b> &rarr; <b>{guess}</b></p>"


def _tagged(row: Any, example: "Example") -> str:
    assert example.parts is not None
    words = []
    for token, tag, guess in zip(row["tokens"], *example.parts, strict=True):
        shown = escape(token)
        if tag and guess and tag != guess:
            shown += f" <small>{escape(tag)} <b {WRONG}>{escape(guess)}</b></small>"
        elif tag not in ("", "O"):
            shown += f" <small>{escape(tag)}</small>"
        words.append(shown)
    return f"<hr><p>{' '.join(words)}</p>"
