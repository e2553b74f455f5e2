"""Razor convolutions that keeps everything against stock, on drawn geometries of contiguous images.

A program of its own: a kernel that writes where it must not kills its process.
"""

import random

import torch
from torch import Tensor, nn

from razorctl.layers.base import LayerSettings
from razorctl.layers.kinds.conv import Conv2d
from razorctl.rules.base import Rules
from razorctl.rules.dense import Dense
from razorctl.rules.prune import Columns

CASES = 500
TOLERANCE = 2e-5


def draw(rng: random.Random) -> tuple[nn.Conv2d, Tensor]:
    """A stock layer and an image that is large enough for it."""
    while True:
        groups, stride = rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 3)
        kernel = rng.choice((1, rng.randint(1, 7))), rng.choice((1, rng.randint(1, 7)))
        channels = groups * rng.randint(1, 5)
        layer = nn.Conv2d(
            channels,
            groups * rng.randint(1, 17),
            kernel,
            stride=rng.choice((stride, (stride, rng.randint(1, 3)))),
            padding=tuple(rng.randint(0, k // 2) for k in kernel),
            dilation=rng.randint(1, 2),
            groups=groups,
            bias=rng.random() < 0.5,
        )
        height = rng.choice((rng.randint(1, 15), 64, 65))
        image = torch.rand(rng.randint(1, 2), channels, height, height + rng.choice((0, 0, 1, 2)))
        sides = zip(image.shape[2:], layer.padding, layer.dilation, kernel, strict=True)
        if all(side + 2 * p > d * (k - 1) for side, p, d, k in sides):
            return layer, image


def gradients(layer: nn.Conv2d, image: Tensor) -> list[Tensor]:
    """Of the input and of every parameter."""
    layer.zero_grad()
    image = image.clone().requires_grad_()
    y = layer(image)
    torch.manual_seed(0)
    y.backward(torch.rand_like(y))  # positive, as the image is, so that no sum cancels
    return [t.grad for t in (image, *layer.parameters())]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    for number in range(CASES):
        layer, image = draw(rng)
        print(number, tuple(image.shape), layer, flush=True)  # the last one before a crash
        want = gradients(layer, image)
        rule = Columns(1.0) if layer.groups == 1 and number % 2 else Dense()
        Conv2d.attach(layer, Rules(rule, rule), LayerSettings())
        for a, b in zip(gradients(layer, image), want, strict=True):
            assert (a - b).norm() <= TOLERANCE * b.norm(), ((a - b).norm() / b.norm()).item()


if __name__ == "__main__":
    main()
