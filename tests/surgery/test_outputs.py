"""The output layers of models: found by what reads them, and exact from the first step on."""

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm import create_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertModel,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from razorctl import Recipe, restore, saved_bytes, sparsify, sparsify_within
from razorctl.layers.base import RazorLayer
from razorctl.layers.heads.outputs import MARK, Outputs, find
from razorctl.layers.kinds.linear import Linear
from razorctl.surgery.excess import uncompressed
from tests.models import bert, gpt2, llama, vit

IDS = torch.arange(22).view(2, 11) % 47 + 3
WIDTH, VOCABULARY = 32, 200


class HeadFirst(nn.Module):
    """A language model whose head is registered first, and what it does with the logits."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        if tied:
            self.embedding.weight = self.lm_head.weight

    def hidden(self, ids):
        x = self.embedding(ids)
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class PreNorm(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.qkv, self.proj = RmsNorm(), nn.Linear(WIDTH, 3 * WIDTH), self.linear(1)
        self.norm_2, self.fc_1, self.fc_2 = RmsNorm(), nn.Linear(WIDTH, 2 * WIDTH), self.linear(2)

    def linear(self, times):
        return nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        return x + self.fc_2(F.silu(self.fc_1(self.norm_2(x))))


class Lit(nn.Module):
    """Modules as litgpt's GPT has them: the head first, no method that names it."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        parts = {"wte": nn.Embedding(VOCABULARY, WIDTH), "h": nn.ModuleList([PreNorm(), PreNorm()])}
        self.transformer = nn.ModuleDict({**parts, "ln_f": RmsNorm()})

    def forward(self, ids):
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return [30 * torch.tanh(part / 30) for part in logits.split(4, dim=1)]


class Agent(nn.Module):
    """A policy beside a value of one number; their body is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 1)
        self.body = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        x = torch.relu(self.body(x))
        return SimpleNamespace(actions=self.policy(x).log_softmax(-1), value=self.value(x))


class Detector(nn.Module):
    """Classes and boxes from each layer, by shared and by own heads, as DETR's have them."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.ModuleList([nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)])
        self.box = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.layers = nn.ModuleList([PreNorm(), PreNorm()])

    def forward(self, x):
        outputs = []
        for layer, classes in zip(self.layers, self.classes, strict=True):
            x = layer(x)
            normed = F.layer_norm(x, x.shape[-1:])
            outputs.append({"logits": classes(normed), "boxes": self.box(normed).sigmoid()})
        return outputs


class Scaled(HeadFirst):
    """A learned temperature, a choice and a mask lie between the head and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        logits = super().forward(ids) * self.temperature.exp()
        return F.cross_entropy(logits[ids > 5], ids[ids > 5]), logits.gather(-1, ids[..., None])


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        image, text = F.normalize(self.image(x), dim=-1), F.normalize(self.text(-x), dim=-1)
        return self.scale.exp() * image @ text.mT


class Checkpointed(HeadFirst):
    """All but the embedding in one node of the graph."""

    def forward(self, ids):
        return checkpoint(self.run, self.embedding(ids), use_reentrant=True)

    def run(self, x):
        return self.lm_head(self.norm(x + self.down(F.gelu(self.up(x)))))


def frozen() -> HeadFirst:
    model = HeadFirst()
    model.lm_head.requires_grad_(False)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16))


def twice() -> nn.Module:
    """A linear layer that reads itself."""
    linear = nn.Linear(8, 8)
    return nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), nn.Linear(8, 8), linear)


def t5() -> nn.Module:
    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 3}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=50, decoder_start_token_id=0))


def wide(*columns: int):
    return torch.randn(2, 5, *columns)


PIXELS = torch.linspace(-1, 1, 2 * 3 * 64 * 64).view(2, 3, 64, 64)
LABELED = {"input_ids": IDS, "labels": IDS}
# A model, its inputs, its output layers, and whether the graph hides none.
MODELS = {
    "head first": (HeadFirst, IDS, {"lm_head"}, True),
    "tied": (lambda: HeadFirst(tied=True), IDS, {"lm_head"}, True),
    "litgpt": (Lit, IDS, {"lm_head"}, True),
    "agent": (Agent, wide(8), {"policy", "value"}, True),
    "detector": (Detector, wide(WIDTH), {"classes.0", "classes.1", "box.2"}, True),
    "temperature": (Scaled, IDS, {"lm_head"}, True),
    "a norm reads": (normed, wide(8), set(), True),
    "reads itself": (twice, wide(8), set(), True),
    "two towers": (TwoTowers, wide(8), set(), False),
    "one node": (Checkpointed, IDS, set(), False),
    "frozen": (frozen, IDS, set(), False),
    "bert": (bert, IDS, {"classifier"}, True),
    "bert of features": (lambda: BertModel(bert().config), IDS, {"pooler.dense"}, True),
    "gpt2": (gpt2, IDS, {"lm_head"}, True),
    "gpt2 with loss": (gpt2, LABELED, {"lm_head"}, True),
    "llama of features": (lambda: LlamaModel(llama().config), IDS, set(), True),
    "t5": (t5, LABELED, {"lm_head"}, True),
    "vit": (vit, PIXELS[..., :16, :16], {"head"}, True),
    "resnet": (lambda: create_model("test_resnet", num_classes=5), PIXELS, {"fc"}, True),
}


def step(model, inputs):
    """A pass, and a step that leaves the weights as they are."""
    called(model, inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)


def named(model):
    """The names of the output layers that a sparsified model knows."""
    return vars(model)[MARK].found.names


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


@pytest.mark.parametrize("autocast", [False, True], ids=["single", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_found_by_what_reads_them(name, autocast):
    build, inputs, names, every = MODELS[name]
    model = build()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert find(model, called(model, inputs)) == Outputs(frozenset(names), every)


@pytest.mark.parametrize("name", MODELS)
def test_a_first_pass_of_razor_layers_shows_the_same(name):
    build, inputs, names, _ = MODELS[name]
    model = build()
    sparsify(model)
    for _ in range(2):
        step(model, inputs)
    found = {"lm_head"} if name == "frozen" else names  # whose nodes know their layer
    if MARK in vars(model):
        assert named(model) == found
        assert not model._forward_hooks
    for name in found & {n for n, m in model.named_modules() if isinstance(m, Linear)}:
        assert model.get_submodule(name).rules is None or name == "fc"  # the only linear layer


def update(model, batches, steps=20):
    """The change of the head by AdamW, and the gradient of its first step."""
    before, grad = model.lm_head.weight.detach().double().clone(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        grad = model.lm_head.weight.grad.clone() if grad is None else grad
        optimizer.step()
    return model.lm_head.weight.detach().double() - before, grad


def close(a, b):
    return F.cosine_similarity(a.flatten().double(), b.flatten().double(), 0)


@pytest.mark.parametrize(
    ("ratio", "traced"), [(0.5, False), (0.9, False), (0.97, False), (0.5, True)]
)
def test_the_update_of_a_head_that_comes_first_is_that_of_full(ratio, traced, monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    stock = HeadFirst()
    model, batches = copy.deepcopy(stock), torch.randint(VOCABULARY, (4, 8, 17))
    recipe = Recipe(ratio=ratio)
    if traced:
        sparsify_within(model, recipe, batches[0])
    else:
        sparsify(model, recipe)
    (want, exact), (got, first) = update(stock, batches), update(model, batches)
    assert close(want, got) > 0.97
    assert close(exact, first) > 0.97


@pytest.fixture
def trained():
    """A head first, sparsified, after the first forward pass."""
    model = HeadFirst()
    sparsify(model)
    return model, model(IDS)


def test_a_wrong_guess_is_mended_after_the_first_pass(trained):
    model, logits = trained
    assert not model.lm_head.int8_weight_grad
    assert model.lm_head.saving  # until the next step, since blocks may run again
    logits.sum().backward()
    step(model, IDS)
    assert type(model.down) is nn.Linear
    step(model, IDS)
    assert isinstance(model.down, Linear)
    assert model.down.rules is not None
    assert not model.lm_head.saving
    assert not {*model._forward_hooks, *model._forward_pre_hooks}


def test_two_passes_before_a_backward_pass(trained):
    model, logits = trained
    stock = copy.deepcopy(model)
    restore(stock)
    (logits.sum() + model(IDS).square().sum()).backward()
    (stock(IDS).sum() + stock(IDS).square().sum()).backward()
    assert close(stock.lm_head.weight.grad, model.lm_head.weight.grad) > 0.99


def test_blocks_that_are_checkpointed_keep_the_same_in_both_runs():
    class Blocks(HeadFirst):
        def hidden(self, ids):
            x = self.embedding(ids)
            return checkpoint(self.block, x, use_reentrant=False)

        def block(self, x):
            return self.norm(x + self.down(F.gelu(self.up(x))))

        def forward(self, ids):
            return checkpoint(self.lm_head, self.hidden(ids), use_reentrant=False)

    model = Blocks()
    sparsify(model)
    for _ in range(3):
        (model(IDS).sum() + model(IDS).sum()).backward()
        step(model, IDS)
    assert not model.lm_head.saving
    assert isinstance(model.down, Linear)


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_go_on_and_are_undone_by_themselves(twin, passes):
    model = HeadFirst()
    sparsify(model)
    for _ in range(passes):
        step(model, IDS)
    other = twin(model)
    for _ in range(3):  # a copy's weights may have the version that the model's had
        step(other, IDS)
    assert isinstance(other.down, Linear)
    assert isinstance(model.down, Linear) == (passes == 2)
    for each in (model, other):
        restore(each)
        assert not {*each._forward_hooks, *each._forward_pre_hooks}
        assert MARK not in vars(each)
        assert not any(isinstance(m, RazorLayer) for m in each.modules())


def test_saved_bytes_are_those_of_later_steps():
    model, seen = HeadFirst(), HeadFirst()
    first = sparsify(model)
    sparsify(seen)
    before = saved_bytes(model, IDS)
    assert type(model.down) is nn.Linear  # it does not change
    assert model.lm_head.saving
    for _ in range(2):
        step(seen, IDS)
    assert before == saved_bytes(seen, IDS)
    assert "lm_head" in first


def test_the_log_names_them(caplog):
    caplog.set_level(logging.INFO)
    model = vit()
    sparsify(model)
    saved_bytes(model, PIXELS[..., :16, :16])
    assert "output layer" not in caplog.text
    model(PIXELS[..., :16, :16])
    assert "output layers of VisionTransformer, which stay exact: head" in caplog.text
    assert not [r for r in caplog.records if r.levelno > logging.INFO]

    model = Agent()
    sparsify(model)
    for _ in range(3):
        step(model, wide(8))
    (warning,) = [r.message for r in caplog.records if r.levelno > logging.INFO]
    assert (
        "first forward pass of Agent shows its output layers: policy, value. They are not"
        in warning
    )
    assert "sparsify assumed body.2." in warning

    caplog.clear()
    model = HeadFirst()
    sparsify_within(model, Recipe(ratio=0.5), IDS)
    assert "output layers of HeadFirst, which stay exact: lm_head" in caplog.text


def test_a_drawn_layer_stays_drawn_and_runs_in_float(monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    model = HeadFirst()
    sparsify(model, Recipe(joint_budget=0.9))
    for _ in range(2):
        step(model, IDS)
    assert not model.lm_head.int8_weight_grad
    assert model.lm_head.saving
    assert type(model.down) is nn.Linear


def test_passes_that_do_not_train_show_nothing():
    model = HeadFirst()
    sparsify(model)
    with torch.no_grad():
        model(IDS)
    model.eval()(IDS)
    torch.fx.symbolic_trace(model)
    torch.func.grad(lambda w: torch.func.functional_call(model, {"norm.weight": w}, IDS).sum())(
        model.norm.weight.detach()
    )
    assert vars(model)[MARK].found is None
    model.train()(IDS)
    assert named(model) == {"lm_head"}


def test_a_compiled_model_keeps_the_guess():
    model = HeadFirst()
    sparsify(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(IDS).sum().backward()
    assert vars(model)[MARK].found is None
    restore(model)


def test_a_model_of_one_linear_layer_and_one_whose_parts_alone_run_are_as_before():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    assert "0" in sparsify(model)
    assert MARK not in vars(model)
    model = HeadFirst()
    sparsify(model)
    model.lm_head(model.hidden(IDS)).sum().backward()
    assert vars(model)[MARK].found is None
    assert isinstance(model.lm_head, Linear)


def test_messages_name_the_true_classifier():
    model = Agent()
    sparsify_within(model, Recipe(ratio=0.3), wide(8))
    sizes = {"policy": 50, "value": 50}
    assert uncompressed(model, sizes, 100, 0).startswith("2 output layers (100 %")
    assert uncompressed(model, {"policy": 50}, 100, 0).startswith("the classifier (50 %")
    model = nn.Sequential(nn.Softplus(), nn.Mish())  # of which none keeps much
    said = uncompressed(model, {"0": 11, "1": 9}, 10_000, 0)
    assert said == "1 Softplus layer (0.1 % of full fine-tuning) is not compressed"
