"""The functions of the library with rows in memory, from training to export."""

import json
import pydoc
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict, config
from huggingface_hub import constants
from PIL import Image
from torch import nn

import razorctl
from razorctl import errors
from razorctl.data.own import in_memory
from tests import local_hub
from tests.cli.commands import razorctl as command
from tests.models import registered

QUICK = {"steps": 2, "batch_size": 4, "device": "cpu", "validation": 0.5, "progress": False}
WORDS = ("a cat", "dog sat", "cat sat a dog")
TEXTS = [f"{WORDS[n % 3]} {WORDS[n % 2]}" for n in range(24)]
NAMES = [("pos", "neg")[n % 2] for n in range(24)]


def images() -> list[dict]:
    shades = [np.full((9, 9, 3), 10 * n, np.uint8) for n in range(12)]
    return [{"image": Image.fromarray(s), "label": NAMES[n]} for n, s in enumerate(shades)]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shallow, cache):
    """A folder with a run on images and a run on texts, both of rows in memory."""
    top = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch, registered(*local_hub.ENTRIES.values()):
        patch.setattr(constants, "HF_HUB_CACHE", str(top / "hub"))
        patch.chdir(top)
        local_hub.cache_model(top / "hub", "bert-base")
        razorctl.finetune("vit-micro", images(), out="images", **QUICK)
        frame = pd.DataFrame({"text": TEXTS, "label": NAMES})
        razorctl.finetune("bert-base", frame, out="texts", **QUICK)
        yield top


@pytest.fixture
def here(trained, tmp_path):
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def labels(found: list[dict]) -> list[tuple]:
    return [(row["row"], row["label"], round(row["probability"], 5)) for row in found]


def test_texts_of_every_form_have_the_predictions_of_the_command(here):
    Path("t.txt").write_text("\n".join(TEXTS))
    known = json.loads(command("predict", "texts", "t.txt", "--json").stdout)["predictions"]
    rows = [{"text": text} for text in TEXTS]
    forms = [TEXTS, rows, pd.DataFrame(rows), Dataset.from_list(rows)]
    for data in forms:
        found = razorctl.predict("texts", data, device="cpu", progress=False)
        assert labels(found) == labels(known)
        assert {row["file"] for row in found} == {None}
    for data in ("t.txt", [Path("t.txt")], ["t.txt"]):
        assert razorctl.predict("texts", data, device="cpu", progress=False) == known


def test_images_are_pictures_rows_or_paths(here):
    rows = images()
    pictures = [row["image"] for row in rows]
    for n, picture in enumerate(pictures):
        picture.save(f"{n:02}.png")
    of_pictures = razorctl.predict("images", pictures, top=2, progress=False)
    assert of_pictures == razorctl.predict("images", rows, top=2, progress=False)
    assert [len(row["top"]) for row in of_pictures] == [2] * len(rows)
    files = [f"{n:02}.png" for n in range(len(rows))]
    of_files = razorctl.predict("images", files, top=2, progress=False)
    assert [row["file"] for row in of_files] == files
    assert [row["top"] for row in of_files] == [row["top"] for row in of_pictures]


def test_evaluations_are_of_the_run_and_of_other_rows(here):
    of_run = razorctl.evaluate("images", weights="last", device="cpu", progress=False)
    assert of_run["metrics"]["accuracy"] == of_run["accuracy"]
    known = command("evaluate", "images", "--weights", "last", "--device", "cpu", "--json")
    assert of_run["metrics"] == json.loads(known.stdout)["metrics"]
    every = razorctl.evaluate("images", images(), device="cpu", progress=False)
    assert (every["rows"], every["dataset"]) == (12, "the table in memory")
    with pytest.raises(errors.DataError, match=r"the table in memory .*bird"):
        razorctl.evaluate("images", [{**images()[0], "label": "bird"}], progress=False)


def test_a_run_of_rows_is_resumed_from_the_cache_or_from_the_rows(here, tmp_path):
    rows, settings = images(), {**QUICK, "ratio": 0.5}
    folder = in_memory.stored(rows)
    prepared = razorctl.finetune("vit-micro", rows, dry_run=True, **settings)
    assert prepared["dataset"] == str(folder)
    done = razorctl.finetune("vit-micro", rows, out="a", **settings)
    Path("a/result.json").unlink()
    shutil.rmtree(folder)
    with pytest.raises(errors.UsageError, match="was removed; give the same rows again"):
        razorctl.finetune(out="a", resume=True, progress=False)
    again = razorctl.finetune("vit-micro", rows, out="a", resume=True, progress=False)
    assert again["metrics"] == done["metrics"]
    with pytest.raises(errors.UsageError, match="dataset"):
        razorctl.finetune("vit-micro", rows[1:], out="a", resume=True, progress=False)


def test_plans_and_comparisons_take_splits(runs_here):
    rows = images()
    data = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:4]))
    quick = {"steps": 1, "batch_size": 4, "progress": False}
    planned = razorctl.plan("vit-micro", data, gpu="t4", ratio=0.5, **quick)
    assert planned["chosen"]["recipe"]["ratio"] == 0.5
    compared = razorctl.compare("vit-micro", data, methods=["full"], device="cpu", **quick)
    assert compared["rows"][0]["error"] is None


def test_without_progress_nothing_is_printed(here, capfd):
    run = razorctl.finetune("vit-micro", Dataset.from_list(images()), out="silent", **QUICK)
    razorctl.evaluate(run, images(), progress=False)
    razorctl.predict(run, images(), progress=False)
    images()[0]["image"].save("a.png")
    assert razorctl.predict(
        run, pd.DataFrame({"image": ["a.png", None]}), progress=False, skip_bad=True
    )
    razorctl.plan("vit-micro", images(), gpu="t4", ratio=0.5, batch_size=4, progress=False)
    for to in ("safetensors", "onnx"):
        exported = razorctl.export(run, to, progress=False)
        assert Path(exported["out"]) == Path(f"silent-{to}")
        assert {file.name for file in Path(exported["out"]).iterdir()} == {*exported["files"]}
    assert capfd.readouterr() == ("", "")


def test_lists_are_those_of_the_command():
    for words in ((), ("datasets",), ("defaults", "vit-micro", "digits")):
        assert dict(razorctl.list(*words)) == json.loads(command("list", *words, "--json").stdout)
    assert "razor" in str(razorctl.list("methods"))
    assert "list" not in razorctl.__all__


NET = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
OWN = "takes the name or folder of a model, not a Sequential; for a module of your own use"
REFUSED = {
    "finetune": (lambda: razorctl.finetune(NET, "digits"), f"finetune {OWN} razorctl.sparsify"),
    "plan": (lambda: razorctl.plan(NET), f"plan {OWN}"),
    "compare": (lambda: razorctl.compare(NET, "digits"), f"compare {OWN}"),
    "dataset": (
        lambda: razorctl.finetune("vit-micro", 3),
        "data cannot be of type int; give a path",
    ),
    "run": (lambda: razorctl.predict(3, []), "run 3 is not of type str or PathLike or Result"),
    "profile": (lambda: razorctl.profile(3), "int is neither the name of a model nor an nn.Module"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_of_another_type_are_type_errors(case):
    call, sentence = REFUSED[case]
    with pytest.raises(TypeError) as error:
        call()
    assert sentence in str(error.value)
    assert isinstance(error.value, errors.UsageError)


def test_refusals_of_finished_runs(here):
    for call, sentence in (
        (lambda: razorctl.predict("texts", [1]), "data cannot be of type list of int"),
        (lambda: razorctl.predict("texts", TEXTS, out="x"), "out is a directory for masks"),
        (lambda: razorctl.predict("texts", TEXTS, draw="x"), "--draw is for detection"),
        (lambda: razorctl.predict("images", ["no.jpg"]), "no.jpg does not exist"),
        (lambda: razorctl.export("texts", "gguf"), "gguf"),
        (lambda: razorctl.evaluate("texts", skip_bad=True), "is for reading DATASET"),
        (lambda: razorctl.compare(), "nothing is named"),
        (lambda: razorctl.list("defaults"), "list defaults needs a model"),
    ):
        with pytest.raises(errors.UsageError, match=sentence):
            call()


def test_help_lists_the_settings_of_data():
    page = pydoc.render_doc(razorctl.predict, renderer=pydoc.plaintext)
    assert re.search(r"^ +skip_bad: bool \| None$", page, re.M)
    assert "Settings" not in pydoc.render_doc(razorctl.export, renderer=pydoc.plaintext)


@pytest.mark.parametrize("given", [("razor", {"ratio": 0.7}), (None, {"ratio": 0.7})])
def test_sparsify_takes_the_name_of_a_method(given):
    recipe, settings = given
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    assert razorctl.sparsify(net, recipe, **settings)
    assert razorctl.recipe_of(net) == razorctl.Recipe("razor", 0.7)
    with pytest.raises(errors.UsageError, match="unknown method 'razr'; did you mean 'razor'"):
        razorctl.sparsify(nn.Linear(8, 8), "razr")
    with pytest.raises(errors.UsageError, match="unknown setting of a recipe 'ratoi'; did you"):
        razorctl.sparsify(nn.Linear(8, 8), "razor", ratoi=0.5)
    with pytest.raises(TypeError, match="recipe cannot be a int"):
        razorctl.sparsify(nn.Linear(8, 8), 3)
