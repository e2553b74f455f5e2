"""Several processes train as one would: each test starts two, as torchrun does, through Gloo."""

import json
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.run as torchrun
from safetensors.torch import load_file
from typer.testing import CliRunner

from razorctl import data
from razorctl.cli.app import app
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import DataError, ElsewhereError, RazorError, UsageError
from razorctl.system import processes
from razorctl.training import preparation
from razorctl.training.run import finetune
from tests.cli import kinds
from tests.detectors import detector
from tests.forked import Forked, answered, razorctl_command, small_command
from tests.models import registered
from tests.own import coco

WORLD = 2
JOB = Job("vit-micro", "digits", batch_size=16, steps=3, evaluate_every=3, warmup_steps=0)


def start(
    call: Callable[..., object], *args: str, folder: Path, ranks: Iterable[int] = range(WORLD)
) -> list[Forked]:
    """A process for each rank, which calls `call` with `args`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    world |= {"LOCAL_WORLD_SIZE": str(WORLD), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return [
        Forked(
            *(call, *args),
            folder=folder,
            name=f"rank {rank}",
            environment=world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in ranks
    ]


def wait_for_others(*args: str) -> None:
    processes.WAITS = 0.0
    razorctl_command(*args)


@pytest.mark.parametrize(
    ("rank", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130)]
)
def test_a_process_that_waits_for_others_says_so_and_ends_at_a_signal(rank, number, code, tmp_path):
    waiting = start(wait_for_others, *RUN, folder=tmp_path, ranks=[rank])[0]
    who = ["process 0 of 2 waits for process 1.", "process 1 of 2 waits for a process that answers"]
    waiting.signaled(number, after=who[rank])
    assert waiting.ended(timeout=5)[0] == code


def test_a_process_waits_for_others_for_a_stated_time(monkeypatch):
    monkeypatch.setattr(processes, "GIVES_UP", 0.12)
    monkeypatch.setenv("WORLD_SIZE", "9")
    names = [f"process {number}" for number in range(7)]
    said = "process 1, process 2, process 3 and 3 more did not come within 0.002 minutes"
    with pytest.raises(RazorError, match=said):
        processes._wait(lambda: names)
    missing = iter((names, ()))
    processes._wait(lambda: next(missing))  # they come in time


@pytest.mark.parametrize("port", [None, "x"])
def test_processes_without_a_place_to_meet_are_refused(port, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match="WORLD_SIZE is 2 without MASTER_ADDR and MASTER_PORT"):
        processes.join(cpu=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "no.invalid", "a..b"])
def test_the_first_process_needs_no_address_of_itself(host, monkeypatch):
    """torch would ask itself at that address, for minutes in which no signal is handled."""
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    seen: list[bool] = []

    def wait(missing: Callable[[], list[str]]) -> None:
        assert missing() == ["process 1"]
        seen.append(processes._answers(host.strip("[]"), port))

    monkeypatch.setattr(processes, "_wait", wait)
    store = processes._met()
    assert seen == ["." not in host or host == "127.0.0.1"]
    del store


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


def test_a_signal_ends_the_search_for_an_address(monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "create_connection", lambda *_: time.sleep(5))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            processes._answers("slow", 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 2


def ended(started: list[Forked]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    return [process.ended() for process in started]


CASES = {
    "full ddp": (
        Recipe("full"),
        {"strategy": "ddp", "accumulate": 2, "class_weights": "1,9,1,1,1,1,1,1,1,4"},
    ),
    "razor fsdp": (Recipe("razor", 0.5), {"strategy": "fsdp"}),
    "lora fsdp": (Recipe("lora"), {"strategy": "fsdp"}),
    "joint ddp": (Recipe("prebackrazor++", joint_budget=0.5), {"accumulate": 2, "ema": 0.9}),
}
CHATS = {"model": "llama", "dataset": "chats.jsonl", "batch_size": 8, "learning_rate": 0.01}
CHATS |= {"packing": True, "input_size": 64}
PAIRS = {"model": "llama", "dataset": "pairs.jsonl", "task": "embedding", "symmetric": True}
PAIRS |= {"batch_size": 8, "learning_rate": 0.01, "input_size": 16}
IMAGES = {"dataset": "images", "task": "embedding", "batch_size": 8, "learning_rate": 0.01}
OBJECTS = {"model": "deformable_detr", "dataset": "scenes", "batch_size": 8, "augment": "none"}
# An answer's token and an object weigh the same, and negatives are of all processes.
TEXTS = {
    "packed ddp": (Recipe("full"), {**CHATS, "strategy": "ddp", "accumulate": 2}),
    "embedding ddp": (Recipe("full"), {**PAIRS, "strategy": "ddp"}),
    "clip fsdp": (Recipe("full"), {**IMAGES, "model": "clip", "strategy": "fsdp"}),
    "siglip ddp": (Recipe("full"), {**IMAGES, "model": "siglip", "strategy": "ddp"}),
    "objects ddp": (Recipe("full"), {**OBJECTS, "strategy": "ddp"}),
}
CASES |= TEXTS
# One for each thing that a checkpoint has: shards, adapters, an average, packed rows, two towers.
RESUMED = {"razor fsdp", "lora fsdp", "joint ddp", "packed ddp", "clip fsdp"}
RUN = ("finetune", "vit-micro", "digits", "--device", "cpu", "--json")


def fail(ranks: list[int]) -> str:
    if processes.rank() in ranks:
        raise DataError(f"of {processes.rank()}")
    return "made"


def together(ranks: list[int]) -> None:
    with processes.together():
        fail(ranks)


def write_texts(folder: Path) -> None:
    """Models of texts, images and objects, and data of each: an answer has from 1 to 30 words."""
    kinds.decoders(folder)
    kinds.towers(folder)
    detector("deformable_detr", folder / "deformable_detr", dropout=0.0)
    coco(str(folder / "scenes"), count=24)
    rows = kinds.captioned(folder / "images")
    (folder / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    draw = random.Random(0)
    said = [" ".join(draw.choices(kinds.WORDS, k=draw.choice((1, 2, 30)))) for _ in range(40)]
    rows = [
        {"prompt": f"w1 w2 w{row % 9}", "completion": answer} for row, answer in enumerate(said)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"anchor": f"w1 w{row}", "positive": f"w2 w{row}"} for row in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def exchange() -> None:
    """Values that processes exchange."""
    first, cpu = processes.first(), torch.device("cpu")
    processes.join(cpu=True)
    for call, wanted in (
        (lambda: processes.of_first(lambda: fail([0])), DataError if first else ElsewhereError),
        (lambda: together([0, 1]), DataError if first else ElsewhereError),
        (lambda: together([1]), ElsewhereError),
    ):
        with pytest.raises(RazorError) as caught:
            call()
        assert type(caught.value) is wanted
        assert caught.value.exit_code == DataError.exit_code
        assert wanted is ElsewhereError or str(caught.value) == "of 0"
    together([])
    assert processes.of_first(lambda: fail([1])) == "made"
    assert processes.every(processes.rank()) == [0, 1]
    assert processes.most(7 + processes.rank(), cpu) == 8
    assert processes.mean(torch.tensor(1.0 + processes.rank())) == 1.5


def train(name: str) -> None:
    """A case in the folder of its name, run, and if in RESUMED resumed from its first step."""
    recipe, settings = CASES[name]
    job = replace(JOB, processes=WORLD, **settings)
    resumes = name in RESUMED
    run = finetune(job, recipe, out=name, device="cpu")
    next(run), run.save()
    if processes.first() and resumes:
        shutil.copytree(name, f"{name}, stopped")
    next(run), next(run)
    weights = {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in run.model.state_dict().items()
    }
    weights["steps of an epoch"] = torch.tensor(run.steps_per_epoch)
    torch.save(weights, f"{name}.{processes.rank()}.pt")
    for _ in run:
        pass
    if resumes:
        with pytest.MonkeyPatch.context() as patch:  # it is traced as before
            patch.setattr(preparation, "full_step", lambda *_, **__: run._full)
            parts = {"": run.saved_bytes}
            patch.setattr(preparation, "traced_bytes_by_module", lambda *_, **__: parts)
            resumed = finetune(job, recipe, out=f"{name}, stopped", device="cpu", resume=True)
        assert len(resumed.history) == 1
        for _ in resumed:
            pass


def fail_to_prepare(ranks: list[int]) -> None:
    """One process fails before it traces, while others are at it."""
    with pytest.MonkeyPatch.context() as patch:
        if processes.rank() in ranks:
            patch.setattr(preparation, "sequenced", lambda *_: fail(ranks))
        finetune(replace(JOB, processes=WORLD), Recipe("full"), out="lost", device="cpu")


def train_all(*command: str) -> None:
    exchange()
    with registered(shallow=True):
        with pytest.raises(RazorError, match="of 1"):
            fail_to_prepare([1])
        for name in CASES:
            train(name)
        print("the command", file=sys.stderr, flush=True)  # after what libraries have warned of
        razorctl_command(*command)


def alone(recipe: Recipe, out: Path, **settings) -> dict[str, torch.Tensor]:
    job = Job(**{**vars(JOB), **settings})
    run = finetune(job, recipe, out=out, device="cpu")
    for _ in run:
        pass
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A folder where two processes have trained, and the results of their commands."""
    folder = tmp_path_factory.mktemp("processes")
    write_texts(folder)
    command = (*RUN, "--out", "run", "--strategy", "fsdp", "--ratio", "0.5")
    command += ("--steps", "2", "--batch-size", "128")
    return folder, ended(start(train_all, *command, folder=folder))


def test_two_processes_train_as_one(both, shallow, monkeypatch):
    tmp_path, ranks = both
    for code, _, errors in ranks:
        assert code == 0, errors
    for name in CASES:
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(WORLD))
        assert first
        assert all(torch.equal(first[key], second[key]) for key in first), name
        if name not in RESUMED:
            continue
        resumed = load_file(tmp_path / f"{name}, stopped/model.safetensors")
        once = load_file(tmp_path / name / "model.safetensors")
        assert resumed.keys() == once.keys()
        assert all(torch.equal(resumed[key], once[key]) for key in once), name
    # What razor packs depends on the rows that it packs together.
    for name, micro_batches in (("full ddp", 1), ("lora fsdp", 1), ("razor fsdp", 2)):
        recipe, settings = CASES[name]
        weights = settings.get("class_weights")
        folder = tmp_path / "one" / name
        one = alone(recipe, folder, accumulate=micro_batches, class_weights=weights)
        two = load_file(tmp_path / name / "model.safetensors")
        assert one.keys() == two.keys()
        for key, weight in one.items():
            torch.testing.assert_close(two[key], weight, rtol=1e-3, atol=3e-4, msg=key)
        folders = tmp_path / "one" / name, tmp_path / name
        results = [json.loads((folder / "result.json").read_text()) for folder in folders]
        assert results[0]["accuracy"] == pytest.approx(results[1]["accuracy"], abs=1 / 72)
        labels = [result["by_class"]["labels"] for result in results]
        assert labels[0] == labels[1]
        assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)
    monkeypatch.chdir(tmp_path)
    for name, (recipe, settings) in TEXTS.items():
        alone(recipe, Path("one", name), **{**settings, "accumulate": 1})
        one, two = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (Path("one", name), Path(name))
        )
        assert len(one) == len(two) == JOB.steps
        for some, others in zip(one, two, strict=True):
            for figure in ("loss", "grad_norm", "epoch"):
                assert some[figure] == pytest.approx(others[figure], rel=1e-4), (name, figure)
        assert one[-1]["metrics"] == pytest.approx(two[-1]["metrics"], rel=1e-3)
    assert (tmp_path / "lora fsdp/adapter/adapter_model.safetensors").exists()


def test_the_first_process_speaks_for_all(both):
    _, ((code, out, errors), other) = both
    assert code == 0, errors
    assert json.loads(out)["job"]["processes"] == WORLD
    assert "2 processes (fsdp)" in errors
    assert (*other[:2], other[2].partition("the command\n")[2]) == (0, "", "")


def test_an_error_is_said_once(tmp_path):
    (first, _, errors), other = ended(
        start(razorctl_command, *RUN, "--batch-size", "33", folder=tmp_path)
    )
    assert first == 2
    assert errors.count("cannot be split over 2 processes") == 1
    assert other == (2, "", "")


def test_what_several_processes_cannot_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    job = Job("vit-micro", "digits", processes=WORLD, compile=True)
    with pytest.raises(UsageError, match="steps of several processes are not compiled"):
        finetune(job, device="cpu")
    with pytest.raises(UsageError, match=r"for 4 processes, and 2 .*torchrun --nproc-per-node"):
        finetune(replace(JOB, processes=4), device="cpu")
    with pytest.raises(UsageError, match="adamw8bit cannot be sharded"):
        replace(JOB, processes=WORLD, strategy="fsdp", optimizer="adamw8bit")
    result = CliRunner().invoke(app, ["plan", "vit-micro", "digits", "--vram", "11GB"])
    assert result.exit_code == 2
    assert "only finetune runs in several processes" in result.stderr


def test_processes_on_two_machines_train_as_one_and_only_the_first_has_files(tmp_path):
    """Both torchruns see the images at one path, and have no other folder in common."""
    rows = data.find("digits").load().train.select(range(120))
    for number, row in enumerate(rows):
        split = ("train", "train", "train", "validation", "test")[number % 5]
        file = tmp_path / "photos" / split / str(row["label"]) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        row["image"].save(file)
    words = ("finetune", "vit-micro", str(tmp_path / "photos"), "--device", "cpu")
    words += ("--method", "full", "--batch-size", "16", "--steps", "3", "--evaluate-every", "1")
    words += ("--lr", "2", "--warmup-steps", "0", "--out")  # so that the first step is best
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ("--master-addr", "127.0.0.1", "--master-port", port)
    started = []
    for rank in "01":
        (tmp_path / rank).mkdir()
        command = ("--nnodes", "2", "--nproc-per-node", "1", *place, "--node-rank", rank)
        command += ("--no-python", *answered(small_command, tmp_path / rank), *words, "run")
        started.append(Forked(torchrun.main, command, folder=tmp_path / rank, name="log"))
    (tmp_path / "one").mkdir()
    started.append(Forked(small_command, *words, "run", folder=tmp_path / "one"))
    for process in started:
        code, _, errors = process.ended()
        assert code == 0, errors
    left = {path.name for path in (tmp_path / "1").iterdir()}
    assert left == {f"{name}.{kind}" for name in ("log", "answer") for kind in ("out", "err")}
    one, two = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "one/run", tmp_path / "0/run")
    )
    assert [step["loss"] for step in two] == pytest.approx([s["loss"] for s in one], rel=1e-4)
    one, two = (
        json.loads((folder / "result.json").read_text())
        for folder in (tmp_path / "one/run", tmp_path / "0/run")
    )
    assert one["best_step"] == two["best_step"] == 1
    assert two["best_accuracy"] == pytest.approx(one["best_accuracy"])
