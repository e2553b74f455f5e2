"""The hub and its cache: whole runs without network, through a local server, and refusals."""

import json
import time
from dataclasses import replace
from functools import partial

import pytest
from datasets import ClassLabel, Dataset
from huggingface_hub import constants
from typer.testing import CliRunner

from razorctl import data, models
from razorctl.cli.app import app
from razorctl.config.job import Job
from razorctl.data.own import read
from razorctl.data.own.request import DataRequest
from razorctl.errors import DataError, MissingError, UsageError
from razorctl.planning import job_trace
from razorctl.system import hub as razor_hub
from tests import hub_server, local_hub, own

QUICK = ["--steps", "2", "--batch-size", "4", "--device", "cpu", "--ratio", "0.5", "--json"]
RUNS = {"vit-b16": ("cifar100", 32), "bert-base": ("rte", 24)}


@pytest.mark.parametrize("model", RUNS)
def test_a_whole_run_from_the_cache(model, hub, tmp_path, monkeypatch):
    dataset, size = RUNS[model]
    monkeypatch.setitem(models.models(), model, local_hub.ENTRIES[model])
    local_hub.cache_model(hub, model)
    local_hub.cache_data(hub, data.find(dataset))
    args = ["finetune", model, dataset, *QUICK, "--input-size", str(size)]
    result = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith(f"{model} on {dataset}: ")
    lines = result.stderr.splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert " classes have fewer than 10 training rows: " in notes[-1]
    assert all("longer than the input size and cut" in note for note in notes[:-1])
    assert len(notes) == (2 if model == "bert-base" else 1)
    lines = [line for line in lines if line not in notes]
    steps = lines[4:]  # after model, device, settings and kept bytes
    assert steps
    assert all(line.startswith("step ") for line in steps)
    document = json.loads(result.stdout)
    assert document["job"]["input_size"] == size
    assert document["saved_bytes"] < document["full_saved_bytes"]


def test_a_run_says_what_is_missing(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local_hub.cache_data(hub, data.find("cifar100"))
    missing = CliRunner().invoke(app, ["finetune", "vit-b16", "cifar100", *QUICK])
    assert (missing.exit_code, missing.stdout) == (6, "")
    assert missing.stderr.splitlines()[-1] == (
        "error: vit-b16 is not in the local cache and the hub cannot be reached; run once with "
        "a network, or point HF_HOME at a cache that has it."
    )


@pytest.mark.parametrize("load", [data.find("rte").load, partial(models.find("vit-b16").build, 2)])
def test_a_refused_connection_is_told_at_once(load, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(MissingError, match="the hub cannot be reached; run once with a network"):
        load()
    assert time.monotonic() - start < 5


def test_an_unreachable_hub_leaves_what_is_cached(hub, monkeypatch):
    local_hub.cache_data(hub, data.find("rte"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert len(data.find("rte").load().train) == 8


def test_what_the_hub_does_not_have_is_missing(server, hub):
    with pytest.raises(MissingError, match="the hub answers 404 for nyu-mll/glue; try again later"):
        data.find("rte").load()
    folder = local_hub.cache_data(server, data.find("rte"))
    next(folder.glob("snapshots/*/rte/train-*")).unlink()
    with pytest.raises(MissingError, match=r"nyu-mll/glue on the hub lacks some of rte/train"):
        data.find("rte").load()


def test_what_needs_a_login_is_told(server, hub, faults):
    local_hub.cache_data(server, data.find("rte"))
    faults.gated = True
    with pytest.raises(MissingError, match=r"the hub answers 401 for .* auth login"):
        data.find("rte").load()


def test_a_download_that_never_ends_is_missing(server, hub, faults, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between tries
    local_hub.cache_data(server, data.find("rte"))
    faults.cuts = 100
    with pytest.raises(MissingError, match="rte is not in the local cache and"):
        data.find("rte").load()
    faults.cuts = 0
    assert len(data.find("rte").load().train) == 8  # and nothing broken is left


def test_whether_the_hub_answers(server, monkeypatch):
    assert razor_hub.unreachable() is None
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached (ConnectError)" in razor_hub.unreachable()


def write_films(snapshot):
    for config in ("plain", "raw"):
        for split in ("train", "test", "unsupervised"):
            rows = {"text": [f"{config} {split} film {i}" for i in range(20)]}
            kinds = ClassLabel(names=["bad", "good"])
            rows = Dataset.from_dict({**rows, "label": [i % 2 for i in range(20)]})
            (snapshot / config).mkdir(exist_ok=True)
            rows.cast_column("label", kinds).to_parquet(
                snapshot / config / f"{split}-00000-of-00001.parquet"
            )
    lines = ["---", "configs:"]
    for config in ("plain", "raw"):
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test", "unsupervised"):
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (snapshot / "README.md").write_text("\n".join([*lines, "---", ""]))


def test_of_any_data_set_only_the_files_that_are_used_are_fetched(server, hub, monkeypatch):
    local_hub.cache(server, "dataset", "films/reviews", write_films)
    job = Job("bert-base", "hf:films/reviews:raw")
    source = data.source_of(job)
    assert (source.modality, source.classes, source.train_examples) == ("text", 2, 18)
    (snapshot,) = hub.glob("datasets--films--reviews/snapshots/*")
    assert sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.*")) == [
        "README.md",
        "raw/test-00000-of-00001.parquet",
        "raw/train-00000-of-00001.parquet",
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    splits = data.source_of(job).load()
    assert splits.classes == ("bad", "good")
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [18, 2, 20]
    assert splits.test[3] == {"text": "raw test film 3", "label": 1}
    with pytest.raises(UsageError, match="several configs, plain, raw; name one, as in hf:films"):
        data.source_of(Job("bert-base", "hf:films/reviews"))
    with pytest.raises(UsageError, match="hf:films/reviews 'row'; known: plain, raw"):
        data.source_of(Job("bert-base", "hf:films/reviews:row"))
    with pytest.raises(MissingError, match="is not in the local cache and the hub cannot be reach"):
        data.source_of(Job("bert-base", "hf:films/reviews:plain"))


def test_a_data_set_is_read_by_the_columns_of_a_run(server, hub):
    def write(snapshot):
        rows = {"one": ["a cat sat"] * 20, "two": ["a dog sat"] * 20, "kind": ["x", "y"] * 10}
        Dataset.from_dict(rows).to_parquet(snapshot / "train.parquet")

    local_hub.cache(server, "dataset", "films/columns", write)
    job = Job("bert-base", "hf:films/columns")
    raw = read.raw(DataRequest.of(job, replace(job, text_column="two", label_column="kind")))
    assert raw.splits["train"][0] == {"text": "a dog sat", "label": "x"}


def write_described(snapshot, text="text", rows=20):
    kinds = ClassLabel(names=["bad", "good"])
    for split in ("train", "test"):
        found = Dataset.from_dict({text: ["a film"] * 20, "label": [0, 1] * 10})
        found.cast_column("label", kinds).to_parquet(snapshot / f"{split}.parquet")
    (snapshot / "README.md").write_text(hub_server.CARD.format(text=text, rows=rows, tested=20))


def test_what_a_card_says_is_planned_for_without_the_data(server, hub, monkeypatch):
    local_hub.cache(server, "dataset", "films/described", write_described)
    job = Job("bert-base", "hf:films/described")
    source = data.source_of(job)
    (snapshot,) = hub.glob("datasets--films--described/snapshots/*")
    assert [path.name for path in snapshot.iterdir()] == ["README.md"]
    assert (source.modality, source.classes) == ("text", 2)
    assert (source.train_examples, source.test_examples) == (18, 20)
    assert source.details == (
        "hf:films/described: text in text, label in label, as its card says",
        "2 classes: bad, good",
        "18 rows to train on, 2 held out for validation, 20 for test",
    )
    splits = source.load()  # which has what was said
    assert splits.classes == ("bad", "good")
    assert [len(split) for split in (splits.train, splits.validation, splits.test)] == [18, 2, 20]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert data.source_of(job).details == source.details


def test_a_plan_fetches_no_data(server, hub, monkeypatch):
    monkeypatch.setitem(models.models(), "bert-base", local_hub.ENTRIES["bert-base"])
    local_hub.cache(server, "dataset", "films/described", partial(write_described, rows=25_000))
    words = ["plan", "bert-base", "hf:films/described", "--gpu", "t4", "--batch-size", "8"]
    result = CliRunner().invoke(app, [*words, "--method", "full", "--json"])
    assert result.exit_code == 0, result.stderr
    assert "22,500 rows to train on, 2,500 held out" in result.stderr
    assert json.loads(result.stdout)["steps_per_epoch"] == 22_500 // 8
    assert not list(hub.rglob("*.parquet"))


def test_a_plan_compares_weights_that_it_does_not_fetch(server, hub, tmp_path, caplog):
    def shorter(snapshot):
        local_hub.bert(snapshot)
        settings = json.loads((snapshot / "config.json").read_text())
        (snapshot / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 1}))

    own.texts(tmp_path / "a.csv", 40)
    words = [str(tmp_path / "a.csv"), "--gpu", "t4", "--method", "full", "--batch-size"]
    for name, write in (("good", local_hub.bert), ("bad", shorter)):
        local_hub.cache(server, "model", f"me/{name}", write)
    result = CliRunner().invoke(app, ["plan", "hf:me/bad", *words, "8"])
    assert (result.exit_code, "[2] layers in its weights, and [1]" in result.stderr) == (5, True)
    assert CliRunner().invoke(app, ["plan", "hf:me/good", *words, "8"]).exit_code == 0
    assert not [*hub.glob("models--me--*/snapshots/*/*.safetensors")]
    for file in server.glob("models--me--good/snapshots/*/*.safetensors"):
        file.unlink()
    job_trace._blueprint.cache_clear()
    job_trace.blueprint(Job("hf:me/good", "any", task="classification"), 2)
    assert "the weights of hf:me/good are not compared with its config" in caplog.text


@pytest.mark.parametrize("settings", [{}, {"text_column": "body"}])
def test_a_card_that_leaves_it_open_is_no_use(settings, server, hub):
    """Only the values of a column that is called otherwise say that it is text."""
    write = partial(write_described, text="body", rows=7)
    local_hub.cache(server, "dataset", "films/odd", write)
    source = data.source_of(Job("bert-base", "hf:films/odd", **settings))
    fetched = bool(list(hub.rglob("train.parquet")))
    assert (fetched, source.train_examples) == ((True, 18) if not settings else (False, 6))


def test_the_code_of_a_data_set_is_never_run(hub, tmp_path):
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    local_hub.cache(hub, "dataset", "films/code", lambda s: (s / "code.py").write_text(code))
    with pytest.raises(DataError, match="needs code of its own, which razorctl never runs"):
        data.source_of(Job("bert-base", "hf:films/code"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("train.pkl", "no files that can be read, only train.pkl"),
        ("train.txt", "files of the kind text, which razorctl does not read"),
        ("train.tar", "files of the kind webdataset, which razorctl does not read"),
    ],
)
def test_files_that_are_no_tables_are_not_read(file, message, hub):
    local_hub.cache(hub, "dataset", "films/odd", lambda s: (s / file).write_bytes(b"cos\n"))
    with pytest.raises(DataError, match=message):
        data.source_of(Job("bert-base", "hf:films/odd"))


PATHS = {"elsewhere": "/etc/passwd", "remote": "https://example.com/a.png"}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_repository_cannot_name_other_files(path, hub):
    def write(snapshot):
        image = {"bytes": None, "path": path}
        rows = Dataset.from_dict({"image": [image] * 4, "label": [0, 1] * 2})
        rows.to_parquet(snapshot / "train.parquet")

    local_hub.cache(hub, "dataset", "films/paths", write)
    with pytest.raises(DataError, match=r"4 bad rows: train, row 0, .* .(outside the|an address)"):
        data.source_of(Job("vit-micro", "hf:films/paths", skip_bad=True)).load()


def test_splits_without_labels_are_not_used(hub):
    def write(snapshot):
        for split, labels in {"train": [0, 1] * 5, "validation": [1, 0], "test": [-1, -1]}.items():
            rows = Dataset.from_dict({"sentence": ["a b"] * len(labels), "label": labels})
            kinds = ClassLabel(names=["no", "yes"])
            rows.cast_column("label", kinds).to_parquet(snapshot / f"{split}.parquet")

    local_hub.cache(hub, "dataset", "films/contest", write)
    source = data.source_of(Job("bert-base", "hf:films/contest"))
    assert source.details[0].endswith("label in label, without test, which has no labels")
    assert source.load().test is None
    with pytest.raises(DataError, match=r"2 bad rows: test, row 0, test, row 1 .no label: -1"):
        data.source_of(Job("bert-base", "hf:films/contest", split="train,validation,test"))
