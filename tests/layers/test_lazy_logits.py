"""Logits of tokens and of pixels that are computed where something needs them, against stock."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

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
from razorctl.layers.heads import token_logits
from razorctl.layers.heads.lazy_tensor import lazily
from razorctl.layers.heads.pixel_logits import Enlarged, PixelHead, Pixels, pixel_classifiers
from razorctl.layers.heads.token_logits import Head, Logits
from razorctl.memory.saved import traced_bytes
from razorctl.models.timm.linear_segmenter import LinearSegmenter
from razorctl.rules.dense import Dense
from tests.cases import both
from tests.layers.functions import Cubed, Doubled
from tests.models import segformer

CLASSES, WIDTH, CHANNELS = 5, 7, 3
TEXT = torch.tensor([[1, 3, -100, 3, 4], [0, -100, 2, 2, 4]])
SIZE = (9, 7)
TARGET = torch.randint(CLASSES, (2, *SIZE), generator=torch.Generator().manual_seed(0))
TARGET[:, ::3], TARGET[0, 1] = -100, 3
OTHERS = torch.where(TARGET < 0, 255, TARGET)


def attached(kind: type, module: nn.Module) -> nn.Module:
    kind.attach(module.train(), both(Dense()), LayerSettings())
    assert isinstance(module, kind)
    return module


def token_head(bias: bool = True) -> nn.Module:
    return attached(Head, nn.Linear(WIDTH, CLASSES, bias=bias))


def pixel_head(dtype: torch.dtype = torch.float32) -> nn.Module:
    return attached(PixelHead, nn.Conv2d(CHANNELS, CLASSES, 1, dtype=dtype))


def texts() -> Tensor:
    return torch.randn(2, 5, WIDTH)


def image(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, CHANNELS, 4, 3, dtype=dtype)


def shifted(logits: Tensor, **options) -> Tensor:
    """The loss of transformers' ForCausalLMLoss."""
    target = F.pad(TEXT, (0, 1), value=-100)[..., 1:].contiguous().to(logits.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.view(-1, CLASSES), target.view(-1), **options)


def enlarged(logits: Tensor, align_corners: bool = False) -> Tensor:
    return F.interpolate(logits, SIZE, mode="bilinear", align_corners=align_corners)


def loss_of(logits: Tensor, **options) -> Tensor:
    return F.cross_entropy(enlarged(logits), TARGET, **options)


def weights(logits: Tensor) -> Tensor:
    return torch.linspace(0.2, 3, CLASSES, dtype=logits.dtype)


TOKEN_LOSSES = {
    "mean": shifted,
    "sum": lambda logits: shifted(logits, reduction="sum") / 7,
    "none": lambda logits: (shifted(logits, reduction="none") ** 2).sum(),
    "smoothing": lambda logits: shifted(logits, label_smoothing=0.1),
    "weights": lambda logits: shifted(logits, weight=weights(logits)),
    "weighted tokens": lambda logits: (
        shifted(logits, weight=weights(logits), reduction="none") ** 2
    ).sum(),
    "another ignored": lambda logits: F.cross_entropy(
        logits[:, 1:].reshape(-1, CLASSES), TEXT[:, 1:].flatten().clamp(min=0), ignore_index=2
    ),
    "module": lambda logits: nn.CrossEntropyLoss()(logits.flatten(0, 1), TEXT.flatten()),
    "slice": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES), TEXT[:, 1:].reshape(-1)
    ),
    "shifted": lambda logits: shifted(logits + torch.linspace(-1, 1, CLASSES)[None]),
    "one": lambda logits: F.cross_entropy(logits[0], TEXT[0]) + shifted(logits.to(logits.device)),
}
OTHER_TOKENS = {
    "classes first": lambda logits: F.cross_entropy(logits.transpose(1, 2), TEXT),
    "weighted and smoothed": lambda logits: shifted(
        logits, weight=weights(logits), label_smoothing=0.1
    ),
    "soft targets": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), torch.linspace(0, 1, CLASSES).expand(10, -1)
    ),
    "softcap": lambda logits: shifted(3 * (logits / 3).tanh()),
    "in place": lambda logits: shifted(logits.div_(2)),
    "in place, after": lambda logits: (logits.mul_(2), shifted(logits))[1],
    "assigned": lambda logits: (logits.__setitem__((..., 0), -5.0), shifted(logits))[1],
    "log softmax": lambda logits: -F.log_softmax(logits[..., :-1, :], -1).mean(),
    "a column": lambda logits: logits[..., 3].sum() + logits[:, :, 1:4].square().sum(),
    "those that count": lambda logits: F.cross_entropy(logits[TEXT >= 0], TEXT[TEXT >= 0]),
    "own function": lambda logits: Doubled.apply(logits).square().sum(),
    "own function of a copy": lambda logits: shifted(Same.apply(logits)),
    "own function in place": lambda logits: shifted(Cubed.apply(logits)),
    "read before": lambda logits: logits.sum().detach() + shifted(Cubed.apply(logits)),
    "narrow": lambda logits: shifted(logits.bfloat16()),
    "positions added": lambda logits: shifted(logits + torch.linspace(-1, 1, 5)[:, None]),
    "a temperature added": lambda logits: shifted(torch.add(logits, torch.ones(1), alpha=2)),
}


PIXEL_LOSSES = {
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
OTHER_PIXELS = {
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


@dataclass(frozen=True)
class Kind:
    """A head that computes no values for LOSSES, and those of stock for OTHER."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    losses: dict[str, Callable[[Tensor], Tensor]]
    others: dict[str, Callable[[Tensor], Tensor]]
    lazy: type[Tensor]
    logits: type[Tensor]

    def loss(self, name: str) -> Callable[[Tensor], Tensor]:
        return (self.losses | self.others)[name]


KINDS = {
    "tokens": Kind(token_head, texts, TOKEN_LOSSES, OTHER_TOKENS, Logits, Logits),
    "pixels": Kind(pixel_head, image, PIXEL_LOSSES, OTHER_PIXELS, Enlarged, Pixels),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def named(which: str) -> pytest.MarkDecorator:
    """Each kind with the names of its losses, or of the other uses of logits."""
    pairs = [(kind, name) for kind in KINDS.values() for name in getattr(kind, which)]
    return pytest.mark.parametrize(("kind", "name"), pairs)


@pytest.fixture
def no_values(monkeypatch):
    for lazy in (Logits, Enlarged):
        monkeypatch.setattr(lazy, "values", lambda self: pytest.fail("logits were computed"))


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


@named("losses")
def test_a_cross_entropy_equals_stock_in_double_precision(kind, name, no_values):
    layer, x, loss = kind.build(), kind.inputs(), kind.losses[name]
    got, want = run(layer, loss, x), run(stock(layer).double(), loss, x.double())
    assert [t.dtype for t in got] == [torch.float32] * 4
    torch.testing.assert_close(got, [t.float() for t in want], rtol=1e-5, atol=1e-6)


def test_a_head_without_bias(no_values):
    layer, x = token_head(bias=False), texts()
    torch.testing.assert_close(run(layer, shifted, x), run(stock(layer), shifted, x))


@named("others")
def test_anything_else_finds_the_stock_values(kind, name):
    layer, x, loss = kind.build(), kind.inputs(), kind.others[name]
    got, want = run(layer, loss, x), run(stock(layer), loss, x)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHER_TOKENS)
def test_logits_of_tokens_are_computed_once(name, monkeypatch):
    layer, calls, body = token_head(), [], token_logits._linear
    monkeypatch.setattr(token_logits, "_linear", lambda *args: calls.append(1) or body(*args))
    run(layer, OTHER_TOKENS[name], texts())
    assert len(calls) == 1


@every_kind
@pytest.mark.parametrize(
    ("name", "way"),
    [("mean", "autocast"), ("none", "weights"), ("softcap", "autocast"), ("softcap", "weights")],
)
def test_low_precision(kind, name, way):
    layer, x = kind.build(), kind.inputs()
    if way == "weights":
        layer, x = layer.bfloat16(), x.bfloat16()
    twin, loss = stock(layer), kind.loss(name)
    got, want = run(layer, loss, x, way == "autocast"), run(twin, loss, x, way == "autocast")
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


@every_kind
def test_accelerate_may_cast_outputs(kind, no_values):
    layer, x = kind.build(), kind.inputs()
    cast = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(layer.forward))(x)
    assert isinstance(cast, kind.logits)
    assert cast.dtype == torch.float32
    assert kind.losses["mean"](cast).requires_grad


@every_kind
def test_loss_scales_gradient_accumulation_and_a_second_backward_pass(kind):
    layer, x = kind.build(), kind.inputs().requires_grad_()
    loss = kind.losses["mean"](layer(x)) * 1024
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters())]
    loss.backward()
    for t, first in zip((x, *layer.parameters()), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kind, reentrant):
    layer, x = kind.build(), kind.inputs()
    want = run(layer, kind.losses["mean"], x)
    layer.zero_grad()
    a = x.clone().requires_grad_()
    loss = checkpoint(lambda t: kind.losses["mean"](layer(t)), a, use_reentrant=reentrant)
    loss.backward()
    torch.testing.assert_close([a.grad, *(p.grad for p in layer.parameters())], want[1:])


@every_kind
@pytest.mark.parametrize("name", ["mean", "softcap"])
def test_compiled_it_is_stock(kind, name):
    layer, x, loss = kind.build(), kind.inputs(), kind.loss(name)
    want = run(layer, loss, x)
    torch.compiler.reset()
    compiled = torch.compile(lambda t: loss(layer(t)), fullgraph=True, backend="aot_eager")
    layer.zero_grad()
    a = x.clone().requires_grad_()
    value = compiled(a)
    value.backward()
    torch.testing.assert_close(
        [value.detach(), a.grad, *(p.grad for p in layer.parameters())], want
    )


@every_kind
def test_copies_and_pickles_keep_working(kind):
    layer, x = nn.Sequential(kind.build()), kind.inputs()
    want = run(layer, kind.losses["mean"], x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin[0]) is type(layer[0])
        torch.testing.assert_close(run(twin, kind.losses["mean"], x), want)


@every_kind
def test_what_changes_before_it_is_read_is_refused(kind):
    layer, x = kind.build(), kind.inputs()
    logits = layer(x)
    read, late = layer(x), enlarged(logits) if kind.lazy is Enlarged else logits.double()
    assert torch.equal(read.clone() + 0, read + 0)
    logits.mul_(2)
    with pytest.raises(UsageError, match=r"before their first use|in place"):
        late.sum()
    if kind.lazy is Enlarged:
        with pytest.raises(UsageError, match="before their first use"):
            F.cross_entropy(late, TARGET)
    late = layer(x)
    values = read.tanh()
    torch.optim.SGD(layer.parameters(), 0.1).step(lambda: kind.losses["mean"](layer(x)).backward())
    assert torch.equal(read.tanh(), values)
    if kind.lazy is Logits:
        with pytest.raises(UsageError, match="before their first use"):
            late.argmax(-1)


@every_kind
def test_evaluation_and_no_grad_are_stock(kind):
    layer, x = kind.build(), kind.inputs()
    with torch.no_grad():
        assert type(layer(x)) is Tensor
    assert type(layer.eval()(x)) is Tensor


class Model(nn.Module):
    """A head and its loss, whose logits are dropped unless they are returned."""

    def __init__(self, kind: Kind, returns: bool) -> None:
        super().__init__()
        self.head, self.loss, self.returns = kind.build(), kind.losses["mean"], returns

    def forward(self, x):
        logits = self.head(x)
        loss = self.loss(logits)
        return (loss, logits) if self.returns else loss


@every_kind
@pytest.mark.parametrize("returns", [False, True])
def test_saved_bytes_are_no_logits(kind, returns):
    model, x = Model(kind, returns), kind.inputs().requires_grad_()
    kept = traced_bytes(model, x)
    # The input, for whoever takes the logits; the gradient of tokens, or of a low resolution, and
    # of the bias; the divisor of the mean.
    gradient = x.nbytes + 4 * CLASSES if kind.lazy is Logits else 2 * CLASSES * 4 * 3 * 4
    assert kept == x.nbytes * (1 if returns or kind.lazy is Enlarged else 0) + gradient + 8


def test_what_is_known_of_logits_needs_none_of_them(no_values):
    logits = token_head()(texts())
    assert logits.shape == (2, 5, CLASSES)
    assert logits.size(-1) == CLASSES
    assert (logits.dim(), len(logits), logits.numel()) == (3, 2, 50)
    assert (logits.dtype, logits.device.type) == (torch.float32, "cpu")
    assert logits.requires_grad
    assert not logits.detach().requires_grad


def test_views_and_casts_have_the_stock_values():
    layer, x = token_head(), texts()
    stock = F.linear(x, layer.weight, layer.bias)
    for change in (
        lambda t: t[:, -1],
        lambda t: t[1, 2:],
        lambda t: t[..., 1:, :],
        lambda t: t[0][...],
        lambda t: t.double()[:, ::2].flatten(0, 1),
        lambda t: t.view(5, 2, -1).reshape(-1, CLASSES),
        lambda t: t.detach(),
    ):
        changed = change(layer(x))
        assert isinstance(changed, Logits)
        assert torch.equal(changed + 0, change(stock))
        assert changed.dtype == change(stock).dtype


def test_a_frozen_weight_gets_no_gradient_and_an_input_without_one_none(monkeypatch):
    needs, op = [], token_logits.linear_cross_entropy
    monkeypatch.setattr(
        token_logits, "linear_cross_entropy", lambda *args: needs.append(args[-3:]) or op(*args)
    )
    layer, x = token_head(), texts()
    layer.requires_grad_(False)
    assert not shifted(layer(x)).requires_grad
    assert run(layer, shifted, x)[1].any()
    layer.weight.requires_grad_(True)
    shifted(layer(x)).backward()
    assert needs == [(True, False, False), (False, True, False)]


@pytest.mark.parametrize("name", ["mean", "none", "softcap"])
def test_a_second_derivative_is_refused(name):
    layer, x = token_head(), texts().requires_grad_()
    (dx,) = torch.autograd.grad(KINDS["tokens"].loss(name)(layer(x)) ** 2, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_what_is_read_is_the_stock_one(dtype):
    layer, x = pixel_head(dtype), image(dtype)
    got, want = layer(x), stock(layer)(x)
    for logits in (got, want):
        logits.retain_grad()
        enlarged(logits).float().tanh().square().sum().backward()
    assert torch.equal(got.grad, want.grad)


def test_values_read_outside_of_autocast_are_those_inside():
    layer, x = pixel_head(), image()
    with torch.autocast("cpu", torch.bfloat16):
        lazy, want = enlarged(layer(x)), enlarged(stock(layer)(x))
    assert isinstance(lazy, Enlarged)
    assert (lazy.dtype, lazy.shape, lazy.requires_grad) == (want.dtype, want.shape, True)
    assert torch.equal(lazy + 0, want)


def test_what_is_all_ignored_is_not_a_number_as_in_stock():
    layer, x = pixel_head(), image()
    assert F.cross_entropy(enlarged(layer(x)), torch.full_like(TARGET, -100)).isnan()


def test_evaluation_enlarges_images_apart(no_values):
    layer, x = pixel_head().eval(), image()
    with torch.no_grad():
        want = enlarged(stock(layer)(x))
        assert type(layer(x)) is Tensor
        with lazily(layer):
            logits = enlarged(layer(x)).float()
            assert torch.equal(logits.argmax(1), want.argmax(1))
            torch.testing.assert_close(F.cross_entropy(logits, TARGET), loss_of(stock(layer)(x)))


def test_deterministic_kernels_are_stock():
    with torch.device("meta"):
        assert type(enlarged(pixel_head()(image()))) is Tensor
        torch.use_deterministic_algorithms(False)
        assert type(enlarged(pixel_head()(image()))) is Enlarged


def test_logits_can_have_hooks_and_gradients():
    layer, x, gradients_of_hook = pixel_head(), image(), []
    logits = layer(x)
    logits.retain_grad()
    logits.register_hook(gradients_of_hook.append)
    loss_of(logits).backward()
    twin = stock(layer)(x)
    (want,) = torch.autograd.grad(loss_of(twin), twin)
    torch.testing.assert_close(logits.grad, want)
    torch.testing.assert_close(gradients_of_hook, [want])


class Backbone(nn.Module):
    """Features of two scales, as torchvision's LRASPP takes them."""

    feature_info = type("Info", (), {"channels": staticmethod(lambda: [16])})()

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.last = last

    def forward(self, x):
        low = self.low(x).relu()
        high = self.high(low)
        return [high] if self.last else {"low": low, "high": high}


# A model, and how many classifiers of pixels it has.
MODELS = {
    "ours": (lambda: LinearSegmenter(Backbone(last=True), CLASSES, {}), 1),
    "lraspp": (lambda: segmentation.LRASPP(Backbone(), 8, 16, CLASSES, 8), 2),
    "segformer": (segformer, 1),
}


def _losses(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The losses of all outputs of a model, and the loss that it returns."""
    if isinstance(model, (LinearSegmenter, segmentation.LRASPP)):
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
    build, count = MODELS[name]
    model = build().train()
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
    assert len(names) == count
    restore(model)
    assert not any(isinstance(module, PixelHead) for module in model.modules())


def test_a_classifier_of_images_has_none_of_pixels():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert not pixel_classifiers(model)
    assert not pixel_classifiers(nn.Sequential(nn.ReLU()))
    assert pixel_classifiers(model[:1]) == {model[0]}
