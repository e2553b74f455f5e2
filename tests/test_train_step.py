"""One optimizer step of every task: the weight of a label, and the time of updates."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.config.job import Job
from razorctl.config.tasks import NO_LABEL
from razorctl.errors import DivergedError, UsageError
from razorctl.ops.contrastive import Similarity, embedding_loss
from razorctl.optimizer import build_optimizer, cast_weights
from razorctl.step import ByLogits, label_count, refuse_infinite, train_step

CPU = torch.device("cpu")
JOB = Job(
    "m",
    "d",
    steps=2,
    batch_size=4,
    learning_rate=0.1,
    weight_decay=0.01,
    precision="fp32",
    optimizer="sgd",
    clip_norm=1e9,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7))


def call(model: nn.Module, inputs: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return logits


def stepped(model: nn.Module, job: Job, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The loss of one step."""
    optimizer = build_optimizer(model, job)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    total = None if job.classifies else label_count((labels for _, labels in batches), CPU)
    loss, _ = train_step(model, ByLogits(call, job), batches, optimizer, job, scaler, total=total)
    return loss


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "segmentation"])
def test_every_label_weighs_the_same_however_they_are_spread(task):
    inputs = torch.randn(4, 3, 5)
    labels = torch.randint(7, (4, 3))
    labels[0] = labels[1, 1:] = NO_LABEL
    model, spread = net(), net()
    if task == "segmentation":  # classes are the second dimension of its logits
        model, spread = (nn.Sequential(m, nn.Flatten(1, 1), Moved()) for m in (model, spread))
    job = replace(JOB, task=task)
    want = stepped(model, job, [(inputs, labels)])
    parts = [(inputs[i : i + 1], labels[i : i + 1]) for i in range(4)]
    got = stepped(spread, replace(job, accumulate=4), parts)
    torch.testing.assert_close(got, want)
    logits = net()(inputs)
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(want, mean.detach())
    for a, b in zip(model.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mixed", [False, True])
def test_class_weights_count_the_same_however_a_batch_is_split(mixed):
    """Their sum is that of torch's weighted cross-entropy, and the mean is over labels."""
    inputs, labels = torch.randn(4, 5), torch.tensor([0, 6, 6, 2])
    if mixed:
        labels = 0.7 * nn.functional.one_hot(labels, 7) + 0.3 / 7
    weights, job = torch.linspace(0.1, 3, 7), replace(JOB, label_smoothing=0.2)
    whole, spread = net(), net()
    logits = whole(inputs)
    want = nn.functional.cross_entropy(
        logits, labels, weights, label_smoothing=0.2, reduction="sum"
    )
    want.div(4).backward()
    scaler, losses = torch.amp.GradScaler("cpu", enabled=False), ByLogits(call, job, weights)
    job = replace(job, accumulate=2)
    parts = [(inputs[i : i + 2], labels[i : i + 2]) for i in (0, 2)]
    before = copy.deepcopy(spread)
    optimizer = torch.optim.SGD(spread.parameters(), 1.0)
    loss, _ = train_step(spread, losses, parts, optimizer, job, scaler)
    torch.testing.assert_close(loss, want.detach() / 4)
    for got, old, plain in zip(
        spread.parameters(), before.parameters(), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(old - got, plain.grad)


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)


def test_a_batch_without_labels_changes_nothing_and_is_finite():
    model = net()
    before = copy.deepcopy(model.state_dict())
    labels = torch.full((4, 3), NO_LABEL)
    job = replace(JOB, task="causal-lm", weight_decay=0.0)
    assert stepped(model, job, [(torch.randn(4, 3, 5), labels)]) == 0
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_optimizer_in_the_backward_pass_takes_the_same_steps(optimizer):
    job = replace(JOB, optimizer=optimizer)
    whole, within = net(), net()
    steps = [build_optimizer(whole, job)]
    steps.append(build_optimizer(within, replace(job, optimizer_in_backward=True)))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        batch = [(torch.randn(4, 5), torch.randint(7, (4,)))]
        train_step(whole, ByLogits(call, job), batch, steps[0], job, scaler)
        own = replace(job, optimizer_in_backward=True)
        train_step(within, ByLogits(call, own), batch, steps[1], own, scaler)
        assert all(p.grad is None for p in within.parameters())
    for a, b in zip(whole.parameters(), within.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert steps[0].state_dict()["param_groups"] == steps[1].state_dict()["param_groups"]
    assert steps[0].state_dict()["state"].keys() == steps[1].state_dict()["state"].keys()


def test_a_loss_that_is_not_finite_leaves_weights_that_are_updated_in_the_backward_pass():
    model, job = net(), replace(JOB, optimizer_in_backward=True)
    before = copy.deepcopy(model.state_dict())

    def check(loss: Tensor, norm: Tensor) -> None:
        refuse_infinite(loss, norm, scaled=False)

    batch = [(torch.full((4, 5), math.nan), torch.zeros(4, dtype=torch.long))]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(DivergedError, match="the loss is nan"):
        train_step(
            model,
            ByLogits(call, job),
            batch,
            build_optimizer(model, job),
            job,
            scaler,
            check=check,
        )
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


def test_weights_in_bf16_stay_tied_and_buffers_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    cast_weights(model, replace(JOB, weights="bf16", optimizer="adamw", precision="bf16"))
    assert {p.dtype for p in (*model[0].parameters(), *model[2].parameters())} == {torch.bfloat16}
    assert model[1].weight.dtype == torch.float32  # as a batch norm on a CPU wants it
    assert model[2].weight is model[0].weight
    assert model[1].running_mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"weights": "bf16"}, "sgd does not; choose --optimizer adamw"),
        ({"weights": "bf16", "optimizer": "adamw", "precision": "fp16"}, "choose --precision bf16"),
        ({"optimizer_in_backward": True, "accumulate": 2}, "accumulate must be 1"),
        ({"optimizer_in_backward": True, "processes": 2}, "processes must be 1"),
        ({"optimizer_in_backward": True, "precision": "fp16"}, "cannot skip overflowed steps"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        replace(JOB, **({"precision": "auto"} | settings))


@pytest.mark.parametrize("most", [0.01, 1e9])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_fused_optimizer_clips_as_it_updates(kind, most, monkeypatch):
    """As after a pass over the gradients; a weight without a gradient stays as it is."""
    found, passes = [], []
    whole = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_norm_",
        lambda *args, **how: passes.append(1) or whole(*args, **how),
    )
    for fused in (False, True):
        model = net()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        optimizer = kind(model.parameters(), lr=0.1, fused=fused, foreach=False)
        scaler, draw = torch.amp.GradScaler("cpu", enabled=False), torch.Generator().manual_seed(0)
        norms = []
        for _ in range(3):
            batch = torch.randn(4, 5, generator=draw), torch.randint(7, (4,), generator=draw)
            job = replace(JOB, clip_norm=most)
            norms.append(train_step(model, ByLogits(call, job), [batch], optimizer, job, scaler)[1])
        found.append((torch.stack(norms), model.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    assert (found[1][1]["unused"] == 1).all()
    assert len(passes) == 3


class Scaled(nn.Linear):
    """A linear layer with a scale and a bias of similarities."""

    def __init__(self) -> None:
        super().__init__(16, 8)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([-1.0]))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_micro_batches_have_the_gradient_of_a_learned_scale_and_bias(sigmoid):
    job = replace(JOB, task="embedding", accumulate=3, batch_size=12)
    inputs, ids = torch.randn(3, 4, 2, 16), torch.arange(1, 25).view(3, 4, 2)
    model, found = Scaled(), []

    def similarity(model: nn.Module) -> Similarity:
        return Similarity(model.scale.exp(), model.shift if sigmoid else None, True)

    def embed(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.normalize(model(x), dim=-1)

    for accumulate in (3, 1):
        batches = zip(inputs, ids, strict=True)
        if accumulate == 1:
            batches = [(inputs.flatten(0, 1), ids.flatten(0, 1))]
        own, gradients = replace(job, accumulate=accumulate), []
        each = copy.deepcopy(model)
        train_step(
            *(each, ByLogits(embed, own, similarity=similarity), batches),
            *(build_optimizer(each, own), own, torch.amp.GradScaler("cpu", enabled=False)),
            check=lambda *_, each=each, to=gradients: to.extend(
                p.grad.clone() for p in each.parameters() if p.grad is not None
            ),
        )
        found.append(gradients)
    assert len(found[0]) == 3 + sigmoid
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", ["full", "razor"])
def test_micro_batches_of_embeddings_have_the_gradient_of_their_common_loss(method):
    """Also with dropout, which draws the same numbers twice."""
    job = replace(JOB, task="embedding", accumulate=3, batch_size=12)
    inputs, ids = torch.randn(3, 4, 2, 64), torch.arange(1, 25).view(3, 4, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32))
    whole = copy.deepcopy(model)
    for each in (model, whole):
        sparsify(each, Recipe(method, 0.5))

    def embed(model: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.normalize(model(x), dim=-1)

    torch.manual_seed(1)
    gradients: list[Tensor] = []
    loss, _ = train_step(
        *(model, ByLogits(embed, job), zip(inputs, ids, strict=True)),
        *(build_optimizer(model, job), job, torch.amp.GradScaler("cpu", enabled=False)),
        check=lambda *_: gradients.extend(p.grad.clone() for p in model.parameters()),
    )
    torch.manual_seed(1)
    embeddings = torch.cat([embed(whole, x) for x in inputs])
    want = embedding_loss(embeddings, ids.flatten(0, 1), Similarity(20), "mean")
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for got, parameter in zip(gradients, whole.parameters(), strict=True):
        if method == "full":
            torch.testing.assert_close(got, parameter.grad)
        else:  # which draws other numbers for rounding
            assert torch.cosine_similarity(got.flatten(), parameter.grad.flatten(), 0) > 0.999
