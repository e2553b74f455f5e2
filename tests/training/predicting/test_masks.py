"""Masks as files."""

import numpy as np
import torch
from PIL import Image

from razorctl.models.masks import MODES
from razorctl.training.predicting import masks


def test_colors_are_those_of_pascal_voc():
    colors = {1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 4: (0, 0, 128), 8: (64, 0, 0)}
    colors |= {0: (0, 0, 0), 20: (0, 64, 128), 255: (224, 224, 192)}
    palette = np.array(masks.palette()).reshape(256, 3)
    assert {number: tuple(palette[number]) for number in colors} == colors
    assert len({tuple(color) for color in palette}) == 256
    assert masks.palette("000000=ignore,0000ff=a,ff0000=b,00ff00=a") == [0, 0, 255, 255, 0, 0]


def test_more_classes_than_a_byte_has_are_written_in_16_bits(tmp_path):
    mask = torch.tensor([[0, 255, 256], [299, 1, 2]])
    for classes, values in ((300, mask), (256, mask.clamp(max=255))):
        file = tmp_path / f"{classes}.png"
        masks._save(values, classes, file, masks.palette())
        with Image.open(file) as image:
            assert image.mode in MODES
            np.testing.assert_array_equal(np.asarray(image), values)


def test_classes_of_resized_logits_are_found_in_parts(monkeypatch):
    logits = torch.randn(5, 6, 7)
    size = [13, 9]
    resized = torch.nn.functional.interpolate(logits[None], size, mode="bilinear")
    monkeypatch.setattr(masks, "ROOM", 2 * 4 * 13 * 9)  # two classes at a time
    torch.testing.assert_close(masks._greatest(logits, size), resized[0].argmax(0))
