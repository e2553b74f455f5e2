"""Runs whose model, or whose own files, are others than they were: every command says which."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from razorctl.cli.app import COMMANDS, loaded
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.training.run import finetune
from tests import local_hub
from tests.cli.commands import razorctl
from tests.cli.kinds import build
from tests.models import registered
from tests.own import photos, texts

# Model -> data.
MODELS = {"llama": "chats.jsonl", "bert": "texts.txt", "segformer": "shapes", "resnet": "photos"}
OF_RUNS = [name for name in COMMANDS if "run" in {each.name for each in loaded(name).params}]
# Each command and each model once; `predict` continues no texts of masked tokens.
USES = [*zip(OF_RUNS, ("bert", "llama", "llama", "segformer"), strict=True), (OF_RUNS[0], "resnet")]


@pytest.fixture(scope="module")
def began(tmp_path_factory, traces, shallow):
    """A folder with models, a run of each that has taken a step, and one that is finished."""
    top = tmp_path_factory.mktemp("bound")
    build(top)
    photos(top / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(traces))
        patch.chdir(top)
        for model, data in MODELS.items():
            job = Job(f"./{model}", data, batch_size=2, steps=2, evaluate_every=1, input_size=32)
            run = finetune(job, Recipe("full"), out=f"run-{model}", device="cpu")
            next(run)
            run.rescue()
            shutil.copytree(f"run-{model}", f"done-{model}")
            list(finetune(job, Recipe("full"), out=f"done-{model}", device="cpu", resume=True))
    return top


@pytest.fixture(autouse=True)
def here(began):
    """The runs, copied to the current directory."""
    for run in (*began.glob("run-*"), *began.glob("done-*")):
        shutil.copytree(run, run.name)


@contextmanager
def changed(file: Path) -> Iterator[None]:
    """Inside the block, the last bit of weights is another, and other files end with a blank."""
    old = file.read_bytes()
    weights = file.suffix == ".safetensors"
    file.write_bytes(old[:-1] + bytes([old[-1] ^ 1]) if weights else old + b" ")
    yield
    file.write_bytes(old)


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def resume(model: str):
    return razorctl("finetune", "--resume", "--out", f"run-{model}", "--device", "cpu")


@pytest.mark.parametrize("model", ["llama", "resnet"])
def test_a_run_is_not_resumed_with_another_model(model, began):
    before = content(Path(f"run-{model}"))
    files = sorted((began / model).iterdir())
    assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    for file in files:
        with changed(file):
            result = resume(model)
        assert result.exit_code == 2, result.stderr
        assert f"has changed since run-{model} began: {file.name}; undo that" in result.stderr
        assert content(Path(f"run-{model}")) == before
    extra = began / model / "model-2.safetensors"
    shutil.copy(began / model / "model.safetensors", extra)
    result = resume(model)
    extra.unlink()
    assert (result.exit_code, f": {extra.name}; undo" in result.stderr) == (2, True)
    assert resume(model).exit_code == 0


@pytest.mark.parametrize("name", local_hub.ENTRIES)
def test_a_run_is_bound_to_what_the_hub_had(name, hub):
    folder = local_hub.cache_model(hub, name)
    data = texts(Path("a.csv")) if name == "bert-base" else photos(Path("d"))
    job = Job(name, str(data), batch_size=2, steps=2, save_every=1)
    with registered(*local_hub.ENTRIES.values()):
        run = finetune(job, Recipe("full"), out="run-hub", device="cpu")
        next(run)
        run.rescue()
        for file in sorted(folder.glob("snapshots/*/*")):
            with changed(file):
                result = resume("hub")
            assert result.exit_code == 2, result.stderr
            assert f"{name} has changed since run-hub began: {file.name};" in result.stderr
        assert resume("hub").exit_code == 0


def test_checksums_that_were_edited_are_refused():
    file = Path("run-bert/pretrained.json")
    file.write_text(file.read_text().replace("tokenizer.json", "tokenized.json"))
    result = resume("bert")
    assert (result.exit_code, "it was edited after" in result.stderr) == (5, True)


@pytest.mark.parametrize(("name", "model"), USES)
def test_every_file_of_a_finished_run_is_checked(name, model, began):
    run = Path(f"done-{model}")
    command = [name, str(run)]
    if name == "predict":
        command += [str(began / MODELS[model]), "--out", "predicted"]
        command += ["--max-new-tokens", "1"] if model == "llama" else []
    checked = set(json.loads((run / "result.json").read_text())["checksums"])
    own = {file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()}
    assert own - checked == {"config.toml", "pretrained.json", "result.json"}
    for file in sorted(checked - {"metrics.jsonl"}):
        last = ["--weights", "last"] if file.startswith("last/") else []
        with changed(run / file):
            result = razorctl(*command, *last)
        assert (result.exit_code, str(run / file) in result.stderr) == (5, True), result.stderr
    for file in sorted(checked - {"metrics.jsonl", "split.json"}):
        last = ["--weights", "last"] if file.startswith("last/") else []
        (run / file).rename("away")
        result = razorctl(*command, *last)
        Path("away").rename(run / file)
        assert (result.exit_code, str(run / file) in result.stderr) == (6, True), result.stderr
    (run / "added_tokens.json").write_text("{}")
    result = razorctl(*command)
    assert (result.exit_code, "added_tokens.json is not a file of this" in result.stderr) == (
        5,
        True,
    )
    assert not Path("predicted").exists()
    (run / "added_tokens.json").unlink()


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_result_that_was_edited_is_refused(name):
    file = Path("done-segformer/result.json")
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"classes": document["classes"][::-1]}))
    result = razorctl(
        name, "done-segformer", *(["x.png", "--out", "m"] if name == "predict" else [])
    )
    assert (result.exit_code, "it was edited after" in result.stderr) == (5, True), result.stderr
