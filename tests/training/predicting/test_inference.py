"""Finished runs as classifiers, which give the run's figures from its directory alone."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from datasets import Dataset
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.data.own import whole
from razorctl.errors import DataError, MissingError, OutOfMemoryError, UsageError
from razorctl.system.documents import size_and_checksum
from razorctl.training.evaluation_rows import rows_of_job, rows_of_run
from razorctl.training.predicting import inference, labels
from razorctl.training.run import Run, finetune
from tests import local_hub
from tests.cli.commands import razorctl
from tests.models import altered, registered
from tests.own import CLASSES, floats, photos, picture, table
from tests.training.runs import edit_result

QUICK = {"batch_size": 8, "steps": 6, "evaluate_every": 1, "validation": 0.5}
WORDS = ("a cat", "dog sat", "cat sat a dog", "dog dog")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """A run on images by its test split, one of adapters on images held out, and one on texts."""
    top = tmp_path_factory.mktemp("runs")
    photos(top / "own/photos", 8)
    rows = [f"{WORDS[i % 4]} {WORDS[i % 3]},{('pos', 'neg')[i % 2]}" for i in range(24)]
    texts = table(top / "own/texts.csv", rows)
    jobs = {
        "digits": (Job("vit-micro", "digits", batch_size=8, steps=2), Recipe("full")),
        "photos": (Job("vit-micro", str(top / "own/photos"), **QUICK), Recipe("lora")),
        "texts": (Job("bert-base", str(texts), input_size=12, **QUICK), Recipe(ratio=0.5)),
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        registered(*local_hub.ENTRIES.values(), shallow=True),
    ):
        patch.setattr(constants, "HF_HUB_CACHE", str(top / "hub"))
        local_hub.cache_model(top / "hub", "bert-base")
        found = {}
        for name, (job, recipe) in jobs.items():
            found[name] = finetune(job, recipe, out=top / name, device="cpu")
            list(found[name])
        shutil.rmtree(top / "hub")
        yield found


def test_the_best_weights_are_taken_if_they_are_not_the_last(tmp_path, monkeypatch, shallow):
    real = Run.evaluation
    seen = []

    def evaluation(run, rows=None):
        found = real(run, rows)
        seen.append(found.figures["loss"])
        figures = {**found.figures, "accuracy": 0.9 if len(seen) == 2 else 0.1}
        return replace(found, figures=figures)

    monkeypatch.setattr(Run, "evaluation", evaluation)
    job = Job("vit-micro", str(photos(tmp_path / "d", 8)), **QUICK)
    list(finetune(job, Recipe("full"), out=tmp_path / "run", device="cpu"))
    result = json.loads((tmp_path / "run/result.json").read_text())
    rows = rows_of_run(tmp_path / "run").rows
    for weights, file, loss in (
        ("best", "model.safetensors", result["best_metrics"]["loss"]),
        ("last", "last/model.safetensors", result["metrics"]["loss"]),
    ):
        found = inference.load(tmp_path / "run", weights=weights, device="cpu")
        assert found.weights == tmp_path / "run" / file
        evaluated = found.evaluate(rows)
        assert evaluated.figures["loss"] == pytest.approx(loss, abs=1e-6)
        if weights == "best":
            assert evaluated.by_class_document == result["by_class"]
    assert result["best_metrics"]["loss"] == seen[1]
    assert result["metrics"]["loss"] == seen[-1]
    shutil.rmtree(tmp_path / "run/last")
    with pytest.raises(MissingError, match=r"last/model.safetensors is missing; copy the"):
        inference.load(tmp_path / "run", weights="last")


def test_the_best_weights_are_tested_at_the_end_too(tmp_path, monkeypatch, shallow):
    """With validation and test splits; the last weights of training do not change."""
    real, tested = Run.evaluation, []

    def evaluation(run, rows=None):
        found = real(run, rows)
        if rows is not None:
            tested.append(found.figures)
            return found
        return replace(found, figures={**found.figures, "accuracy": 1 / (1 + len(run.history))})

    monkeypatch.setattr(Run, "evaluation", evaluation)
    photos(tmp_path / "d/train", 8)
    photos(tmp_path / "d/test", 3)
    job = Job("vit-micro", str(tmp_path / "d"), **QUICK)
    list(run := finetune(job, Recipe("full"), out=tmp_path / "run", device="cpu"))
    result = run.result()
    assert (result["metrics"], result["best_metrics"]) == tuple(tested)
    rows = rows_of_run(tmp_path / "run").rows
    for weights, figures in zip(("last", "best"), tested, strict=True):
        found = inference.load(tmp_path / "run", weights=weights, device="cpu")
        assert found.evaluate(rows).figures == pytest.approx(figures, abs=1e-6)


def test_labels_are_matched_by_name(runs, tmp_path):
    """A folder with fewer classes, so that the same name has another number."""
    out = runs["photos"].out
    some = photos(tmp_path / "d", 5, ["car", "tram"])
    job = replace(runs["photos"].job, dataset=str(some), validation=None)
    labeled = rows_of_job(out, job)
    assert (labeled.split, len(labeled.rows)) == (None, 10)
    assert labeled.rows["label"][:] == [1] * 5 + [2] * 5
    classifier = inference.load(out, weights="last", device="cpu")
    parts, _ = whole.unlabeled([str(some)], job, "image")
    guesses = [row.ranked(1)[0][0] for row in labels.predict_labels(classifier, parts)]
    right = sum(map(str.__eq__, guesses, ["car"] * 5 + ["tram"] * 5))
    assert classifier.evaluate(labeled.rows).figures["accuracy"] == pytest.approx(right / 10)


def test_of_data_with_splits_the_test_split_is_taken(runs, tmp_path):
    for split, count in (("train", 4), ("val", 3), ("test", 2)):
        photos(tmp_path / "d" / split, count)
    job = replace(runs["photos"].job, dataset=str(tmp_path / "d"), validation=None)
    counts = {None: 6, "val": 9, "train": 12}
    for split, count in counts.items():
        labeled = rows_of_job(runs["photos"].out, job, split)
        assert (labeled.split, len(labeled.rows)) == (split or "test", count)


def test_a_set_of_the_hub_with_one_split_is_taken_whole(runs, hub):
    local_hub.cache(hub, "dataset", "films/stills", lambda s: photos(s / "train", 3, CLASSES[1:]))
    job = replace(runs["photos"].job, dataset="hf:films/stills", validation=None)
    labeled = rows_of_job(runs["photos"].out, job)
    assert (labeled.split, labeled.rows["label"][:]) == (None, [1] * 3 + [2] * 3)
    with pytest.raises(UsageError, match="bert-base takes texts, and hf:films/stills has images"):
        rows_of_job(runs["texts"].out, replace(job, model="bert-base"))


def test_a_registered_set_is_evaluated_by_names(runs, monkeypatch):
    out = runs["digits"].out
    plain = rows_of_run(out)
    result = json.loads((out / "result.json").read_text())
    turned = {**result, "classes": result["classes"][::-1]}
    monkeypatch.setattr(
        "razorctl.training.run_files.finished_run", lambda _: (turned, runs["digits"].job)
    )
    labeled = rows_of_job(out, runs["digits"].job)
    assert labeled.rows["label"][:] == [9 - label for label in plain.rows["label"]]
    with pytest.raises(UsageError, match="digits has no split dev, only train, test"):
        rows_of_job(out, runs["digits"].job, "dev")


def exchange(one: Path, other: Path) -> None:
    """Renames two files into each other, which keeps their sizes and times."""
    there = one.with_suffix(".swapped")
    one.rename(there)
    other.rename(one)
    there.rename(other)


def edit(file: Path) -> None:
    """Changes a byte that no decoder reads; the size and the time stay."""
    status, content = file.stat(), bytearray(file.read_bytes())
    at = content.index(b"JFIF")
    content[at + 9] ^= 1  # a unit of the density
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def written(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


# What changes the data of a run -> the run, the change, and whether rows are others by it.
CHANGES = {
    "a renamed image": ("photos", lambda d: (d / "car/0.jpg").rename(d / "car/9.jpg"), True),
    "exchanged images": ("photos", lambda d: exchange(d / "car/1.jpg", d / "car/2.jpg"), True),
    "an edited image": ("photos", lambda d: edit(d / "car/1.jpg"), True),
    "an added image": ("photos", lambda d: picture(d / "car/8.jpg", 3), True),
    "a name that keeps its place": (
        "photos",
        lambda d: (d / "car/0.jpg").rename(d / "car/00.jpg"),
        False,
    ),
    "a time": ("photos", lambda d: os.utime(d / "car/0.jpg", (1, 1)), False),
    "an edited text": ("texts", lambda file: written(file, "a cat", "a dog"), True),
    "exchanged labels": ("texts", lambda file: written(file, "pos\n", "neg\n"), True),
    "a column beside the texts": (
        "texts",
        lambda file: file.write_text(
            re.sub(r"(?m),(label|pos|neg)$", r",note,\1", file.read_text())
        ),
        False,
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_rows_that_are_others_now_are_refused(case, runs, tmp_path):
    name, change, refused = CHANGES[case]
    out = shutil.copytree(runs[name].out, tmp_path / "run")
    before = Path(runs[name].job.dataset)
    copy = shutil.copytree if before.is_dir() else shutil.copy
    there = copy(before, tmp_path / before.name)
    edit_result(out, lambda result: result["job"].update(dataset=str(there)))
    file = out / "split.json"
    file.write_text(file.read_text().replace(str(before), str(there)))
    assert len(rows_of_run(out).rows)
    change(there)
    if refused:
        with pytest.raises(DataError, match=r"has changed since .* was trained on it"):
            rows_of_run(out)
    else:
        assert len(rows_of_run(out).rows)


def test_white_is_that_of_the_images_of_training(tmp_path, monkeypatch):
    for number in range(8):
        floats(tmp_path / "d" / "ab"[number % 2] / f"{number}.tif", [0, 20 * number, 9])
        floats(tmp_path / "dark" / "ab"[number % 2] / f"{number}.tif", [0, 0.1 * number])
    job = Job("vit-micro", str(tmp_path / "d"), batch_size=4, steps=1)
    list(finetune(job, out=tmp_path / "run", device="cpu"))
    assert json.loads((tmp_path / "run/split.json").read_text())["white"] == 255
    labeled = rows_of_job(tmp_path / "run", replace(job, dataset=str(tmp_path / "dark")))
    assert labeled.rows["white"][:] == [255] * 8
    used, real = [], whole.unlabeled
    monkeypatch.setattr(whole, "unlabeled", lambda *args: used.append(args[5]) or real(*args))
    result = razorctl("predict", str(tmp_path / "run"), str(tmp_path / "dark"), "--device", "cpu")
    assert (result.exit_code, used) == (0, [255])


def test_a_precision_that_the_device_lacks_becomes_fp32(runs, tmp_path):
    out = shutil.copytree(runs["photos"].out, tmp_path / "run")
    edit_result(out, lambda result: result["job"].update(precision="fp16"))
    assert inference.load(out, device="cpu").job.precision == "fp32"


def test_a_batch_that_does_not_fit_is_said(runs):
    def full(*_):
        raise torch.OutOfMemoryError

    trained = inference.load(runs["photos"].out, device="cpu", batch_size=7)
    trained = replace(trained, family=altered(trained.family, logits=full))
    rows = rows_of_run(runs["photos"].out).rows
    for use in (lambda: trained.evaluate(rows), lambda: next(labels.logits_of(trained, rows))):
        with pytest.raises(OutOfMemoryError, match="a batch of 7 does not fit into the memory of"):
            use()


@torch.no_grad()
def test_stock_libraries_predict_the_same(runs, tmp_path):
    image = str(picture(tmp_path / "a.png", 40))
    model = timm.create_model(f"local-dir:{runs['photos'].out}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model))
    inputs = transform(Image.open(image).convert("L"))[None]
    names = model.pretrained_cfg["label_names"]
    stock = {"image": dict(zip(names, model(inputs).softmax(-1)[0].tolist(), strict=True))}
    folder = runs["texts"].out
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)("a cat sat", return_tensors="pt")
    values = model(**tokens).logits.softmax(-1)[0].tolist()
    stock["text"] = {model.config.id2label[i]: p for i, p in enumerate(values)}
    (tmp_path / "a.txt").write_text("a cat sat\n")
    for name, file, modality in (
        ("photos", image, "image"),
        ("texts", str(tmp_path / "a.txt"), "text"),
    ):
        classifier = inference.load(runs[name].out, device="cpu")
        parts, _ = whole.unlabeled([file], Job("vit-micro", ""), modality)
        (row,) = labels.predict_labels(classifier, parts)
        found = dict(zip(row.classes, row.probabilities, strict=True))
        assert found == pytest.approx(stock[modality], abs=1e-5)


def test_rows_of_every_kind_of_file_keep_their_order(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(Path("d"), 2)
    table(Path("a.csv"), ["d/car/1.jpg", "d/bus/0.jpg"], "image")
    Dataset.from_dict({"file": ["d/bus/1.jpg"]}).to_parquet("b.parquet")
    files = ["d/tram/0.jpg", "a.csv", "d", "-", "b.parquet"]
    job = replace(runs["photos"].job, dataset="")
    parts, skipped = whole.unlabeled(files, job, "image", ["d/car/0.jpg"])
    assert not skipped
    of_folder = [(f"d/{name}/{i}.jpg", None) for name in CLASSES for i in range(2)]
    places = [("d/tram/0.jpg", None), ("a.csv", 0), ("a.csv", 1), *of_folder]
    assert [place for part in parts for place in part.places] == [
        *places,
        ("d/car/0.jpg", None),
        ("b.parquet", 0),
    ]
    classifier = inference.load(runs["photos"].out, weights="last", device="cpu")
    predictions = [*labels.predict_labels(classifier, parts)]
    by_file = {row.file: row.probabilities for row in predictions}
    same = {1: "d/car/1.jpg", 2: "d/bus/0.jpg", -1: "d/bus/1.jpg"}
    for number, file in same.items():
        assert predictions[number].probabilities == pytest.approx(by_file[file], abs=1e-6)


def test_bad_rows_are_all_named_or_left_out(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(Path("d"), 2)
    Path("d/car/0.jpg").write_bytes(b"")
    table(Path("a.csv"), ["d/car/1.jpg,1", "d/bus/9.jpg,2"], "image,n")
    job = replace(runs["photos"].job, dataset="")
    lines = ("d/car/0.jpg (zero bytes)", f"a.csv, line 3: {tmp_path}/d/bus/9.jpg (missing)")
    with pytest.raises(DataError, match="has 2 bad rows: ") as error:
        whole.unlabeled(["d", "a.csv"], job, "image")
    assert all(line in str(error.value) for line in lines)
    parts, skipped = whole.unlabeled(["d", "a.csv"], replace(job, skip_bad=True), "image")
    assert skipped == lines
    assert [len(part.good) for part in parts] == [5, 1]
    assert [*parts[1].places] == [("a.csv", 0)]


def spoiled(run: Run, to: Path, name: str, change) -> Path:
    """A copy of a run that was written with another weight."""
    out = shutil.copytree(run.out, to)
    weights = load_file(out / "model.safetensors")
    change(weights[name])
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    written = {"model.safetensors": size_and_checksum(out / "model.safetensors")}
    edit_result(out, lambda result: result["checksums"].update(written))
    return out


def test_a_weight_that_is_not_finite_is_named(runs, tmp_path):
    weight = "blocks.0.mlp.fc1.weight"
    out = spoiled(runs["digits"], tmp_path / "run", weight, lambda w: w[3, 3].fill_(torch.nan))
    with pytest.raises(DataError, match=f"{weight} in .*safetensors is not finite; copy the whole"):
        inference.load(out, device="cpu")


def test_a_row_whose_logits_are_not_finite_is_named(runs, tmp_path):
    trained = inference.load(runs["photos"].out, device="cpu", batch_size=3)
    seen = []

    def logits(model, inputs):
        seen.append(inputs)
        made = runs["photos"].logits(model, inputs)
        return made.index_fill(0, torch.tensor([1]), torch.inf) if len(seen) == 2 else made

    trained = replace(trained, family=altered(trained.family, logits=logits))
    with pytest.raises(DataError, match="logits of row 4 of what is evaluated are not finite"):
        trained.evaluate(rows_of_run(runs["photos"].out).rows)
    seen.clear()
    files = [str(picture(tmp_path / f"{number}.png", 1)) for number in range(5)]
    parts, _ = whole.unlabeled(files, trained.job, "image")
    with pytest.raises(DataError, match=r"logits of .*4\.png are not finite; check that row"):
        list(labels.predict_labels(trained, parts))
