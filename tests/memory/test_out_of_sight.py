"""Traces of models and inputs that hold tensors where neither copies nor pytrees reach."""

import random
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.memory import saved
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training.kept_bytes import trace_kept_bytes
from tests.kept import held_bytes
from tests.models import bert

ROWS, WIDTH = 64, 32
X = torch.randn(ROWS, WIDTH)


class Closure(nn.Module):
    """A block like that of minGPT, whose MLP is a lambda."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        m = nn.ModuleDict({"up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)})
        self.mlp = m
        self.run = lambda x: m["down"](F.gelu(m["up"](x)))

    def forward(self, x):
        return x + self.run(self.norm(x))


class OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        w, b, scale = self.fc.weight, self.fc.bias, self.scale
        self.run = lambda x: F.linear(x, w, b) * scale

    def forward(self, x):
        return self.run(x)


class Bound(nn.Module):
    """Calls bound methods, one of them of a weight, and a partial function."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.steps = [self.fc.forward, partial(F.dropout, p=0.1), self.out.weight.matmul]

    def forward(self, x):
        a, b, c = self.steps
        return c(b(a(x)).t()).exp()


class Statistics(nn.Module):
    """Updates buffers in a closure, and draws from the generators of PyTorch and Python."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        fc, norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.fc, self.norm, self.reads, self.calls = fc, norm, reads, []
        self.run = lambda x: norm(fc(F.dropout(x, 0.1)))

    def forward(self, x):
        self.calls.append(random.random())
        y = self.run(x)
        return y * 2 if self.reads and y.sum().item() > -1e9 else y


class Locked(nn.Module):
    """Has attributes that cannot be copied, one beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.parts = [torch.ones(WIDTH), threading.Lock()]

    def forward(self, x):
        with self.parts[1]:
            return self.fc(x) * self.parts[0]


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    @lru_cache  # noqa: B019
    def positions(self, rows: int) -> Tensor:
        return torch.arange(rows).float()[:, None].expand(rows, WIDTH)

    def forward(self, x):
        return self.fc(x) * self.positions(len(x))


TABLES: dict[int, Tensor] = {}


class Tabled(Cached):
    """Fills caches that are no lru_cache: of its file, and of its class."""

    masks: list[Tensor] = []  # noqa: RUF012

    def positions(self, rows: int) -> Tensor:
        if rows not in TABLES:
            TABLES[rows] = torch.arange(rows).float()[:, None].expand(rows, WIDTH)
            self.masks.append(torch.ones(WIDTH))
        return TABLES[rows] * self.masks[-1]


class Hidden(Cached):
    """Fills a cache that only a closure holds."""

    def __init__(self) -> None:
        super().__init__()
        tables: list[Tensor] = []

        def positions(rows: int) -> Tensor:
            if not tables:
                tables.append(torch.arange(rows).float()[:, None].expand(rows, WIDTH))
            return tables[0]

        self.positions = positions
        self.clear = tables.clear


MODELS: dict[str, Callable[[], nn.Module]] = {
    "closure": Closure,
    "parameters": OfParameters,
    "bound": Bound,
    "statistics": Statistics,
    "reads": partial(Statistics, reads=True),
    "locked": Locked,
    "cached": Cached,
    "tabled": Tabled,
}


def measured(model: nn.Module, *inputs: Any, **kwargs: Any) -> int:
    """The bytes that a real step holds, without parameters and buffers."""
    return held_bytes(model, partial(model.train(), **kwargs), *inputs)


def state(model: nn.Module) -> list[Any]:
    """All that a trace may not change, with the very objects."""
    tensors = model.state_dict(keep_vars=True).values()
    attributes = [(type(m), id(vars(m)), {**vars(m)}) for m in model.modules()]
    generators = torch.get_rng_state().tolist(), random.getstate()
    return [
        attributes,
        [t.tolist() for t in tensors],
        generators,
        len(vars(model).get("calls", ())),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_a_real_step_and_nothing_changes(name):
    model = MODELS[name]().eval()
    before = state(model)
    full = saved_bytes(model, X)
    assert state(model) == before
    assert full == measured(model, X)
    if name != "parameters":  # in which there is no layer to swap
        sparsify(model, Recipe(ratio=0.5))
    model.eval()
    before = state(model)
    kept = saved_bytes(model, X)
    assert state(model) == before
    assert kept == measured(model, X)


@pytest.mark.parametrize("name", ["closure", "statistics", "reads", "locked"])
def test_the_byte_budget_is_met_in_what_closures_run(name):
    model = MODELS[name]()
    full = saved_bytes(model, X)
    assert sparsify_within(model, Recipe(ratio=0.5), X)
    assert measured(model, X) == saved_bytes(model, X) <= 0.5 * full
    restore(model)
    assert saved_bytes(model, X) == full


def test_a_cache_that_a_trace_has_filled_out_of_sight_is_named():
    model = Hidden()
    full = saved_bytes(model, X)
    assert saved_bytes(model, X) == full
    with pytest.raises(UsageError, match="run the model once before razorctl traces it"):
        model(X)
    model.clear()
    model(X)
    assert saved_bytes(model, X) == full
    assert sparsify_within(model, Recipe(ratio=0.5), X)
    model(X).sum().backward()


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(Closure(), nn.Linear(WIDTH + 1, 1)).eval()
    before = state(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        saved_bytes(model, X)
    assert state(model) == before


@dataclass
class Boxes:
    boxes: Tensor


class Slots:
    __slots__ = ("tensors",)

    def __init__(self, tensors: Tensor) -> None:
        self.tensors = tensors


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.box = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, images, targets=()):
        y = self.box(F.gelu(self.fc(images.tensors)))
        return y.sum() + sum((y[: len(t.boxes)] - t.boxes).square().sum() for t in targets)


TARGETS = [Boxes(torch.rand(n, 4)) for n in (2, 3)]


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param((SimpleNamespace(tensors=X), TARGETS), id="namespace"),
        pytest.param(UserDict(images=Slots(X), targets=TARGETS), id="mapping"),
        pytest.param(Slots(X), id="alone"),
        pytest.param(SimpleNamespace(tensors=X, lock=threading.Lock()), id="uncopiable"),
    ],
)
def test_containers_that_pytree_does_not_know(inputs):
    model = Detector()
    keywords = dict(inputs) if isinstance(inputs, UserDict) else {}
    places = () if keywords else inputs if isinstance(inputs, tuple) else (inputs,)
    full = saved_bytes(model, inputs)
    assert full == measured(model, *places, **keywords)
    sparsify_within(model, Recipe(ratio=0.5), inputs)
    assert saved_bytes(model, inputs) == measured(model, *places, **keywords) <= 0.5 * full
    rows = trace_kept_bytes(model, inputs).rows
    assert sum(row.full_saved_bytes for row in rows) == full


def test_a_fake_failure_runs_on_a_real_copy(monkeypatch):
    model = Statistics().eval()
    want, before = saved_bytes(model, X), state(model)

    def fails(*_: Any) -> None:
        raise AssertionError("Please convert all Tensors to FakeTensors first")

    monkeypatch.setattr(saved, "fakes", fails)
    assert saved_bytes(model, X) == want
    assert state(model) == before


def test_a_model_in_a_fake_mode_or_a_tracker_of_memory():
    ids = torch.ones(2, 16, dtype=torch.long)
    model = bert()
    recipe = Recipe(ratio=0.9)
    full = saved_bytes(model, ids)
    with FakeTensorMode():  # the random states that `sparsify` compares are none of its tensors
        fake, fake_ids = bert().train(), torch.ones(2, 16, dtype=torch.long)
        assert saved_bytes(fake, fake_ids) == saved_bytes(model, ids) == full
        sparsify_within(fake, recipe, fake_ids)
        kept = saved_bytes(fake, fake_ids)
        fake(fake_ids).logits.sum().backward()
        assert all(p.grad is not None for p in fake.bert.encoder.parameters())
    sparsify_within(model, recipe, ids)
    assert saved_bytes(model, ids) == kept <= 0.1 * full
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model.train()(ids).logits.sum().backward()


def test_a_model_that_fsdp2_shards_is_refused(monkeypatch):
    model = nn.Linear(WIDTH, WIDTH)
    monkeypatch.setattr("razorctl.layers.fsdp._wrapped", lambda: [model])
    with pytest.raises(UsageError, match="before fully_shard"):
        saved_bytes(nn.Sequential(model), X)
