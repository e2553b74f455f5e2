"""Logits of pixels that are enlarged where something needs them, against the stock ones."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import segmentation

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.base import LayerSettings
from razorctl.layers.heads.lazy_tensor import lazily
from razorctl.layers.heads.pixel_logits import Enlarged, PixelHead, Pixels, pixel_classifiers
from razorctl.memory.saved import traced_bytes
from razorctl.models.timm.linear_segmenter import LinearSegmenter
from razorctl.rules.dense import Dense
from razorctl.surgery import sparsify as surgery
from tests.cases import both
from tests.layers.functions import Cubed, Doubled
from tests.models import segformer

CLASSES, WIDTH, SIZE = 5, 3, (9, 7)
TARGET = torch.randint(CLASSES, (2, *SIZE), generator=torch.Generator().manual_seed(0))
TARGET[:, ::3], TARGET[0, 1] = -100, 3
OTHERS = torch.where(TARGET < 0, 255, TARGET)


def head(dtype: torch.dtype = torch.float32) -> PixelHead:
    module = nn.Conv2d(WIDTH, CLASSES, 1, dtype=dtype).train()
    PixelHead.attach(module, both(Dense()), LayerSettings())
    assert isinstance(module, PixelHead)
    return module


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, WIDTH, 4, 3, dtype=dtype)


def enlarged(logits: Tensor, align_corners: bool = False) -> Tensor:
    return F.interpolate(logits, SIZE, mode="bilinear", align_corners=align_corners)


def loss_of(logits: Tensor, **options) -> Tensor:
    return F.cross_entropy(enlarged(logits), TARGET, **options)


def weights(logits: Tensor) -> Tensor:
    return torch.linspace(0.2, 3, CLASSES, dtype=logits.dtype)


LOSSES = {
    "mean": loss_of,
    "sum": lambda logits: loss_of(logits, reduction="sum") / 7,
    "none": lambda logits: (loss_of(logits, reduction="none") ** 2).sum(),
    "smoothing": lambda logits: loss_of(logits, label_smoothing=0.1),
    "weights": lambda logits: loss_of(logits, weight=weights(logits)),
    "sum of weights": lambda logits: loss_of(logits, weight=weights(logits), reduction="sum") / 7,
    "weighted pixels": lambda logits: (
        loss_of(logits, weight=weights(logits), reduction="none") ** 2
    ).sum(),
    "another ignored": lambda logits: F.cross_entropy(enlarged(logits), OTHERS, ignore_index=255),
    "module": lambda logits: nn.CrossEntropyLoss(ignore_index=255)(
        nn.Upsample(SIZE, mode="bilinear")(logits), OTHERS
    ),
    "corners": lambda logits: F.cross_entropy(enlarged(logits, True), TARGET),
    "factors": lambda logits: F.cross_entropy(
        F.interpolate(logits, scale_factor=(2.3, 2.4), mode="bilinear"), TARGET
    ),
    "one factor": lambda logits: F.cross_entropy(
        F.interpolate(logits, scale_factor=2.4, mode="bilinear"), TARGET.repeat(1, 2, 1)[:, :9]
    ),
    "cast": lambda logits: F.cross_entropy(enlarged(logits.float()).float(), TARGET),
    "in place, before": lambda logits: loss_of(logits.div_(2)),
    "two": lambda logits: loss_of(logits + logits),
    "none counts": lambda logits: F.cross_entropy(
        enlarged(logits), torch.full_like(TARGET, -100), reduction="sum"
    ),
}
OTHER = {
    "nearest": lambda logits: F.cross_entropy(F.interpolate(logits, SIZE), TARGET),
    "antialiased": lambda logits: F.cross_entropy(
        F.interpolate(logits, SIZE, mode="bilinear", antialias=True), TARGET
    ),
    "no enlargement": lambda logits: F.cross_entropy(logits, TARGET[:, :4, :3]),
    "weighted and smoothed": lambda logits: loss_of(
        logits, weight=torch.linspace(1, 2, CLASSES), label_smoothing=0.1
    ),
    "soft targets": lambda logits: F.cross_entropy(
        enlarged(logits), F.one_hot(TARGET.clamp(0), CLASSES).movedim(-1, 1).float()
    ),
    "softcap": lambda logits: F.cross_entropy(3 * (enlarged(logits) / 3).tanh(), TARGET),
    "in place": lambda logits: F.cross_entropy(enlarged(logits).div_(2), TARGET),
    "enlarged twice": lambda logits: F.cross_entropy(
        F.interpolate(F.interpolate(logits, scale_factor=2, mode="bilinear"), SIZE), TARGET
    ),
    "dice": lambda logits: enlarged(logits).softmax(1)[:, 1].square().mean(),
    "a column": lambda logits: enlarged(logits)[:, 3].sum() + logits[:, 1:4].square().sum(),
    "own function of no copy": lambda logits: F.cross_entropy(Same.apply(enlarged(logits)), TARGET),
    "own function in place": lambda logits: loss_of(Cubed.apply(logits)),
    "read before": lambda logits: logits.sum().detach() + loss_of(Cubed.apply(logits)),
    "own function": lambda logits: Doubled.apply(enlarged(Doubled.apply(logits))).square().sum(),
}


class Same(torch.autograd.Function):
    """A function whose result may be computed late, but not without its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@pytest.fixture
def no_values(monkeypatch):
    monkeypatch.setattr(Enlarged, "values", lambda self: pytest.fail("logits were enlarged"))


def stock(layer: nn.Module) -> nn.Module:
    twin = copy.deepcopy(layer)
    twin.detach()
    return twin


def run(layer: nn.Module, loss, x: Tensor, autocast: bool = False) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        value = loss(layer(x))
    value.backward()
    return [value.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", LOSSES)
def test_a_cross_entropy_equals_stock_in_double_precision(name, no_values):
    layer, x = head(), image()
    got, want = run(layer, LOSSES[name], x), run(stock(layer).double(), LOSSES[name], x.double())
    assert [t.dtype for t in got] == [torch.float32] * 4
    torch.testing.assert_close(got, [t.float() for t in want], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_finds_the_stock_values(name):
    layer, x = head(), image()
    got, want = run(layer, OTHER[name], x), run(stock(layer), OTHER[name], x)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_what_is_read_is_the_stock_one(dtype):
    layer, x = head(dtype), image(dtype)
    got, want = layer(x), stock(layer)(x)
    for logits in (got, want):
        logits.retain_grad()
        enlarged(logits).float().tanh().square().sum().backward()
    assert torch.equal(got.grad, want.grad)


@pytest.mark.parametrize("name", ["mean", "none", "softcap", "cast"])
@pytest.mark.parametrize("way", ["autocast", "weights"])
def test_low_precision(name, way):
    layer, x = head(), image()
    if way == "weights":
        layer, x = layer.bfloat16(), x.bfloat16()
    twin, loss = stock(layer), (LOSSES | OTHER)[name]
    got, want = run(layer, loss, x, way == "autocast"), run(twin, loss, x, way == "autocast")
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def test_values_read_outside_of_autocast_are_those_inside():
    layer, x = head(), image()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, want = enlarged(layer(x)), enlarged(stock(layer)(x))
    assert isinstance(lazy, Enlarged)
    assert (lazy.dtype, lazy.shape, lazy.requires_grad) == (want.dtype, want.shape, True)
    assert torch.equal(lazy + 0, want)


def test_what_is_all_ignored_is_not_a_number_as_in_stock():
    layer, x = head(), image()
    assert F.cross_entropy(enlarged(layer(x)), torch.full_like(TARGET, -100)).isnan()


def test_accelerate_may_cast_outputs(no_values):
    layer, x = head(), image()
    cast = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(layer.forward))(x)
    assert isinstance(cast, Pixels)
    assert cast.dtype == torch.float32
    assert isinstance(enlarged(cast).float(), Enlarged)


def test_evaluation_enlarges_images_apart(no_values):
    layer, x = head().eval(), image()
    with torch.no_grad():
        want = enlarged(stock(layer)(x))
        assert type(layer(x)) is Tensor
        with lazily(layer):
            logits = enlarged(layer(x)).float()
            assert torch.equal(logits.argmax(1), want.argmax(1))
            torch.testing.assert_close(F.cross_entropy(logits, TARGET), loss_of(stock(layer)(x)))


def test_what_changes_before_it_is_read_is_refused():
    logits = head()(image())
    lazy = enlarged(logits)
    logits.mul_(2)
    with pytest.raises(UsageError, match="before it"):
        F.cross_entropy(lazy, TARGET)


def test_deterministic_kernels_are_stock():
    with torch.device("meta"):
        assert type(enlarged(head()(image()))) is Tensor
        torch.use_deterministic_algorithms(False)
        assert type(enlarged(head()(image()))) is Enlarged


def test_loss_scales_gradient_accumulation_and_a_second_backward_pass():
    layer, x = head(), image().requires_grad_()
    loss = loss_of(layer(x)) * 1024
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters())]
    loss.backward()
    for t, first in zip((x, *layer.parameters()), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * first)


def test_logits_can_have_hooks_and_gradients():
    layer, x, gradients_of_hook = head(), image(), []
    logits = layer(x)
    logits.retain_grad()
    logits.register_hook(gradients_of_hook.append)
    loss_of(logits).backward()
    twin = stock(layer)(x)
    (want,) = torch.autograd.grad(loss_of(twin), twin)
    torch.testing.assert_close(logits.grad, want)
    torch.testing.assert_close(gradients_of_hook, [want])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    layer, x = head(), image()
    want = run(layer, loss_of, x)
    layer.zero_grad()
    a = x.clone().requires_grad_()
    loss_of(checkpoint(layer, a, use_reentrant=reentrant)).backward()
    torch.testing.assert_close([a.grad, *(p.grad for p in layer.parameters())], want[1:])


@pytest.mark.parametrize("name", ["mean", "softcap"])
def test_compiled_it_is_stock(name):
    layer, x = head(), image()
    loss = (LOSSES | OTHER)[name]
    want = run(layer, loss, x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(t):
        return loss(layer(t))

    layer.zero_grad()
    a = x.clone().requires_grad_()
    value = step(a)
    value.backward()
    torch.testing.assert_close(
        [value.detach(), a.grad, *(p.grad for p in layer.parameters())], want
    )


def test_copies_and_pickles_keep_working():
    layer, x = nn.Sequential(head()), image()
    want = run(layer, loss_of, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(twin[0], PixelHead)
        torch.testing.assert_close(run(twin, loss_of, x), want)
    logits = pickle.loads(pickle.dumps(layer(x)))
    assert type(logits) is Tensor


def test_saved_bytes_are_the_input_and_a_gradient_of_the_low_resolution():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head()

        def forward(self, x, target):
            return F.cross_entropy(enlarged(self.head(x)), target)

    x = image().requires_grad_()
    low = 2 * CLASSES * 4 * 3 * 4
    assert traced_bytes(Model(), (x, TARGET)) == x.nbytes + low + 8  # the divisor of the mean


class Backbone(nn.Module):
    """Features of two scales, as torchvision's LRASPP takes them."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)

    def forward(self, x):
        low = self.low(x).relu()
        high = self.high(low)
        return {"low": low, "high": high, "out": high, "aux": high}


class Last(Backbone):
    feature_info = type("Info", (), {"channels": staticmethod(lambda: [16])})()

    def forward(self, x):
        return [super().forward(x)["out"]]


def _upernet() -> nn.Module:
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    backbone = ConvNextConfig(
        depths=[1] * 4, hidden_sizes=[8] * 4, out_features=[f"stage{n}" for n in range(1, 5)]
    )
    config = UperNetConfig(
        backbone_config=backbone,
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_channels=4,
        auxiliary_in_channels=8,
        num_labels=CLASSES,
    )
    return UperNetForSemanticSegmentation(config)


MODELS = {
    "ours": lambda: LinearSegmenter(Last(), CLASSES, {}),
    "fcn": lambda: segmentation.FCN(
        Backbone(), *(segmentation.fcn.FCNHead(16, CLASSES) for _ in range(2))
    ),
    "lraspp": lambda: segmentation.LRASPP(Backbone(), 8, 16, CLASSES, 8),
    "segformer": segformer,
    "upernet": _upernet,
}


NUMBER = {"fcn": 2, "lraspp": 2, "upernet": 2}


def _losses(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The losses of all outputs of a model, and the loss that it returns."""
    if isinstance(model, (LinearSegmenter, segmentation.FCN, segmentation.LRASPP)):
        outputs, loss = model(x), 0
        outputs = outputs if isinstance(outputs, dict) else {"out": outputs}
    else:
        output = model(pixel_values=x, labels=labels)
        outputs, loss = {"logits": output.logits}, output.loss
    for logits in outputs.values():
        if logits.shape[-2:] != x.shape[-2:]:
            logits = F.interpolate(logits, x.shape[-2:], mode="bilinear")
        loss = loss + F.cross_entropy(logits, labels, ignore_index=255)
    return loss


@pytest.mark.parametrize("name", MODELS)
def test_no_loss_of_a_model_enlarges_logits(name, no_values):
    model = MODELS[name]().train()
    x, labels = torch.randn(2, 3, 64, 64), torch.randint(CLASSES, (2, 64, 64))
    labels[:, :5] = 255

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = _losses(model, x, labels)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    want = step()
    full = traced_bytes(model, (x, labels), forward=lambda m, batch: _losses(m, *batch))
    for module in pixel_classifiers(model):
        PixelHead.attach(module, both(Dense()), LayerSettings())
    torch.testing.assert_close(step(), want, rtol=1e-4, atol=1e-5)
    now = traced_bytes(model, (x, labels), forward=lambda m, batch: _losses(m, *batch))
    assert full - now > 2 * CLASSES * 64 * 64 * 4 * 0.7  # the gradient is of a low resolution
    restore(model)
    names = sparsify(model, Recipe("bias"))
    assert set(names) == {n for n, m in model.named_modules() if isinstance(m, PixelHead)}
    assert len(names) == NUMBER.get(name, 1)
    restore(model)
    assert not any(isinstance(module, PixelHead) for module in model.modules())


def test_a_classifier_of_images_has_none_of_pixels():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert not pixel_classifiers(model)
    assert not pixel_classifiers(nn.Sequential(nn.ReLU()))
    assert pixel_classifiers(model[:1]) == {model[0]}


def test_a_wrong_guess_changes_nothing(monkeypatch):
    layers = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(True)
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 6, 5)

    def step() -> tuple[list[Tensor], int]:
        sparsify(model, Recipe("int8"))
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        saved = traced_bytes(model, x)
        restore(model)
        return [y.detach(), *(p.grad for p in model.parameters())], saved

    got = step()
    monkeypatch.setattr(surgery, "pixel_classifiers", lambda model: frozenset())
    want = step()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
