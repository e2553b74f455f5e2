"""Saved bytes, to the byte where a formula can be written down."""

import copy
import re
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BatchEncoding, BeitConfig, BeitModel, LlamaConfig, LlamaModel

from razorctl import Recipe, profile, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.memory.saved import kept_storages, traced_bytes, traced_bytes_by_module
from razorctl.methods import METHODS
from razorctl.models import find
from razorctl.sampling.joint import Blocks
from razorctl.surgery.byte_budget import sparsify_within
from scripts.bench.passes import peak_bytes
from tests.kept import held_bytes
from tests.models import bert as small_bert

ROWS, WIDTH, OUT = 40, 96, 32


pytestmark = pytest.mark.usefixtures("shallow")


def linear(recipe: Recipe | None = None) -> nn.Linear:
    layer = nn.Linear(WIDTH, OUT)
    if recipe is not None:
        sparsify(layer, recipe)
    return layer


@pytest.mark.parametrize(("autocast", "width"), [(None, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_bytes_of_a_linear_layer(autocast, width, ratio):
    x = torch.randn(ROWS, WIDTH)

    def measured(method: str) -> int:
        return traced_bytes(linear(Recipe(method, ratio)), x, autocast=autocast)

    n, density = ROWS * WIDTH, 1 - ratio
    columns = round(density * WIDTH)
    assert measured("full") == n * width
    assert measured("backrazor") == round(density * n) * width + n // 8
    assert measured("prebackrazor-") == columns * (ROWS * width + 8)
    assert measured("prebackrazor") == columns * (ROWS * width + 12)


class OfSparse(nn.Module):
    """A layer that keeps its input, and a sparse tensor of four values that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        at = torch.arange(4)
        sparse = torch.sparse_coo_tensor(torch.stack((at, at)), torch.ones(4), (8, 8))
        return torch.sparse.mm(sparse, self.linear(x))


def test_of_a_sparse_tensor_its_indices_and_values_count():
    kept = kept_storages(OfSparse().train(), partial(OfSparse().train(), torch.ones(8, 8)), int)
    assert sorted(storage.size for storage in kept)[-1] == 8 * 8 * 4
    assert 2 * 4 * 8 in [storage.size for storage in kept]


def test_equals_what_autograd_holds_in_a_real_step():
    model = find("vit-micro").build(10).train()
    x = torch.randn(4, 1, 28, 28)
    for method in METHODS:
        sparsify(model, Recipe(method))
        assert traced_bytes(model, x) == held_bytes(model, model, x)
        restore(model)


def test_nothing_is_changed_or_computed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    sparsify(model, Recipe("prebackrazor", joint_budget=0.5))
    before, state = copy.deepcopy(model), torch.get_rng_state()
    traced_bytes(model, torch.randn(4, 8, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model[0].rules.wide.sampler.p, before[0].rules.wide.sampler.p)
    assert model[0].blocks.step == 0
    assert type(model[0].blocks) is Blocks
    assert model._forward_pre_hooks


def test_a_batch_too_large_for_any_machine():
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(10**9, WIDTH)
    assert traced_bytes(linear(), x) == 10**9 * WIDTH * 4
    with mode:
        layer = nn.Linear(WIDTH, OUT)
    assert traced_bytes(layer, x) == 10**9 * WIDTH * 4


@pytest.mark.parametrize("places", [("cpu", "meta"), ("meta", "cpu"), ("meta", "meta")])
def test_the_meta_device_stands_for_the_other(places):
    def pair(model: str, inputs: str) -> tuple[nn.Module, torch.Tensor]:
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(model)
        net[2].weight = net[0].weight
        return net, torch.randn(4, 8, device=inputs)

    for traced in (traced_bytes, peak_bytes):
        assert traced(*pair(*places)) == traced(*pair("cpu", "cpu"))


class Reads(nn.Module):
    """The choice depends on values."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Identity(), function

    def forward(self, x):
        return self.function(self.inner(x))


READS = pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x[x > 0], "makes a tensor whose size depends on values (aten.nonzero"),
        (lambda x: x * x.sum().item(), "reads a value of a tensor (aten._local_scalar_dense"),
        (lambda x: x + float(x.detach().numpy().sum()), "reads the values of a tensor (.numpy())"),
    ],
    ids=["size", "value", "numpy"],
)


def reading(function) -> nn.Module:
    inner = nn.Sequential(nn.ReLU(), Reads(function))
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), inner)


@READS
def test_a_module_that_depends_on_values_is_named_where_there_are_none(function, why):
    net = reading(function)
    with pytest.raises(UsageError, match=re.escape(f"cannot trace 2.1 (Reads), since it {why}")):
        traced_bytes(net.to("meta"), torch.randn(4, 8))
    with pytest.raises(UsageError, match="cannot trace Reads, since"):
        peak_bytes(net[2][1], torch.randn(4, 8, requires_grad=True))


@pytest.mark.skipif(torch.__version__ >= "2.12", reason="traces grouped products of any dtype")
def test_grouped_products_that_torch_cannot_trace_are_named():
    weight, ends = torch.zeros(2, 8, 8, device="meta"), torch.zeros(2, dtype=torch.int32)
    net = reading(lambda x: torch._grouped_mm(x, weight.to(x), offs=ends.to(x.device)))
    with pytest.raises(UsageError, match=r"2.1 \(Reads\), since it multiplies all experts at once"):
        traced_bytes(net.to("meta"), torch.randn(16, 8))


@READS
def test_values_that_a_model_reads_are_computed_on_a_copy(function, why):
    net, x = reading(function).eval(), torch.randn(64, 8)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    totals = profile(net, x)["totals"]
    full = saved_bytes(net, x)
    sparsify_within(net, Recipe(ratio=0.5), x)
    assert totals["full_saved_bytes"] == full
    assert saved_bytes(net, x) <= 0.5 * full
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert not net.training


def test_a_batch_of_one_that_has_no_variance_names_the_norm():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(UsageError, match=r"1 \(BatchNorm1d\) cannot be trained on a batch of one"):
        traced_bytes(net, torch.randn(1, 8))


def test_an_error_of_the_model_itself_is_its_own():
    with pytest.raises(RuntimeError, match="invalid"):
        traced_bytes(Reads(lambda x: x.view(5)), torch.randn(4, 8))


GIB = 2**30


def pruned(model: nn.Module, inputs, recipe: Recipe) -> int:
    sparsify(model, recipe)
    saved = traced_bytes(model, inputs)
    restore(model)
    return saved


@pytest.fixture(scope="module")
def large(vit, bert):
    """Saved bytes of a large model by a recipe, and the peak of a step; each traced once."""
    models = {"vit": vit, "bert": bert}

    @cache
    def saved(name: str, recipe: Recipe) -> int:
        return pruned(*models[name], recipe)

    @cache
    def peak(name: str, recipe: Recipe) -> int:
        model, inputs = models[name]
        sparsify(model, recipe)
        highest = peak_bytes(model, inputs, SGD)
        restore(model)
        return highest

    return saved, peak


def test_bars_of_vit_b16(large):
    saved = partial(large[0], "vit")
    assert saved(Recipe("full", attention="stored")) == pytest.approx(16.74 * GIB, rel=1e-3)
    assert saved(Recipe("full", attention="flash")) == pytest.approx(14.09 * GIB, rel=1e-3)
    backrazor = saved(Recipe("backrazor", attention="stored"))
    sparse = saved(Recipe("prebackrazor++", attention="sparse-flash"))
    assert backrazor <= 3.7 * GIB
    assert sparse <= 3.1 * GIB
    assert saved(Recipe("backrazor", joint_budget=0.5)) < 0.95 * backrazor
    assert saved(Recipe("prebackrazor++", joint_budget=0.5)) < 0.95 * sparse


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("model", "wide", "narrow"),
    [
        ("vit", Recipe("prebackrazor++"), Recipe("prebackrazor++", joint_budget=0.5)),
        ("bert", Recipe("full"), Recipe("backrazor")),
    ],
)
def test_the_peak_falls_with_the_saved_bytes(model, wide, narrow, large):
    saved, peak = large
    less = saved(model, wide) - saved(model, narrow)
    assert peak(model, wide) - peak(model, narrow) >= 0.9 * less


def test_the_peak_of_a_step_that_can_be_counted_by_hand():
    layer, x = linear(), torch.randn(ROWS, WIDTH)
    weights, bias, inputs, outputs = WIDTH * OUT, OUT, ROWS * WIDTH, ROWS * OUT
    resident = weights + bias + inputs
    # At the end of backward: the output, the loss, its gradient and those of the parameters.
    assert peak_bytes(layer, x) == 4 * (resident + outputs + 2 + weights + bias)
    # Gradients and momentum, and for a weight at a time what the update makes.
    assert peak_bytes(layer, x, SGD) >= 4 * (resident + 2 * (weights + bias))
    layer.bias.requires_grad_(False)  # on which no hook can be put
    assert peak_bytes(layer, x) == 4 * (resident + outputs + 2 + weights)


@pytest.mark.parametrize(
    ("autocast", "saved", "peak"), [(None, 1.25, 3.0), (torch.bfloat16, 0.81, 2.4)], ids=str
)
def test_bars_of_razor(vit, autocast, saved, peak):
    model, images = vit
    sparsify(model, Recipe("razor"))
    assert traced_bytes(model, images, autocast=autocast) <= saved * GIB
    assert peak_bytes(model, images, SGD, autocast=autocast) <= peak * GIB
    restore(model)


def test_bar_of_bert_base(large):
    saved = partial(large[0], "bert")
    full = saved(Recipe("full"))
    assert saved(Recipe("razor")) <= full / 10
    assert saved(Recipe("backrazor")) <= full / 3
    assert saved(Recipe("prebackrazor++")) <= full / 3


class TwoInputs(nn.Module):
    def forward(self, a, b):
        return a * b


@pytest.mark.parametrize("form", [tuple, dict])
def test_forms_of_input(form):
    a, b = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    inputs = (a, b) if form is tuple else {"a": a, "b": b}
    assert traced_bytes(TwoInputs(), inputs) == 40


def test_mappings_of_tokenizers():
    model = small_bert()
    inputs = {"input_ids": torch.zeros(2, 5, dtype=torch.long)}
    assert traced_bytes(model, BatchEncoding(inputs)) == traced_bytes(model, inputs)


def test_real_and_fake_passes_share_no_cache_of_transformers():
    """BEiT caches the numbers of relative positions, by their sizes alone."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = BeitConfig(**sizes, image_size=16, use_relative_position_bias=True)
    model, images = BeitModel(config).train(), torch.randn(1, 3, 16, 16)
    traced = traced_bytes(model, images)
    model(images).last_hidden_state.sum().backward()
    assert traced_bytes(model, images) == traced


def test_a_storage_counts_once():
    class Shares(nn.Module):
        def forward(self, x):
            y = x * 2
            return y * y[:].detach().sigmoid() + y.square()

    x = torch.randn(100, requires_grad=True)
    # y for the square and the product, its sigmoid for the product
    assert traced_bytes(Shares(), x) == 800


SMALL_MODELS = {
    "vit-micro": lambda: (find("vit-micro").build(10), torch.randn(2, 1, 28, 28)),
    "bert": lambda: (
        small_bert(),
        {"input_ids": torch.zeros(2, 5, dtype=torch.long)},
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        torch.randn(2, 3, 9, 9),
    ),
}


@pytest.mark.parametrize(
    ("name", "method", "autocast"),
    [
        *(("vit-micro", method, None) for method in METHODS),
        *(("bert", method, torch.bfloat16) for method in ("checkpoint", "prebackrazor++", "razor")),
        *(("convolutions", method, torch.bfloat16) for method in ("full", "backrazor", "int8")),
    ],
)
def test_modules_sum_to_saved_bytes(name, method, autocast):
    model, inputs = SMALL_MODELS[name]()
    sparsify(model, Recipe(method, ratio=0.5))
    by_module = traced_bytes_by_module(model, inputs, autocast=autocast)
    assert sum(by_module.values()) == traced_bytes(model, inputs, autocast=autocast) > 0
    assert by_module.keys() <= {name for name, _ in model.named_modules()}
    assert all(by_module.values())


def test_bytes_of_modules_that_can_be_counted_by_hand():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh())

        def forward(self, x):
            y = self.inner(x)
            return y.square().exp()  # saves y, which tanh has saved, and the exponential

    net = nn.Sequential(Squares(), nn.Linear(16, 4))
    expected = {"0.inner.0": 8, "0.inner.1": 16, "0": 16}  # the last layer's input is there already
    assert traced_bytes_by_module(net, torch.randn(5, 8)) == {
        k: 4 * 5 * n for k, n in expected.items()
    }
    assert traced_bytes_by_module(net[0].inner[0], torch.randn(5, 8)) == {"": 160}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_checkpointed_block_saves_in_the_module_that_runs_it():
    model, inputs = SMALL_MODELS["vit-micro"]()
    sparsify(model, Recipe("checkpoint"))
    by_module = traced_bytes_by_module(model, inputs)
    assert not any(name.startswith("blocks") for name in by_module)
    assert by_module[""] > by_module["patch_embed.proj"]


def test_a_graph_that_is_dropped_keeps_nothing():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            y.exp()  # keeps its output, until it is dropped
            return y.square()

    x = torch.randn(4, 8)
    assert traced_bytes(Net(), x) == 2 * x.nbytes


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoder_is_traced_with_the_masks_that_it_makes(padded):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1)).train()
    inputs = {"input_ids": torch.randint(0, 50, (4, 16)), "use_cache": False}
    if padded:
        inputs["attention_mask"] = torch.ones(4, 16).index_fill_(1, torch.tensor([15]), 0).long()
    kept = kept_storages(model, lambda: model(**inputs), lambda: None)
    assert traced_bytes(model, inputs) == sum(storage.size for storage in kept)
