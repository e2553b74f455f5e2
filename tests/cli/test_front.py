"""The commands in README.md and scripts/quickstart.sh run as printed, but on small models."""

import json
import re
import shlex
import shutil
from pathlib import Path

from razorctl.cli.app import COMMANDS, loaded
from tests.cli.commands import razorctl
from tests.detectors import detector
from tests.own import coco, masked, photos, picture, table, texts

ROOT = Path(__file__).parents[2]
SMALL = {
    "vit-b16": "vit-micro",
    "bert-base": "bert",
    "gpt2": "./gpt2",
    "segformer-b0": "segformer",
    "cifar100": "digits",
    "rt-detr-r18": "./yolos",
    "480,560,640": "64,128",
    "20": "2",
    "4": "1",
    "512": "8",
}
SETTINGS = {"STEPS": 2, "BATCH_SIZE": 4, "EVALUATE_EVERY": 2, "DEVICE": "cpu"}
SETTINGS |= {"MAX_RATIO": 0.5, "OPTIMIZER": "sgd"}  # fewer ways to trace
COMMAND = re.compile(r"^ *(?:\.venv/bin/)?(razorctl .*?)(?: *#.*)?$", re.MULTILINE)


def printed(page: str) -> list[list[str]]:
    """The commands of a page; the ones in its sentences come last."""
    text = (ROOT / page).read_text()
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    sentences = re.findall(r"`(razorctl [^`]* [^`]*)`", text)
    lines = [*COMMAND.findall(blocks if page.endswith(".md") else text), *sentences]
    return [shlex.split(line.removesuffix(' "$@"')) for line in lines]


def test_commands_run_as_printed(kinds, runs_here, monkeypatch):
    photos(Path("photos"), 12)
    photos(Path("new"), 1)
    coco("coco", count=48)
    detector("yolos", Path("yolos"))
    texts(Path("reviews.csv"), 24)
    masked("roads")
    for n in range(24):
        picture(Path(f"faces/{n}.jpg"), 9 * n)
    table(Path("faces/metadata.csv"), [f"{n}.jpg,{n / 7}" for n in range(24)], "file_name,label")
    table(Path("pairs.csv"), [f"text {n},other {n}" for n in range(24)], "anchor,positive")
    rows = [{"instruction": f"Count to {n}.", "output": "one " * n} for n in range(1, 25)]
    Path("alpaca.json").write_text(json.dumps(rows))
    Path("news.conll").write_text("good B-PER\nmovie O\n\n" * 24)
    for name in ("bert", "gpt2", "segformer"):
        shutil.copytree(kinds / name, name)
    size = {"height": 64, "width": 64}
    Path("segformer/preprocessor_config.json").write_text(json.dumps({"size": size}))
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"RAZORCTL_{name}", str(value))
    commands: dict[tuple[str, ...], None] = {}  # some are on both pages
    for page, least in (("README.md", 15), ("scripts/quickstart.sh", 4)):
        found = printed(page)
        assert len(found) >= least
        commands |= dict.fromkeys(map(tuple, found))
    for _, *words in commands:
        words = [SMALL.get(word, word) for word in words]
        if ">" in words:  # the shell's
            words = words[: words.index(">")]
        if "--budget" in words:  # of a run whose steps are not set
            at = words.index("--budget")
            del words[at : at + 2]
        result = razorctl(*words)
        assert result.exit_code == 0, (words, result.stderr)
        assert result.stdout or words[0] == "chat"  # which has no input here


def test_options_exist():
    known = {name for command in COMMANDS for each in loaded(command).params for name in each.opts}
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known | {
        "--help",
        "--nproc-per-node",
        "--nnodes",
    }  # the last two are torchrun's
