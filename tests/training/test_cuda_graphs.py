"""Micro-batches as CUDA graphs: as without them, or without them after one warning."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from razorctl import Recipe, data, models, restore, sparsify
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.layers.random_state import random_state
from razorctl.models.timm.micro import VIT_MICRO
from razorctl.ops import kernels
from razorctl.optimizer import build_optimizer
from razorctl.training import cuda_graphs, profiler, state
from razorctl.training.compiled import refuse_uncompilable
from razorctl.training.cuda_graphs import KINDS, WARM_UPS
from razorctl.training.doctor import graphs as trial
from razorctl.training.feed import Feed, sequenced
from razorctl.training.learner import Learner
from razorctl.training.profiler import PHASES, capture_as_in_runs, profile
from razorctl.training.recovery import Recovery, Relief, reliefs
from razorctl.training.run import finetune
from tests import graphs
from tests.cli import kinds
from tests.training.runs import said

pytestmark = pytest.mark.usefixtures("one_block")

JOB = Job(
    *("vit-micro", "digits"),
    batch_size=8,
    steps=6,
    precision="bf16",
    learning_rate=0.01,
)
RAZOR = Recipe("razor", 0.5)
STEPS = WARM_UPS + 3


@pytest.fixture(scope="module")
def one_block(shallow):
    """vit-micro has one block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VIT_MICRO, "depth", 1)
        yield


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """The graphs that were made."""
    made: list[graphs.Graphs] = []

    def graphs_of(device):
        made.append(graphs.Graphs(device))
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "Graphs", graphs_of)
    return made


def learner(job: Job, recipe: Recipe, drop: float = 0.0) -> Learner:
    family = models.find(job.model)
    job = job.resolved(family.defaults, 1000)
    torch.manual_seed(0)
    model = family.bare(10, None)
    model.head = nn.Sequential(nn.Dropout(drop), nn.BatchNorm1d(128), model.head)
    sparsify(model, recipe)
    return Learner(model, family.losses(job), torch.device("cpu"))


def batches(job: Job, step: int, rows: int | None = None) -> list[tuple[torch.Tensor, ...]]:
    """The micro-batches of a step."""
    draw = torch.Generator().manual_seed(step)
    size = (rows or 8) // job.accumulate
    return [
        (torch.randn(size, 1, 28, 28, generator=draw), torch.randint(10, (size,), generator=draw))
        for _ in range(job.accumulate)
    ]


def trained(job: Job, recipe: Recipe, steps: int = STEPS, drop: float = 0.0):
    """Losses and norms, and the weights and buffers after the last step."""
    it = learner(job, recipe, drop)
    torch.manual_seed(1)
    found = [it.step(batches(job, step)) for step in range(steps)]
    return torch.tensor(found), it.model.state_dict()


def assert_same(some, others) -> None:
    torch.testing.assert_close(some, others, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("recipe", "accumulate", "precision"),
    [
        (Recipe("full"), 1, "fp32"),
        (RAZOR, 1, "bf16"),
        (Recipe("razor", 0.9, int8_forward=True), 2, "bf16"),
        (Recipe("prebackrazor++", 0.5), 4, "bf16"),  # draws in place
        (Recipe("backrazor", 0.9), 1, "bf16"),
    ],
    ids=lambda value: value.method if isinstance(value, Recipe) else str(value),
)
def test_steps_are_the_same(recipe, accumulate, precision, stand_in, caplog):
    job = replace(JOB, accumulate=accumulate, precision=precision)
    plain = trained(job, recipe)
    assert not stand_in
    assert_same(trained(replace(job, cuda_graphs=True), recipe), plain)
    (made,) = stand_in
    assert made.captured == (1 if accumulate == 1 else 2)  # those that write, and that add
    assert said(caplog) == []


def test_random_numbers_of_the_host_end_it(stand_in, caplog):
    plain = trained(JOB, RAZOR, drop=0.5)
    assert_same(trained(replace(JOB, cuda_graphs=True), RAZOR, drop=0.5), plain)
    assert said(caplog) == [
        "training continues without CUDA graphs: the model draws random numbers on the host, which "
        "a graph would repeat"
    ]


def of_sizes(job: Job, graphed: bool, steps: list[tuple[int, ...]]):
    """Losses, norms and weights of steps whose micro-batches have these rows; and the learner."""
    it = learner(replace(job, cuda_graphs=graphed), RAZOR)
    draw = torch.Generator().manual_seed(0)
    found = [
        it.step(
            (torch.randn(rows, 1, 28, 28, generator=draw), torch.arange(rows) % 10)
            for rows in sizes
        )
        for sizes in steps
    ]
    return (torch.tensor(found), it.model.state_dict()), it


def test_a_rare_shape_runs_as_it_is_and_graphs_stay(stand_in, caplog):
    sizes = [(8,)] * STEPS + [(6,), (8,)]
    plain, _ = of_sizes(JOB, False, sizes)
    own, it = of_sizes(JOB, True, sizes)
    assert_same(own, plain)
    assert (stand_in[0].captured, stand_in[0].replayed) == (1, STEPS - WARM_UPS + 1)
    assert it._captured.works
    assert said(caplog) == []


def test_each_kind_is_warmed_up_and_all_write_the_same_gradients(stand_in, caplog):
    """Micro-batches of a step may be of several kinds."""
    job = replace(JOB, accumulate=2, precision="fp16")  # whose gradients are scaled
    sizes = [(4, 4), (6, 6), (4, 4), (6, 6), (4, 4), (6, 6), (4, 6), (6, 4), (6, 6), (4, 4)]
    sizes += [(2, 4), (4, 2)]  # a rare kind, whose gradients go there too
    plain, _ = of_sizes(job, False, sizes)
    own, it = of_sizes(job, True, sizes)
    assert_same(own, plain)
    (made,) = stand_in
    # Two micro-batches of each kind warm it up, those of steps 1 and 2, and the rare ones run.
    assert (made.captured, made.replayed) == (4, 2 * (len(sizes) - 4) + 2)
    graphs_of_kinds = [kind.graphs for kind in it._captured._kinds]
    assert [len(each) for each in graphs_of_kinds] == [2, 2, 0]
    memories = {tuple(map(id, graph.after)) for each in graphs_of_kinds for graph in each}
    assert len(memories) == 1
    assert said(caplog) == []


def test_kinds_beyond_the_most_run_as_they_are(stand_in, caplog, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "KINDS", 1)
    sizes = [(8,)] * STEPS + [(6,)] * STEPS + [(8,)]
    plain, _ = of_sizes(JOB, False, sizes)
    own, it = of_sizes(JOB, True, sizes)
    assert_same(own, plain)
    assert (stand_in[0].captured, stand_in[0].replayed) == (1, STEPS - WARM_UPS + 1)
    assert it._captured.works


def test_shapes_that_change_all_the_time_end_it(stand_in, caplog):
    sizes = [(rows,) for rows in range(2, 2 + KINDS + 2)]
    plain, _ = of_sizes(JOB, False, sizes)
    own, it = of_sizes(JOB, True, sizes)
    assert_same(own, plain)
    assert not it._captured.works
    assert said(caplog) == [
        "training continues without CUDA graphs: micro-batches have more than 6 shapes"
    ]


def moved_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


MOVES = {
    "assign": lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    ),
    "data": moved_data,
    "restore": restore,
}


@pytest.mark.parametrize("move", MOVES)
def test_weights_in_other_memory_are_captured_anew(move, stand_in, caplog):
    found = []
    for graphed in (False, True):
        it = learner(replace(JOB, cuda_graphs=graphed, momentum=0.0), RAZOR)
        losses = [it.step(batches(JOB, step)) for step in range(STEPS)]
        MOVES[move](it.model)
        it.optimizer = build_optimizer(it.model, it.job)
        losses += [it.step(batches(JOB, step)) for step in range(STEPS)]
        found.append((torch.tensor(losses), it.model.state_dict()))
    assert_same(*found)
    assert [made.captured for made in stand_in] == [1, 1]
    assert said(caplog) == []


def test_weights_that_change_in_place_keep_their_graphs(stand_in, tmp_path):
    """As those of a checkpoint that is loaded, or of an average, do."""
    found = []
    for graphed in (False, True):
        it = learner(replace(JOB, cuda_graphs=graphed, ema=0.5), RAZOR)
        losses = [it.step(batches(JOB, step)) for step in range(STEPS)]
        state.write(tmp_path, *it.snapshot())
        losses += [it.step(batches(JOB, step)) for step in range(2)]
        it.load(tmp_path)
        it.begin()
        losses += [it.step(batches(JOB, step)) for step in range(2)]
        found.append((torch.tensor(losses), it.model.state_dict()))
    assert_same(*found)
    assert_same(losses[-2:], losses[-4:-2])
    assert [made.captured for made in stand_in] == [1]


def conversations(few: int) -> str:
    """Prompts with answers of 1 to 180 words, and few of one length."""
    rows = [{"prompt": f"w{n}", "completion": "w1 " * (1 + n * few % 180)} for n in range(64)]
    return "\n".join(map(json.dumps, rows))


def labeled(few: int) -> str:
    rows = (f"{'w1 ' * (1 + n * few % 180)},{'ab'[n % 2]}\n" for n in range(64))
    return "text,label\n" + "".join(rows)


@pytest.mark.parametrize(
    ("model", "name", "packing", "recipe"),
    [
        ("llama", "a.jsonl", False, Recipe("full")),
        ("llama", "a.jsonl", True, Recipe("full")),
        ("llama", "a.jsonl", True, RAZOR),
        ("bert", "a.csv", None, Recipe("full")),
    ],
)
def test_texts_have_few_shapes(
    model, name, packing, recipe, stand_in, caplog, tmp_path, monkeypatch
):
    """Texts are padded more for graphs; that changes no loss and no gradient but by rounding."""
    monkeypatch.chdir(tmp_path)
    kinds.build(tmp_path)
    config = tmp_path / model / "config.json"
    config.write_text(config.read_text().replace('_embeddings": 64', '_embeddings": 192'))
    (tmp_path / name).write_text(conversations(23) if "json" in name else labeled(23))
    job = Job(model, name, input_size=192, batch_size=8, steps=24, packing=packing)
    job = replace(job, precision="fp32", optimizer="sgd", learning_rate=0.01)
    found = {}
    for kind in ("plain", "padded", "graphs"):
        family, source = data.pair(job)
        fed = family.fed(replace(job, packing=packing))
        splits = sequenced(source.load(), fed, job, lambda _: None)
        own = replace(job, cuda_graphs=kind != "plain").resolved(family.defaults, 64)
        family = fed
        torch.manual_seed(0)
        net = family.bare(len(splits.classes), 192)
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        sparsify(net, recipe)
        feed = Feed(net, own, family, splits, torch.device("cpu"))
        of = replace(own, cuda_graphs=kind == "graphs")
        it = Learner(net, family.losses(of), feed.device)
        shapes, losses, steps = set(), [], feed.loading.batches()
        for _ in range(24):
            batches = [*next(steps)]
            shapes.add(batches[0]["inputs"]["input_ids"].shape)
            if kind != "plain" or recipe.method == "full":
                losses.append(it.step(map(feed.trained, batches), feed.total(batches)))
        found[kind] = torch.tensor(losses), net.state_dict(), shapes
    plain, padded = found["plain"], found["padded"]
    assert_same(found["graphs"][:2], padded[:2])
    if recipe.method == "full":  # razor rounds by tiles, where padding is
        torch.testing.assert_close(padded[:2], plain[:2], rtol=1e-4, atol=1e-5)
    assert len(plain[2]) > len(padded[2]) <= KINDS
    (made,) = stand_in
    assert made.captured <= len(padded[2])
    assert made.replayed >= 24 - (WARM_UPS + 1) * len(padded[2])
    assert said(caplog) == []


@pytest.mark.parametrize("where", ["capture", "replay"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_cannot_be_captured_runs_as_it_is(accumulate, where, monkeypatch, caplog):
    job = replace(JOB, accumulate=accumulate)
    plain = trained(job, RAZOR)

    def refuse():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def fails(self, run):
        captured = capture(self, run)
        if self.captured < accumulate:  # of two graphs, the second one fails
            return captured
        return refuse() if where == "capture" else (captured[0], refuse)

    capture = graphs.Graphs.capture
    monkeypatch.setattr(graphs.Graphs, "capture", fails)
    assert_same(trained(replace(job, cuda_graphs=True), RAZOR), plain)
    assert said(caplog) == [
        "training continues without CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_model_that_waits_for_the_device_runs_as_it_is(where, stand_in, caplog):
    """What its half of a pass has changed before is changed once: batch norms, gradients."""

    def halved(module, args, output):
        if where == "backward":
            output.register_hook(lambda grad: grad * (0.5 if grad.sum().item() > 0 else 1.0))
            return None
        return output * (0.5 if output.mean().item() > 0 else 1.0)

    found = []
    for graphed in (False, True):
        it = learner(replace(JOB, accumulate=2, cuda_graphs=graphed), RAZOR)
        it.model.head[1].register_forward_hook(halved)  # of the batch norm
        losses = [it.step(batches(it.job, step)) for step in range(STEPS)]
        found.append((torch.tensor(losses), it.model.state_dict()))
    assert_same(*found)
    assert stand_in[0].captured == 0
    assert said(caplog) == [
        "training continues without CUDA graphs: CUDA error: operation not permitted when stream "
        "is capturing"
    ]


def test_a_dead_card_and_a_lack_of_memory_are_raised(monkeypatch, stand_in, caplog):
    def fails(self, run):
        raise error

    monkeypatch.setattr(graphs.Graphs, "capture", fails)
    monkeypatch.setattr(kernels, "unusable", lambda device: RuntimeError("dead"))
    for error in (RuntimeError("an illegal memory access"), torch.OutOfMemoryError()):
        with pytest.raises(type(error)):
            trained(replace(JOB, cuda_graphs=True), RAZOR)
    assert said(caplog) == []


def test_graphs_are_forgotten_after_an_error(stand_in):
    """The graphs are freed after a lack of memory, when micro-batches or the model change."""
    it = learner(replace(JOB, cuda_graphs=True), RAZOR)
    for step in range(STEPS):
        it.step(batches(JOB, step))
    with pytest.raises(ZeroDivisionError):
        it.step(1 / 0 for _ in range(1))
    it.parts = 2
    for step in range(STEPS):
        it.step(batches(JOB, step))
    assert [made.captured for made in stand_in] == [1, 2]


@pytest.mark.parametrize(
    ("job", "recipe", "mend"),
    [
        ({}, Recipe(joint_budget=0.5), "leave --cuda-graphs out, or set --joint-budget to 1"),
        ({"processes": 2}, RAZOR, "not captured as CUDA graphs; leave --cuda-graphs out"),
        ({"optimizer_in_backward": True}, RAZOR, "leave --cuda-graphs or --optimizer-in-backward"),
    ],
)
def test_what_changes_outside_of_a_graph_is_refused(job, recipe, mend):
    with pytest.raises(UsageError, match=mend):
        refuse_uncompilable(replace(JOB, cuda_graphs=True, **job), recipe)


def test_a_profile_has_both_passes_in_one_phase(monkeypatch, stand_in):
    monkeypatch.setattr(profiler, "capture_as_in_runs", lambda job, *_: (job, ""))
    found = profile("vit-micro", RAZOR, batch_size=4, steps=2, device="cpu", cuda_graphs=True)
    assert stand_in[0].captured == 1
    assert found.phases.forward_s > 10 * found.phases.backward_s
    assert set(PHASES) == {name.removesuffix("_s") for name in vars(found.phases)}


@pytest.mark.parametrize(
    ("wrong", "state", "found"),
    [
        (None, "ok", "cosine 1.0000 of a replayed step's gradient"),
        ("capture", "note", "a step cannot be captured"),
        ("replay", "problem", "of a replayed step's gradient"),
    ],
)
def test_doctor_tries_a_graph(wrong, state, found, monkeypatch):
    def fails(self, run):
        if wrong == "capture":
            raise RuntimeError("no")
        return capture(self, run)[0], lambda: None

    capture = graphs.Graphs.capture
    if wrong:
        monkeypatch.setattr(graphs.Graphs, "capture", fails)
    check = trial(torch.device("cpu"))
    assert (check.state, found in check.found) == (state, True)


@pytest.mark.parametrize(
    ("job", "joint_budget", "why"),
    [
        ({}, 1.0, ""),
        ({"compile": True}, 1.0, "razor is predicted to take 1.1 to 1.3 times as long"),
        ({"steps": 19}, 1.0, "a run of 19 steps is too short"),
        ({"processes": 2}, 1.0, "several processes"),
        ({"optimizer_in_backward": True}, 1.0, "in the backward pass"),
        ({}, 0.5, "a joint budget"),
        ({"task": "embedding", "accumulate": 2}, 1.0, "share a loss"),
        ({"task": "embedding", "accumulate": 2, "cuda_graphs": True}, 1.0, "share a loss"),
    ],
)
def test_graphs_are_the_default_on_a_card(job, joint_budget, why):
    job = replace(JOB, **{"steps": 20, "cuda_graphs": None, **job})
    recipe = Recipe(joint_budget=joint_budget)
    resolved, note = cuda_graphs.resolve(job, recipe, torch.device("cuda"))
    assert resolved.captured is (why == "")
    assert (why in note) if why else note == ""
    asked = replace(job, cuda_graphs=False)
    slow = note if job.compile else ""
    assert cuda_graphs.resolve(asked, recipe, torch.device("cuda")) == (asked, slow)
    full = replace(recipe, method="full")
    assert cuda_graphs.resolve(asked, full, torch.device("cuda")) == (asked, "")


@pytest.mark.parametrize(("joint_budget", "why"), [(1.0, ""), (0.5, "a joint budget")])
def test_a_profile_of_few_steps_is_captured_like_a_long_run(joint_budget, why):
    job, recipe = replace(JOB, steps=1, cuda_graphs=None), Recipe(joint_budget=joint_budget)
    job, note = capture_as_in_runs(job, recipe, torch.device("cuda"))
    assert (job.steps, job.captured) == (1, not why)
    assert (why in note) if why else note == ""


def test_a_run_on_a_cpu_that_asks_for_graphs_says_that_it_has_none(tmp_path):
    run = finetune(replace(JOB, cuda_graphs=True), RAZOR, out=tmp_path / "run", device="cpu")
    assert "CUDA graphs need a CUDA device; steps run without." in run.notes
    plain = finetune(JOB, RAZOR, out=tmp_path / "plain", device="cpu")
    assert [step.loss for step in run] == [step.loss for step in plain]


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    """Runs keep `cuda_graphs`."""
    monkeypatch.setattr(cuda_graphs, "resolve", lambda job, recipe, device: (job, ""))


@pytest.mark.parametrize("where", ["capture", "replay", "evaluation"])
def test_a_run_short_of_memory_with_graphs_goes_on_without(
    where, stand_in, caplog, tmp_path, monkeypatch, graphs_on_a_cpu
):
    job = replace(JOB, evaluate_every=4)
    plain = [*finetune(job, RAZOR, out=tmp_path / "plain", device="cpu")]
    caplog.clear()
    run = finetune(replace(job, cuda_graphs=True), RAZOR, out=tmp_path / "run", device="cpu")
    evaluate, capture, failed = type(run).evaluation, graphs.Graphs.capture, []

    def short(*_):
        failed.append(True)
        raise torch.OutOfMemoryError

    def evaluation(self, rows=None):
        if self.learner._captured is not None:
            short()
        return evaluate(self, rows)

    if where == "capture":
        monkeypatch.setattr(graphs.Graphs, "capture", short)
    elif where == "replay":
        monkeypatch.setattr(
            graphs.Graphs, "capture", lambda self, run: (capture(self, run)[0], short)
        )
    else:
        monkeypatch.setattr(type(run), "evaluation", evaluation)
    found = [*run]
    assert [(step.loss, step.metrics) for step in found] == [
        (step.loss, step.metrics) for step in plain
    ]
    assert failed == [True]
    happened = "in an evaluation" if where == "evaluation" else f"at step {WARM_UPS + 1}"
    assert said(caplog) == [
        f"out of memory {happened}; from now on, steps run without CUDA graphs."
    ]


def test_dropout_inside_attention_is_not_captured(stand_in, caplog, tmp_path, monkeypatch):
    """Its seeds are drawn on the host, to be drawn again in the backward pass."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="dropout inside attention"):
        random_state(torch.device("cuda"))
    monkeypatch.undo()
    monkeypatch.setattr(cuda_graphs, "Graphs", graphs.Graphs)
    monkeypatch.chdir(tmp_path)
    kinds.build(tmp_path)
    family, found = models.find("./bert", "classification"), []
    for graphed in (False, True):
        job = replace(JOB, cuda_graphs=graphed).resolved(family.defaults, 100)
        torch.manual_seed(0)
        net = family.bare(10, 16)
        for name, module in net.named_modules():
            if isinstance(module, nn.Dropout) and "attention.self" not in name:
                module.p = 0.0
        sparsify(net, RAZOR)
        it = Learner(net, family.losses(job), torch.device("cpu"))
        ids = torch.arange(8 * 16).view(8, 16) % 40
        batch = {"input_ids": ids, "attention_mask": (ids < 30).long()}, torch.arange(8)
        found.append(torch.tensor([it.step([batch]) for _ in range(STEPS)]))
    assert_same(*found)
    (line,) = said(caplog)
    assert "training continues without CUDA graphs: " in line


def test_a_lack_of_memory_gives_up_graphs_first(stand_in):
    """Later reliefs, such as joint budgets, capture none."""
    job = replace(JOB, cuda_graphs=True, batch_size=4)
    some = list(reliefs(job, RAZOR))
    assert some[0] == Relief()
    assert some[0].describe(job) == "without CUDA graphs"
    assert not any(relief.captured for relief in some)
    assert Recovery(job, RAZOR).relief.captured
    it = learner(job, RAZOR)
    it.relieve(some[0])
    for step in range(STEPS):
        it.step(batches(job, step))
    assert not stand_in
