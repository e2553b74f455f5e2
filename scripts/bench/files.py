"""Tasks as a user has them: a folder with a model, and files with data, under the cache.

The images are Fashion-MNIST; the texts the R8 split of Reuters, mails of SpamAssassin, and tweets
and editorials that people have rated (Hutto and Gilbert, 2014); the masks those of garments of
Fashion-MNIST that are laid on a background, whose classes are also the labels of that image. The
tags are of names: an uncased model learns which words of an editorial are capitalized. See
pretrained.py for the models.
"""

import csv
import email
import email.policy
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from PIL import Image
from pretrained import (
    ARCHITECTURE,
    DECODER_TOKENS,
    DINO,
    HUTTO,
    MINILM,
    MOBILENET,
    SIDE,
    Rows,
    build_squeezenet,
    decoder_home,
    fetch,
    halves,
    kept,
    load_fashion,
    load_unseen,
    mobilenet_weights,
    news,
    vit_weights,
)
from safetensors.torch import save_file
from torch import Tensor

from razorctl import Job, Recipe
from razorctl.training.run import finetune

GARMENTS = ("t-shirt", "trouser", "pullover", "dress", "coat")
GARMENTS += ("sandal", "shirt", "sneaker", "bag", "boot")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
VIT_SIDE = 70  # pixels of a side
SCENE = 64  # of a segmented image
ENLARGED = 112  # what the model sees of it: garments are nearly as large as in its training
TOKENS = 32  # of a classified text
SPLITS = {"train": 6000, "validation": 200, "test": 2000}  # examples
TEXTS = {"validation": 100, "test": 400}  # news of the decoder, which become fewer sequences
ASKED, ANSWERED = 24, 40  # words of a news item that a prompt has, and its answer
DETECTOR: dict[str, Any] = {  # a small RT-DETR, and how it is trained
    "side": 96,
    "batch_size": 16,
    "steps": 1600,
    "rate": 5e-4,
    "config": {
        "model_type": "rt_detr",
        "backbone_config": {
            "model_type": "rt_detr_resnet",
            "layer_type": "basic",
            "embedding_size": 16,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 32, 64, 64],
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_in_channels": [32, 64, 64],
        "encoder_hidden_dim": 64,
        "d_model": 64,
        "decoder_in_channels": [64, 64, 64],
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "num_queries": 40,
        "num_denoising": 30,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "encoder_attention_heads": 4,
        "hidden_expansion": 0.5,
        "freeze_backbone_batch_norms": False,
    },
}
WORD = re.compile(r"\w+(?:[.'-]\w+)*|[^\w\s]")
EVALUATIONS = 8  # in a run
KEY = {"splits": SPLITS, "texts": TEXTS}
Files = Callable[[Path], Path]  # the cache -> a folder there


@dataclass(frozen=True)
class Task:
    """A model, its data and settings; rates: the learning rates that are tried.

    seeds: the number of runs of each method.
    """

    summary: str
    model: Files
    data: Files
    job: Job
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    seeds: int = 3


def in_cache(name: str, **settings: object) -> Callable[[Callable[[Path, Path], None]], Files]:
    """Makes a function that fills a folder one that returns it, filled now or before."""

    def files(fill: Callable[[Path, Path], None]) -> Files:
        return lambda cache: kept(cache, f"files-{name}", {**KEY, **settings}, partial(fill, cache))

    return files


def parts(train: Rows, test: Rows) -> Iterator[tuple[str, Rows]]:
    """The rows of each split; those of validation follow those that are trained on."""
    first, more = SPLITS["train"], SPLITS["validation"]
    for name, rows, span in (
        ("train", train, slice(first)),
        ("validation", train, slice(first, first + more)),
        ("test", test, slice(SPLITS["test"])),
    ):
        yield name, {column: values[span] for column, values in rows.items()}


def write_timm(
    folder: Path, architecture: str, state: Rows, side: int, classes: int, **args: object
) -> None:
    """A folder that timm loads."""
    about = {"input_size": (3, side, side), "mean": MEAN, "std": STD, "crop_pct": 1.0}
    about |= {"num_classes": classes}
    about["classifier"] = timm.get_pretrained_cfg(architecture).classifier
    config = {"architecture": architecture, "num_classes": classes, "model_args": args}
    config["pretrained_cfg"] = about
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )


@in_cache("vit", side=VIT_SIDE, classes=1000)
def vit(cache: Path, folder: Path) -> None:
    """DINOv2's ViT-S/14."""
    state = vit_weights(fetch("vit-weights", cache) / DINO, VIT_SIDE // 14)
    # It has no classifier. One of other classes than the data's is not taken.
    state |= {"head.weight": torch.zeros(1000, 384), "head.bias": torch.zeros(1000)}
    write_timm(folder, "vit_small_patch14_dinov2", state, VIT_SIDE, 1000, img_size=VIT_SIDE)


def bert(cache: Path) -> Path:
    """The six-layer BERT of a sentence embedder."""
    return fetch("bert", cache) / MINILM


@in_cache("squeezenet")
def squeezenet(cache: Path, folder: Path) -> None:
    """SqueezeNet 1.1, as `razorctl` writes models of torchvision."""
    state = build_squeezenet(cache).state_dict()
    save_file(
        {k: v for k, v in state.items() if k.startswith("features")}, folder / "model.safetensors"
    )
    config = {"library": "torchvision", "architecture": "squeezenet1_1"}
    config |= {"task": "classification", "label_names": GARMENTS, "input_size": SIDE}
    (folder / "config.json").write_text(json.dumps(config))


@in_cache("backbone", **MOBILENET)
def backbone(cache: Path, folder: Path) -> None:
    """The MobileNetV2 that was trained before; its features are an eighth of the image."""
    state = mobilenet_weights(cache)
    write_timm(folder, ARCHITECTURE, state, SCENE, len(GARMENTS), output_stride=8)


@in_cache("fashion")
def fashion(cache: Path, folder: Path) -> None:
    """Images in a folder for each class."""
    for split, rows in parts(*load_fashion(cache)):
        for name in GARMENTS:
            (folder / split / name).mkdir(parents=True)
        for number, (image, label) in enumerate(zip(rows["images"], rows["labels"], strict=True)):
            where = folder / split / GARMENTS[label] / f"{number}.png"
            Image.fromarray(image.numpy()).save(where)


def tables(folder: Path, splits: Iterable[tuple[str, list[tuple[str, str]]]]) -> None:
    """A CSV file of labels and texts for each split."""
    for split, rows in splits:
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("label", "text"), *rows])


def lines(file: Path, rows: Iterable[object]) -> None:
    """A file of JSON, a row a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def shuffled(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return [rows[i] for i in order.tolist()]


def divided(rows: list[tuple[str, str]], last: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The rows of each split, of which the test has `last`."""
    rows, more = shuffled(rows), SPLITS["validation"]
    yield "test", rows[:last]
    yield "validation", rows[last : last + more]
    yield "train", rows[last + more :]


def news_parts(cache: Path, more: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Topics and texts of the news of each split, of which that of validation has `more`."""
    train = shuffled(news(cache, "train"))
    yield "train", train[more:]
    yield "validation", train[:more]
    yield "test", shuffled(news(cache, "test"))[: SPLITS["test"]]


def unseen(cache: Path) -> Iterator[tuple[str, list[str]]]:
    """Texts of the news of each split, without those that the decoder was trained on."""
    train, more = halves(cache)[1], TEXTS["validation"]
    yield "train", train[more:]
    yield "validation", train[:more]
    yield "test", [text for _, text in news(cache, "test")][: TEXTS["test"]]


@in_cache("r8")
def r8(cache: Path, folder: Path) -> None:
    """News with their topics."""
    tables(folder, news_parts(cache, SPLITS["validation"]))


@in_cache("topics", words=ASKED)
def topics(cache: Path, folder: Path) -> None:
    """Beginnings of two news as one text, with the topics of both."""
    for split, rows in news_parts(cache, 2 * SPLITS["validation"]):
        pairs = zip(rows[::2], rows[1::2], strict=False)
        texts = (
            {
                "text": " ".join(first.split()[:ASKED] + second.split()[:ASKED]),
                "labels": sorted({one, other}),
            }
            for (one, first), (other, second) in pairs
        )
        lines(folder / f"{split}.jsonl", texts)


@in_cache("spam")
def spam(cache: Path, folder: Path) -> None:
    """Subjects and bodies of mails, with whether they are spam."""
    tables(folder, divided(mails(cache), SPLITS["test"]))


@in_cache("subjects")
def subjects(cache: Path, folder: Path) -> None:
    """Subjects of mails, each with the beginning of its body."""
    rows = dict.fromkeys(tuple(text.split("\n", 1)) for _, text in mails(cache))
    pairs = [(head.strip(), " ".join(body.split()[:100])) for head, body in rows]
    first = {head: (head, body) for head, body in reversed(pairs) if head and body}
    for split, some in divided([*first.values()], SPLITS["test"] // 2):
        lines(folder / f"{split}.jsonl", ({"query": a, "passage": b} for a, b in some))


def mails(cache: Path) -> list[tuple[str, str]]:
    """Label and text of each mail; headers but the subject would tell which archive it is of."""
    rows = []
    with tarfile.open(next(fetch("mails", cache).glob("*.tgz"))) as files:
        for member in sorted(files.getmembers(), key=lambda m: m.name):
            if not (member.name.startswith("package/data/") and member.name.endswith(".json")):
                continue
            content = json.load(files.extractfile(member))  # type: ignore[arg-type]
            if "group" not in content:  # the list of files
                continue
            mail = email.message_from_string(content["text"], policy=email.policy.compat32)
            plain = next((p for p in mail.walk() if not p.is_multipart()), mail)
            text = f"{mail['subject'] or ''}\n{plain.get_payload()}"
            text = text.encode("utf-8", "replace").decode().replace("\0", " ")
            rows.append(("spam" if content["group"].startswith("spam") else "ham", text[:2000]))
    return rows


def rated(cache: Path, what: str) -> list[tuple[str, str]]:
    """The mean rating of each text, from -4 to 4, and the text."""
    with tarfile.open(fetch("rated-texts", cache) / HUTTO) as files:
        file = files.extractfile(f"hutto_ICWSM_2014/{what}_GroundTruth.txt")
        lines = file.read().decode("utf-8", "replace").split("\n")  # type: ignore[union-attr]
    rows = [line.strip("\r").split("\t", 2) for line in lines if line]
    return [(rating, text) for _, rating, text in rows]


@in_cache("tweets")
def tweets(cache: Path, folder: Path) -> None:
    """Tweets with their ratings."""
    tables(folder, divided(rated(cache, "tweets"), SPLITS["test"] // 2))


def tagged(text: str) -> Iterator[tuple[str, str]]:
    """Words and marks with their tags; the first of a sentence is no name, as all are capital."""
    before, inside = "", False
    for word in WORD.findall(text):
        begins = before in ("", ":", '"', "'", "`")
        name = word[0].isupper() and not begins and word.partition("'")[0] != "I"
        yield word, f"{'I' if inside else 'B'}-NAME" if name else "O"
        before, inside = word, name


@in_cache("names")
def names(cache: Path, folder: Path) -> None:
    """Sentences of editorials, in CoNLL files."""
    for split, rows in divided(rated(cache, "nytEditorialSnippets"), SPLITS["test"] // 2):
        sentences = ("".join(f"{w} {tag}\n" for w, tag in tagged(text)) for _, text in rows)
        (folder / f"{split}.conll").write_text("\n".join(filter(None, sentences)))


@in_cache("instructions", words=[ASKED, ANSWERED])
def instructions(cache: Path, folder: Path) -> None:
    """Beginnings of news as prompts, and how they go on."""
    for split, items in unseen(cache):
        words = [w for w in map(str.split, items) if len(w) > ASKED]
        answers = (" ".join(w[ASKED : ASKED + ANSWERED]) for w in words)
        rows = zip((" ".join(w[:ASKED]) for w in words), answers, strict=True)
        lines(folder / f"{split}.jsonl", ({"prompt": p, "completion": c} for p, c in rows))


@in_cache("news")
def texts(cache: Path, folder: Path) -> None:
    """News as plain texts."""
    for split, items in unseen(cache):
        (folder / f"{split}.txt").write_text("\n\n\n".join(items) + "\n")


Box = tuple[int, list[int]]  # a class; left, top, width and height


def scene(
    images: Tensor, classes: Tensor, draw: torch.Generator
) -> tuple[Tensor, Tensor, list[Box]]:
    """Two to four garments [28, 28] on a slanted gray background, their mask and their boxes."""
    down, right = torch.meshgrid(*[torch.linspace(-1, 1, SCENE)] * 2, indexing="ij")
    slant, level = torch.rand(2, generator=draw) * 120 - 60, 60 + 80 * torch.rand(1, generator=draw)
    picture = level + slant[0] * down + slant[1] * right
    picture = picture + 8 * torch.randn(SCENE, SCENE, generator=draw)
    mask, boxes = torch.zeros(SCENE, SCENE, dtype=torch.uint8), []
    for _ in range(int(torch.randint(2, 5, (), generator=draw))):
        number = int(torch.randint(len(images), (), generator=draw))
        y, x = torch.randint(SCENE - 28 + 1, (2,), generator=draw).tolist()
        part = slice(y, y + 28), slice(x, x + 28)
        garment = images[number] > 0
        picture[part] = torch.where(garment, images[number].float(), picture[part])
        mask[part] = torch.where(garment, classes[number].to(torch.uint8) + 1, mask[part])
        (down, high), (right, wide) = (
            (int(side.min()), int(side.max() - side.min()) + 1) for side in garment.nonzero().T
        )
        boxes.append((int(classes[number]), [x + right, y + down, wide, high]))
    return picture.clamp(0, 255).to(torch.uint8), mask, boxes


@in_cache("scenes", **MOBILENET)
def scenes(cache: Path, folder: Path) -> None:
    """Images with masks: half as many as of single garments."""
    (folder / "classes.txt").write_text("\n".join(["background", *GARMENTS]) + "\n")
    draw = torch.Generator().manual_seed(0)
    for split, rows in parts(*load_unseen(cache)):
        for part in ("images", "masks"):
            (folder / part / split).mkdir(parents=True)
        for number in range(SPLITS[split] // 2):
            *pair, _ = scene(rows["images"], rows["labels"], draw)
            for part, values in zip(("images", "masks"), pair, strict=True):
                Image.fromarray(values.numpy()).save(folder / part / split / f"{number}.png")


@in_cache("several")
def several(cache: Path, folder: Path) -> None:
    """Images with the classes of all garments on them."""
    draw = torch.Generator().manual_seed(0)
    for split, rows in parts(*load_fashion(cache)):
        (folder / split).mkdir()
        labels = []
        for number in range(SPLITS[split] // 2):
            image, mask, _ = scene(rows["images"], rows["labels"], draw)
            Image.fromarray(image.numpy()).save(folder / split / f"{number}.png")
            seen = [GARMENTS[i - 1] for i in mask.unique().tolist() if i]
            labels.append({"image": f"{split}/{number}.png", "labels": seen})
        lines(folder / f"{split}.jsonl", labels)


def boxed(folder: Path, train: Rows, test: Rows) -> None:
    """Images with the boxes of their garments, in files of COCO: half as many as of single ones."""
    draw = torch.Generator().manual_seed(0)
    for split, rows in parts(train, test):
        (folder / split).mkdir()
        images, marks = list[Any](), list[Any]()
        for number in range(SPLITS[split] // 2):
            image, _, boxes = scene(rows["images"], rows["labels"], draw)
            Image.fromarray(image.numpy()).save(folder / split / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png"})
            for garment, box in boxes:
                place = {"image_id": number, "category_id": garment, "bbox": box}
                marks.append({"id": len(marks), **place, "iscrowd": 0})
        named = [{"id": number, "name": name} for number, name in enumerate(GARMENTS)]
        document = {"images": images, "annotations": marks, "categories": named}
        (folder / split / "_annotations.coco.json").write_text(json.dumps(document))


@in_cache("objects", **MOBILENET)
def objects(cache: Path, folder: Path) -> None:
    """Images with the boxes of garments that the detector has not seen."""
    boxed(folder, *load_unseen(cache))


@in_cache("detector", **DETECTOR)
def detector(cache: Path, folder: Path) -> None:
    """An RT-DETR that has learned the boxes of other garments."""
    (folder / "start").mkdir()
    config = transformers.AutoConfig.for_model(**DETECTOR["config"], num_labels=len(GARMENTS))
    config.save_pretrained(folder / "start")
    processor = {"image_processor_type": "RTDetrImageProcessor", "do_normalize": False}
    processor["size"] = dict.fromkeys(("height", "width"), DETECTOR["side"])
    (folder / "start/preprocessor_config.json").write_text(json.dumps(processor))
    seen, test = load_fashion(cache)
    (folder / "data").mkdir()
    boxed(folder / "data", {name: rows[: MOBILENET["rows"]] for name, rows in seen.items()}, test)
    places = {"model": str(folder / "start"), "dataset": str(folder / "data")}
    begun = job("detection", DETECTOR["batch_size"], DETECTOR["steps"], DETECTOR["side"])
    begun = replace(begun, **places, learning_rate=DETECTOR["rate"], from_scratch=True)
    begun = replace(begun, augment="none")
    going = finetune(begun, Recipe("full"), out=folder / "run")
    for step in going:
        print(f"detector: step {step.step}, loss {step.loss:.2f}", end="\r", flush=True)
    going.result()
    for file in ("config.json", "model.safetensors", "preprocessor_config.json"):
        (folder / "run" / file).rename(folder / file)
    for part in ("start", "data", "run"):
        shutil.rmtree(folder / part)


def job(task: str, batch_size: int, steps: int, input_size: int) -> Job:
    """A job without a model and data."""
    sizes = {"batch_size": batch_size, "steps": steps, "input_size": input_size}
    sizes["evaluate_every"] = steps // EVALUATIONS
    return Job("", "", task=task, optimizer="adamw", precision="fp32", **sizes)  # type: ignore[arg-type]


# Summary, model, data and job of each, and its learning rates and seeds if they are not the usual.
TASKS = {
    "fashion": Task(
        *("DINOv2 ViT-S/14, Fashion-MNIST", vit, fashion),
        job("classification", 16, 160, VIT_SIDE),
        (3e-5, 2e-4, 1e-3),  # the small one suits all weights, the large one adapters
    ),
    "r8": Task("MiniLM-L6 BERT, Reuters R8", bert, r8, job("classification", 16, 160, TOKENS)),
    "spam": Task(
        "MiniLM-L6 BERT, SpamAssassin", bert, spam, job("classification", 16, 160, TOKENS)
    ),
    "squeezenet": Task(
        *("SqueezeNet 1.1, Fashion-MNIST", squeezenet, fashion),
        job("classification", 16, 240, SIDE),
    ),
    "decoder": Task(
        *("Llama of four layers, Reuters R8", decoder_home, texts),
        job("causal-lm", 8, 160, DECODER_TOKENS),
    ),
    "scenes": Task(
        *("MobileNetV2 0.5 with a linear head, garments on a background", backbone, scenes),
        job("segmentation", 8, 960, ENLARGED),
        (3e-3, 1e-2, 3e-2),  # most of its layers have never met a background
    ),
    "tags": Task(
        *("MiniLM-L6 BERT, names in editorials", bert, names),
        *(job("token-classification", 16, 240, TOKENS), (2e-4,), 2),
    ),
    "labels": Task(
        *("DINOv2 ViT-S/14, garments on a background", vit, several),
        *(job("multi-label", 8, 640, VIT_SIDE), (6e-5,), 5),
    ),
    "topics": Task(
        *("MiniLM-L6 BERT, topics of two news of Reuters R8", bert, topics),
        *(job("multi-label", 16, 240, 2 * TOKENS), (2e-4,), 2),
    ),
    "tweets": Task(
        *("MiniLM-L6 BERT, ratings of tweets", bert, tweets),
        *(job("regression", 16, 240, TOKENS), (2e-4,), 2),
    ),
    "objects": Task(
        *("RT-DETR of 0.6 M parameters, garments on a background", detector, objects),
        *(replace(job("detection", 16, 320, DETECTOR["side"]), augment="none"), (2e-4,), 2),
    ),
    "instructions": Task(
        *("Llama of four layers, instructions on Reuters R8", decoder_home, instructions),
        *(job("causal-lm", 8, 160, DECODER_TOKENS), (3e-4,), 2),
    ),
}
