"""Folders of drawings that tests train on: a class per folder, as a user would have them."""

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
CORNERS = {"square": 4, "triangle": 3}
BRIGHTNESS = np.array([0.299, 0.587, 0.114])  # of red, green and blue
UPRIGHT = {"square": math.pi / 4, "triangle": -math.pi / 2}


def drawing(shape: str, draw: np.random.Generator) -> Image.Image:
    """A filled shape, tilted a little, on a plain ground of another brightness, in a noisy image.

    Its colors, size and place vary, and so do the sides of the image, from 3:4 to 4:3. It lies in
    the square in the middle, as a model sees no more of a photo.
    """
    width = int(draw.integers(80, 320))
    height = int(width * draw.uniform(0.75, 1.33))
    ground, color = draw.integers(0, 256, (2, 3))
    while abs((ground - color) @ BRIGHTNESS) < 50:
        ground, color = draw.integers(0, 256, (2, 3))
    image = Image.new("RGB", (width, height), tuple(map(int, ground)))
    side = min(width, height)
    radius = draw.uniform(0.25, 0.45) * side
    play = side / 2 - radius
    x, y = (whole / 2 + draw.uniform(-play, play) for whole in (width, height))
    pen, fill = ImageDraw.Draw(image), tuple(map(int, color))
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    else:
        first = UPRIGHT[shape] + draw.uniform(-math.pi / 12, math.pi / 12)
        corners = [first + 2 * math.pi * n / CORNERS[shape] for n in range(CORNERS[shape])]
        pen.polygon(
            [(x + radius * math.cos(at), y + radius * math.sin(at)) for at in corners], fill
        )
    noise = draw.normal(0, 4, (height, width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def shapes(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder with `count` drawings in folders circle, square and triangle."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        (folder / shape).mkdir(parents=True, exist_ok=True)
        suffix = "png" if number % 2 else "jpg"
        drawing(shape, draw).save(folder / shape / f"{number}.{suffix}")
    return folder
