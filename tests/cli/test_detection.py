"""Detection through the commands, on a tiny RT-DETR."""

import csv
import io
import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForObjectDetection

import razorctl as library
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.training.run import finetune
from tests.cli.commands import (
    assert_ends_with_an_error,
    assert_resumes_to_the_bit,
    done,
    razorctl,
)
from tests.detectors import PLAIN_RT_DETR, detector
from tests.own import CLASSES, boxed, coco

# The matcher's share of what this model stores is large.
RATIO = ("--ratio", "0.3")
FULL = ("--method", "full")  # fewer traces, where the method is no matter
QUICK = ("--batch-size", "4", "--steps", "2", "--lr", "0.001", "--device", "cpu")
NAMES = sorted(CLASSES[:3])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with models, data and a run; classes of the data are those of no model."""
    top = tmp_path_factory.mktemp("objects")
    detector("rt_detr", top / "rt_detr", **PLAIN_RT_DETR)
    detector("yolos", top / "yolos")
    detector("detr", top / "detr")
    coco(str(top / "scenes"), count=24)
    return top


@pytest.fixture(scope="module")
def run(made) -> Path:
    job = Job(str(made / "rt_detr"), str(made / "scenes"), 4, 2, learning_rate=0.001)
    for _ in finetune(job, Recipe(ratio=0.3), out=made / "run", device="cpu"):
        pass
    return made / "run"


@pytest.fixture
def here(made, run, tmp_path) -> Path:
    """A copy of all in the current directory."""
    return copytree(made, tmp_path, dirs_exist_ok=True)


def table(file: str, rows: int, found: str = "xyxy") -> str:
    """A table of images with boxes of a format, in an `objects` column."""
    lines = []
    for number in range(rows):
        box = [20, 10, 40 + number, 30] if found == "xyxy" else [20, 10, 10 + number, 12]
        objects = {"bbox": [box], "category": [NAMES[number % 3]]}
        lines.append({"image": f"scenes/images/{number}.jpg", "objects": objects})
    Path(file).write_text("\n".join(map(json.dumps, lines)))
    return file


def test_a_dry_run_and_a_plan_say_what_is_drawn(here):
    words = ("finetune", "./rt_detr", "./scenes", *QUICK, *FULL, "--scales", "64,96")
    said = razorctl(*words, "--dry-run")
    assert said.exit_code == 0, said.stderr
    assert "with 10 objects in each image" in said.stderr
    assert "image of 3 x 96 x 96 -> no object" in said.stdout + said.stderr
    of = ("plan", "./rt_detr", "./scenes", *QUICK[:4], *FULL, "--vram", "2GB")
    plan = done(*of, "--scales", "64,96")
    assert plan["job"]["input_size"] == 96
    shown = " ".join(razorctl(*of, "--scales", "64,96").stdout.split())
    assert "each image has 10 objects" in shown
    assert "--cuda-graphs" not in shown


def test_settings_of_a_run(here):
    """Scales, micro-batches, averaged weights and an early end by mAP."""
    words = ("--scales", "64,96", "--accumulate", "2", "--ema", "0.9", "--evaluate-every", "1")
    quick = (*QUICK[:2], "--steps", "9", *QUICK[4:], "--patience", "1")
    result = done("finetune", "./rt_detr", "./scenes", *quick, *RATIO, *words, "--out", "a")
    assert result["metric"] == "map"
    assert result["steps"] < 9
    assert result["classes"] == NAMES
    assert {"map", "map_50", "map_75", "mar_100"} <= result["metrics"].keys()
    assert sum(result["by_class"]["labels"]) > 0
    assert result["job"]["input_size"] == 96


@pytest.mark.parametrize(
    "words",
    [
        ("--freeze", "model.backbone", "--optimizer-in-backward"),
        ("--method", "checkpoint"),
    ],
)
def test_other_ways_to_train(words, here):
    model = "./yolos" if "checkpoint" in words else "./rt_detr"
    result = done("finetune", model, "./scenes", *QUICK, *RATIO, *words, "--out", "a")
    assert result["metrics"]["loss"] > 0
    assert result["saved_bytes"] < result["full_saved_bytes"]


REFUSED = {
    "the matcher of objects runs on the host": ("--compile",),
    "leave --cuda-graphs out": ("--cuda-graphs",),
    "heads after several layers": ("--lora",),
    "several layers; choose another method": ("--method", "bias"),
    "mix the labels of images": ("--mixup", "0.2"),
    "class weights are for tasks": ("--class-weights", "balanced"),
    "label smoothing spreads": ("--label-smoothing", "0.1"),
    "no activation checkpointing of its own": ("--activation-checkpointing",),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_settings_that_are_refused(sentence, here):
    words = ("finetune", "./rt_detr", "./scenes", *QUICK, *RATIO, *REFUSED[sentence], "--out", "a")
    result = razorctl(*words)
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr.splitlines()[-1]


def test_a_resumed_run_is_the_same_to_the_bit(here):
    """Of a model that draws noise for its denoising queries, and of drawn scales."""
    model = str(detector("rt_detr", Path("noisy"), decoder_layers=1))
    job = Job(model, "./scenes", 4, 4, learning_rate=0.001, save_every=1, scales="64,96")
    assert_resumes_to_the_bit(job, Recipe("full"))


def test_evaluation_of_own_and_of_other_data(here):
    result = json.loads(Path("run/result.json").read_text())
    found = done("evaluate", "run", "--device", "cpu", "--weights", "last")
    assert found["metrics"] == pytest.approx(result["metrics"], rel=1e-4, abs=1e-6)
    for image in boxed(6)["images"]:  # another format, with classes in another order
        of = [a for a in boxed(6)["annotations"] if a["image_id"] == image["id"]]
        lines = []
        for mark in of:
            left, top, width, height = mark["bbox"]
            center = (left + width / 2) / 60, (top + height / 2) / 40
            number = (mark["category_id"] + 1) % 3
            lines.append(f"{number} {center[0]} {center[1]} {width / 60} {height / 40}")
        name = Path(image["file_name"])
        for kind in ("images", "labels"):
            Path("other", kind).mkdir(parents=True, exist_ok=True)
        Path("other/labels", name.stem + ".txt").write_text("\n".join(lines))
        Path("other/images", name).write_bytes(Path("scenes/images", name).read_bytes())
    names = [CLASSES[number] for number in (1, 2, 0)]
    Path("other/data.yaml").write_text(f"names: {names}\ntrain: images\nval: images\n")
    yolo = done("evaluate", "run", "./other", "--device", "cpu")
    assert sum(yolo["by_class"]["labels"]) == len(boxed(6)["annotations"])


def test_the_format_of_boxes_that_was_found_is_kept(here):
    """A table of two rows, whose format is not clear alone."""
    done("finetune", "./rt_detr", table("t.jsonl", 16), *QUICK, *FULL, "--out", "a")
    assert json.loads(Path("a/split.json").read_text())["box_format"] == "xyxy"
    Path("u.jsonl").write_text("")
    row = {"image": "scenes/images/0.jpg", "objects": {"bbox": [[5, 5, 9, 9]], "category": ["car"]}}
    Path("u.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    unclear = razorctl("finetune", "./rt_detr", "u.jsonl", *QUICK, *FULL, "--out", "b")
    assert unclear.exit_code == 5
    assert "--box-format" in unclear.stderr
    assert done("evaluate", "a", "u.jsonl", "--device", "cpu")["by_class"]["labels"]
    done("evaluate", "a", "--device", "cpu")


def test_predictions(here):
    """A CSV, a document of COCO, and pictures, of a folder, a file, a table and stdin."""
    document = razorctl("predict", "run", "scenes/images", "--json", "--threshold", "0.01")
    Path("found.json").write_text(document.stdout)
    loaded = COCO("found.json")
    assert len(loaded.imgs) == 24
    assert [each["name"] for each in loaded.loadCats(loaded.getCatIds())] == NAMES
    one = loaded.anns[1]
    assert 0.01 <= one["score"] <= 1
    left, top, width, height = one["bbox"]
    assert 0 <= left <= left + width <= 60
    assert 0 <= top <= top + height <= 40
    lines = razorctl("predict", "run", "scenes/images/1.jpg", "--threshold", "0.01").stdout
    head, *rows = lines.splitlines()
    assert head == "file,row,label,score,left,top,right,bottom"
    of = next(i for i, image in loaded.imgs.items() if image["file_name"].endswith("/1.jpg"))
    assert len(rows) == len(loaded.getAnnIds(imgIds=[of]))
    words = ("predict", "run", "scenes/images", "--draw", "drawn", "--threshold", "1")
    none = razorctl(*words)
    assert none.exit_code == 0, none.stderr
    assert none.stdout.splitlines() == [head]
    assert len([*Path("drawn").glob("**/*.png")]) == 24
    tabled = ("predict", "run", table("t.jsonl", 2), "--threshold", "0.01", "--keep-columns")
    lines = [*csv.DictReader(io.StringIO(razorctl(*tabled).stdout))]
    pairs = {(line["row"], line["image"]) for line in lines}
    assert pairs == {("0", "scenes/images/0.jpg"), ("1", "scenes/images/1.jpg")}
    assert len(lines) > 2
    assert_ends_with_an_error(razorctl(*tabled, "--json"), "COCO annotations have no other columns")
    bad = razorctl("predict", "run", "scenes/images", "--top", "2")
    assert_ends_with_an_error(bad, "--top is for classification")


def test_a_comparison_and_a_profile(here, runs_here):
    words = ("--methods", "full,razor", "--metric", "map", *QUICK, *RATIO)
    rows = done("compare", "./rt_detr", "./scenes", *words, "--out", "c")["rows"]
    assert len(rows) == 2
    assert rows[1]["saved_bytes"] < rows[0]["saved_bytes"]
    of = ("./rt_detr", "./scenes", *QUICK[:4], *QUICK[-2:], *FULL)
    profile = done("profile", *of)
    assert profile["totals"]["saved_bytes"] == rows[0]["saved_bytes"]


def test_the_library_trains_and_plans(here):
    settings = {"ratio": 0.3, "batch_size": 4, "steps": 1, "progress": False}
    result = library.finetune("./rt_detr", "./scenes", device="cpu", out="a", **settings)
    assert result["metric"] == "map"
    planned = library.plan("./rt_detr", "./scenes", vram="2GB", precision="fp32", **settings)
    assert planned["chosen"]["predicted"]["saved_bytes"] == result["saved_bytes"]


@pytest.mark.parametrize("kind", ["rt_detr", "yolos", "detr"])
def test_an_export_finds_the_same_objects(kind, here):
    """As safetensors by transformers, and as ONNX by the code of its card."""
    import onnxruntime

    run = "run" if kind == "rt_detr" else kind + "-run"
    if kind != "rt_detr":
        job = Job(f"./{kind}", "./scenes", 4, 1, learning_rate=0.001)
        [*finetune(job, Recipe("full"), out=run, device="cpu")]
    assert razorctl("export", run, "--out", "out").exit_code == 0
    # 64 pixels wide, so that nothing is resampled, and padded unless it is stretched.
    image = Image.effect_noise((64, 64 if kind == "rt_detr" else 40), 90).convert("RGB")
    image.save("a.png")
    words = ("predict", run, "a.png", "--json", "--threshold", "0.001", "--device", "cpu")
    ours = json.loads(razorctl(*words, "--weights", "best").stdout)["annotations"]
    model = AutoModelForObjectDetection.from_pretrained("out").eval()
    processor = AutoImageProcessor.from_pretrained("out")
    size = (64, 64) if kind in ("rt_detr", "yolos") else (40, 64)
    inputs = processor(image, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    (found,) = processor.post_process_object_detection(output, 0.001, target_sizes=[size])
    scores = found["scores"].sort(descending=True).values
    torch.testing.assert_close(scores[:3], torch.tensor([one["score"] for one in ours[:3]]))
    card = Path("out/README.md").read_text()
    assert "pipeline_tag: object-detection" in card
    exec(card.split("```python\n")[1].split("```")[0], values := {})
    assert {"scores", "labels", "boxes"} == values["found"].keys()

    exported = done("export", run, "--to", "onnx", "--out", "onnx")["onnx"]
    masks = ["pixel_mask"] if kind == "detr" else []
    assert [*exported["inputs"]] == ["pixel_values", *masks]
    assert exported["inputs"]["pixel_values"] == ["batch", 3, 64, 64]
    assert exported["outputs"] == {"scores": ["batch", 12, 3], "boxes": ["batch", 12, 4]}
    session = onnxruntime.InferenceSession("onnx/model.onnx")
    feed = {name: inputs[name].numpy() for name in exported["inputs"]}
    chances, shares = session.run(None, feed)
    np.testing.assert_allclose(chances.max(), scores[0], rtol=1e-3)
    x, y, wide, high = shares[0][np.unravel_index(chances[0].argmax(), chances[0].shape)[0]]
    corners = [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2]
    inside = (np.array(corners) * np.tile(size[::-1], 2)).clip(0, np.tile(image.size, 2))
    left, top, width, height = ours[0]["bbox"]
    np.testing.assert_allclose(inside, [left, top, left + width, top + height], atol=0.05)
    code = Path("onnx/README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code, values := {})
    assert values["found"].shape[1] == 4


def test_a_head_keeps_the_rows_of_known_classes(here, caplog):
    """Those of a COCO model, as the classes of the data are named."""
    for kind in ("rt_detr", "yolos"):
        config = json.loads(Path(kind, "config.json").read_text())
        names = {"0": NAMES[2], "1": "zebra", "2": NAMES[0]}
        config |= {"id2label": names, "label2id": {name: int(n) for n, name in names.items()}}
        Path(kind, "config.json").write_text(json.dumps(config))
        caplog.clear()
        job = Job(f"./{kind}", "./scenes", 4, 1, learning_rate=1e-12)
        [*finetune(job, Recipe("full"), out=f"{kind}-kept", device="cpu")]
        (said,) = [r.getMessage() for r in caplog.records if "classifier" in r.getMessage()]
        assert said.endswith(
            f"keeps the rows of {NAMES[0]}, {NAMES[2]}; the rows of {NAMES[1]} are new"
        )
        before, now = (load_file(f"{at}/model.safetensors") for at in (kind, f"{kind}-kept"))
        heads = [name for name in now if now[name].shape[:1] in ((3,), (4,)) and "class" in name]
        assert len(heads) > 1
        for name in heads:
            torch.testing.assert_close(now[name][[0, 2]], before[name][[2, 0]])
            torch.testing.assert_close(now[name][3:], before[name][3:])
            if now[name].dim() == 1:
                torch.testing.assert_close(now[name][1], before[name][:3].mean())
            else:
                assert not any(torch.equal(now[name][1], row) for row in before[name])
