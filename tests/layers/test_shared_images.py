"""One copy of an image for a norm, the activation function after it, and what both feed."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from timm import layers as timm_layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.layers.base import LayerSettings
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.layers.shared_copies.memo import Memo
from razorctl.ops.images import memory_format, pixels, unrolled
from razorctl.ops.packing import packed_bytes
from razorctl.rules.base import Rule
from razorctl.rules.prune import TopK
from razorctl.rules.quantized import Quantized
from tests.cases import both, norm
from tests.layers.test_every_layer import assert_close

WIDTH, SIDE, BATCH = 8, 6, 3
ROWS = BATCH * SIDE**2
ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.SiLU, nn.GELU),
    *(partial(f, inplace=True) for f in (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.SiLU)),
)
every_activation = pytest.mark.parametrize(
    "activation", ACTIVATIONS, ids=lambda build: str(build())
)


def stack(activation: nn.Module, normed: nn.Module | None = None) -> nn.Sequential:
    normed = norm(nn.BatchNorm2d(WIDTH)) if normed is None else normed
    return nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
        normed,
        activation,
        nn.Conv2d(WIDTH, WIDTH, 3, stride=2, groups=2),
    ).train()


def sparse(model: nn.Module, rule: Rule) -> nn.Module:
    """The model with one rule for every layer, and copies that are shared."""
    memo = Memo()
    for module in list(model.modules()):
        razor = razor_for(module)
        if razor is not None:
            razor.attach(module, both(rule), LayerSettings(memo))
    return model


def image() -> Tensor:
    return torch.randn(BATCH, WIDTH, SIDE, SIDE, requires_grad=True)


def gradients(model: nn.Module, x: Tensor, **how: object) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = checkpoint(model, x, **how) if how else model(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).sin())
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def copies(bits: int) -> int:
    """The bytes of a copy of a [ROWS, WIDTH] activation, of one tile a column."""
    return packed_bytes(ROWS, WIDTH, bits) + WIDTH * (2 + 2)


@every_activation
def test_what_is_saved_to_the_byte(activation):
    model = sparse(stack(activation()), Quantized(4))
    of_y = WIDTH * 4  # the scales of y, beside those of x_hat
    bits = ROWS * WIDTH // 8 if "ReLU" in type(model[2]).__name__ else 0
    rstd = WIDTH * 4
    assert saved_bytes(model, image()) == 2 * copies(4) + of_y + rstd + bits


@every_activation
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_are_those_of_layers_that_share_nothing(activation, channels_last):
    torch.manual_seed(0)
    model = stack(activation())
    x = image()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    want = gradients(model, x)
    got = gradients(sparse(copy.deepcopy(model), Quantized(8)), x)
    assert torch.equal(got[0], want[0])
    # Its derivative jumps, and a few elements are on the other side.
    assert_close(got, want, 0.1 if isinstance(model[2], nn.Hardswish) else 0.02)
    # A rule whose copies nobody shares
    alone = gradients(sparse(alone, TopK(1.0)), x)
    assert torch.equal(alone[0], want[0])
    assert_close(alone, want, 1e-5)


@pytest.mark.parametrize(
    "normed",
    [
        norm(nn.GroupNorm(2, WIDTH)),
        norm(timm_layers.LayerNorm2d(WIDTH)),
        norm(timm_layers.BatchNormAct2d(WIDTH, act_layer=nn.SiLU)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_norms_share_too(normed):
    model = stack(nn.Identity() if hasattr(normed, "act") else nn.SiLU(), copy.deepcopy(normed))
    x = image()
    want = gradients(copy.deepcopy(model), x)
    model = sparse(model, Quantized(8))
    got = gradients(model, x)
    assert torch.equal(got[0], want[0])
    assert_close(got, want, 0.02)
    assert saved_bytes(model, x) < 2 * copies(8) + 4 * ROWS + 8 * WIDTH + BATCH * WIDTH * 4


def test_a_change_in_place_after_the_norm_is_seen():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)
            self.act, self.last = nn.ReLU(inplace=True), nn.Conv2d(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x))
            y += x
            return self.last(self.act(y))

    torch.manual_seed(0)
    model, x = Residual().train(), image()
    want = gradients(copy.deepcopy(model), x)
    got = gradients(sparse(model, Quantized(8)), x)
    assert torch.equal(got[0], want[0])
    assert_close(got, want, 0.02)


def test_two_branches_of_one_image_take_one_copy():
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3), nn.Conv2d(WIDTH, WIDTH, 1))
            self.right = nn.Conv2d(WIDTH, WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) + self.right(x)

    model = sparse(Branches().train(), Quantized(8))
    inner = packed_bytes(BATCH * (SIDE - 2) ** 2, WIDTH, 8) + WIDTH * 4
    assert saved_bytes(model, image()) == copies(8) + inner


@pytest.mark.parametrize("build", [nn.ReLU, nn.Hardswish])
def test_autocast(build):
    torch.manual_seed(0)
    model, x = stack(build(inplace=True)), image()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(model, x)
        got = gradients(sparse(twin, Quantized(8)), x)
    assert torch.equal(got[0], want[0])
    assert_close(got, want, 0.05)


@pytest.mark.parametrize(("name", "share"), [("resnet50", 1 / 6), ("mobilenet_v2", 1 / 12)])
def test_known_networks_save_little(name, share):
    model, x = torchvision.models.get_model(name, weights=None).train(), torch.randn(4, 3, 128, 128)
    full = saved_bytes(model, x)
    sparsify(model, Recipe("razor", 0.9))
    assert saved_bytes(model, x) < share * full


def test_rows_and_back():
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(unrolled(pixels(x), x.shape), x)
    last = x.to(memory_format=torch.channels_last)
    assert memory_format(unrolled(pixels(x), x.shape, like=last)) is torch.channels_last
    assert unrolled(pixels(x), x.shape, like=x).is_contiguous()
    line = torch.randn(2, 3, 5)
    assert torch.equal(unrolled(pixels(line), line.shape, like=line), line)
    assert torch.equal(pixels(F.pad(x, (0, 1)))[::5], x.movedim(1, -1).reshape(-1, 3)[::4])
