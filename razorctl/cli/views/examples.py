"""Held-out rows with labels and predictions: a picture of images, or an HTML page of texts."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.views import html
from razorctl.cli.views.common import title
from razorctl.cli.views.terminal import clean
from razorctl.units import count, percent

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

    from razorctl.training.predicting.examples import Example, Examples

COLUMNS, ROWS = 3, 8  # cells
SIDE, GAP = 300, 12  # pixels of a cell, and between cells
SIZE, LINE = 28, 36  # pixels of text, which is legible where the picture is 360 pixels wide
DARK, RED = "#1f2328", "#c0262d"
LONGEST, MOST = 500, 30  # characters of a text or a name, and classes of a legend
COLORED = ("segmentation", "detection")  # tasks that show an image, its label and its prediction
Cell = tuple["Image", Sequence[str], str]  # an image, the lines below, and the color of the last


def _heading(examples: "Examples") -> str:
    rows = count(len(examples.rows), "held-out row")
    if examples.wrong is None:
        return f"{rows}, the largest errors first."
    return f"{examples.wrong:,} of {rows} predicted wrong, the worst first."


def picture(examples: "Examples") -> "Image":
    """The images with labels and predictions, for screens of 360 to 1,200 pixels."""
    from PIL import Image, ImageDraw

    job, font = examples.run.job, _font()
    colored = job.task in COLORED
    cells = [*_cells(examples, font)] if colored else [*_plain_cells(examples)]
    about = "Below an image: its label, then the prediction, red if it is wrong."
    if colored:
        about = "From left to right: an image, its label, the prediction."
    width = COLUMNS * (SIDE + GAP) + GAP
    texts = (title(job.model, job.dataset), _heading(examples), about)
    head = [line for text in texts for line in _wrapped(text, font, width - 2 * GAP)]
    legend = _legend(examples)[:MOST] if colored else []
    begin = GAP + LINE * (len(head) + -(-len(legend) // COLUMNS)) + GAP
    deep = SIDE + 2 * LINE + GAP
    sheet = Image.new("RGB", (width, begin + deep * -(-len(cells) // COLUMNS)), "white")
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
        for place, line in enumerate(lines):
            ink = end if line is lines[-1] else DARK
            draw.text((left, top + SIDE + place * LINE), _cut(line, font, SIDE), ink, font)
    return sheet


def _plain_cells(examples: "Examples") -> Iterator[Cell]:
    for each in examples.examples:
        lines = (each.label, each.guess or "no label")
        yield _image(examples, each), lines, RED if each.wrong else DARK


def _cells(examples: "Examples", font: Any) -> Iterator[Cell]:
    """Three cells of each row, for the image, the label and the prediction."""
    masks = examples.run.job.task == "segmentation"
    for each in examples.examples[:ROWS]:
        image = _image(examples, each)
        share = f"{percent(each.error)} of pixels wrong" if masks else f"{each.error:g} wrong"
        yield image, _wrapped(share, font, SIDE), DARK
        for words, part in zip((each.label, each.guess), each.parts or (), strict=True):
            paint = _painted if masks else _boxed
            lines = _wrapped(words or "no label", font, SIDE)
            yield paint(examples, each, image.copy(), part), lines[:2], DARK


def _image(examples: "Examples", example: "Example") -> "Image":
    """The image of a row, which fits a cell; pixels of small images stay sharp."""
    from PIL import Image, ImageOps

    from razorctl.models.images import converted

    row = examples.rows[example.index]
    image = converted(row["image"], row.get("white")).convert("RGB")
    small = max(image.size) < SIDE // 2
    way = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return ImageOps.contain(image, (SIDE, SIDE), way)


def _palette(examples: "Examples") -> "np.ndarray[Any, Any]":
    """The color [red, green, blue] of each class; in detection the first one is not black."""
    import numpy as np

    from razorctl.training.predicting import masks

    job = examples.run.job
    colors = np.array(masks.palette(job.mask_colors)).reshape(-1, 3)
    return np.roll(colors, -1, 0) if job.task == "detection" else colors


def _color(palette: "np.ndarray[Any, Any]", number: int) -> tuple[int, ...]:
    return tuple(map(int, palette[number % len(palette)]))


def _legend(examples: "Examples") -> list[tuple[str, tuple[int, ...]]]:
    """The classes in the labels and predictions, with their colors."""
    palette, classes = _palette(examples), examples.run.classes
    parts = [part for each in examples.examples[:ROWS] for part in each.parts or ()]
    if examples.run.job.task == "segmentation":
        numbers = {number for mask in parts for number in mask.unique().tolist() if number >= 0}
    else:
        numbers = {classes.index(one.label) for objects in parts for one in objects}
    return [(classes[number], _color(palette, number)) for number in sorted(numbers)]


def _painted(examples: "Examples", _: "Example", image: "Image", mask: "Tensor") -> "Image":
    """An image with the colors of a mask [height, width] over it, but for pixels without label."""
    import numpy as np
    from PIL import Image

    palette, pixels = _palette(examples), np.asarray(image)
    sized = Image.fromarray(mask.int().numpy()).resize(image.size, Image.Resampling.NEAREST)
    numbers = np.asarray(sized)[..., None]
    mixed = 0.4 * pixels + 0.6 * palette[numbers[..., 0] % len(palette)]
    return Image.fromarray(np.where(numbers < 0, pixels, mixed).astype(np.uint8))


def _boxed(examples: "Examples", example: "Example", image: "Image", objects: Any) -> "Image":
    """An image with the boxes of objects."""
    from PIL import ImageDraw

    palette, draw = _palette(examples), ImageDraw.Draw(image)
    scale = image.width / examples.rows[example.index]["image"].width
    for one in objects:
        color = _color(palette, examples.run.classes.index(one.label))
        box = [scale * side for side in (one.left, one.top, one.right, one.bottom)]
        draw.rectangle(box, outline=color, width=4)
    return image


def _font() -> Any:
    """The font of matplotlib, which has Latin, Greek, Cyrillic and Arabic letters."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf", SIZE)


def _cut(text: str, font: Any, width: int) -> str:
    """The text on one line that is at most `width` pixels wide."""
    text = clean(" ".join(text.split()))[:LONGEST]
    shown = text
    while text and font.getlength(shown) > width:
        text = text[:-1]
        shown = f"{text}…"
    return shown


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """The text in lines that are at most `width` pixels wide, but for longer words."""
    lines = [""]
    for word in clean(text)[:LONGEST].split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines += [word]
    return [line for line in lines if line]


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
        guess = f'<span style="color:{RED}">{guess}</span>'
    said = " <b>|</b> ".join(map(escape, texts))
    return f"<hr><p>{said}</p><p><b>{escape(example.label)}</b> &rarr; <b>{guess}</b></p>"


def _tagged(row: Any, example: "Example") -> str:
    assert example.parts is not None
    words = []
    for token, tag, guess in zip(row["tokens"], *example.parts, strict=True):
        shown = escape(token)
        if tag and guess and tag != guess:
            shown += f' <small>{escape(tag)} <b style="color:{RED}">{escape(guess)}</b></small>'
        elif tag not in ("", "O"):
            shown += f" <small>{escape(tag)}</small>"
        words.append(shown)
    return f"<hr><p>{' '.join(words)}</p>"
