"""The commands `evaluate` and `predict`."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from razorctl import predict as razorctl_predict
from tests import local_hub
from tests.cli.commands import assert_ends_with_an_error, razorctl
from tests.models import registered
from tests.own import CLASSES, photos, picture, table
from tests.training.runs import edit_result

QUICK = ["--device", "cpu", "--batch-size", "4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shallow):
    """A folder with a run on images, a run on texts, and their data."""
    top = tmp_path_factory.mktemp("trained")
    words = ("a cat", "dog sat", "cat sat a dog")
    rows = [f"{words[i % 3]} {words[i % 2]},{('pos', 'neg')[i % 2]}" for i in range(24)]
    with pytest.MonkeyPatch.context() as patch, registered(*local_hub.ENTRIES.values()):
        patch.setattr(constants, "HF_HUB_CACHE", str(top / "hub"))
        patch.chdir(top)
        local_hub.cache_model(top / "hub", "bert-base")
        photos(Path("d"), 6)
        table(Path("texts.csv"), rows)
        more = [*QUICK, "--steps", "2", "--validation", "0.5"]
        for model, data in (("vit-micro", "d"), ("bert-base", "texts.csv")):
            done = razorctl("finetune", model, data, *more, "--out", f"run-{Path(data).stem}")
            assert done.exit_code == 0, done.stderr
        shutil.rmtree(top / "hub")
        yield top


@pytest.fixture
def here(trained, tmp_path):
    """Copies the runs and the data into the current directory."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_evaluate_says_what_the_run_said(here):
    result = razorctl("evaluate", "run-d", "--weights", "last", "--json", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    known = json.loads(Path("run-d/result.json").read_text())
    assert document["metrics"] == pytest.approx(known["metrics"], abs=1e-6)
    assert document["split"] == "validation"
    assert document["rows"] == len(json.loads(Path("run-d/split.json").read_text())["rows"])
    shown = razorctl("evaluate", "run-d", "d/../d", "--device", "cpu")
    assert "vit-micro on d/../d: 18 rows" in shown.stdout
    assert "balanced accuracy" in shown.stdout
    assert "weights: run-d/" in shown.stdout


def test_data_of_training_are_noted_and_bad_rows_left_out(here, trained):
    result = razorctl("evaluate", "run-d", str(trained / "d"), "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert f"run-d was trained on {trained / 'd'}; leave it out" in result.stderr
    Path("d/car/0.jpg").write_bytes(b"")
    result = razorctl("evaluate", "run-d", "d", "--device", "cpu", "--skip-bad", "--json")
    assert result.exit_code == 0, result.stderr
    assert "was trained on" not in result.stderr
    assert "note: 1 bad row is left out:\n  car/0.jpg (zero bytes)" in result.stderr
    document = json.loads(result.stdout)
    assert (document["rows"], document["skipped"], document["split"]) == (17, 1, None)


def test_settings_of_a_project_are_not_of_an_evaluation(here):
    Path("razorctl.toml").write_text('[job]\nsplit = "train,test"\nbatch_size = 3\n')
    assert razorctl("evaluate", "run-d", "d", "--device", "cpu").exit_code == 0
    named = razorctl("--config", "razorctl.toml", "evaluate", "run-d", "d", "--device", "cpu")
    assert named.exit_code == 2


def test_data_with_the_columns_of_training_are_read_by_them(here):
    columns = {"text_column": "said", "label_column": "kind"}
    edit_result(Path("run-texts"), lambda result: result["job"].update(columns))
    table(Path("a.csv"), ["a cat,a dog,pos", "cat sat,a sat,neg"], "said,more,kind")
    for name, count in (("a.csv", 2), ("texts.csv", 24)):
        found = razorctl("evaluate", "run-texts", name, "--device", "cpu", "--json")
        assert found.exit_code == 0, found.stderr
        assert json.loads(found.stdout)["rows"] == count


def test_predictions_of_a_folder(here):
    result = razorctl("predict", "run-d", "d", *QUICK, "--probabilities", "--top", "2")
    assert result.exit_code == 0, result.stderr
    found = rows(result.stdout)
    head = "file row label probability label_2 probability_2 p_bus p_car p_tram"
    assert [*found[0]] == head.split()
    assert [row["file"] for row in found] == [f"d/{c}/{i}.jpg" for c in CLASSES for i in range(6)]
    for row in found:
        values = {name: float(row[f"p_{name}"]) for name in CLASSES}
        assert sum(values.values()) == pytest.approx(1, abs=1e-4)
        best, second, _ = sorted(values, key=lambda name: -values[name])
        assert (row["label"], row["label_2"], row["row"]) == (best, second, "")
        assert row["probability"] == row[f"p_{best}"]


def test_one_document_has_the_same(here):
    flags = ["--probabilities", "--top", "9", *QUICK]
    plain = rows(razorctl("predict", "run-d", "d", *flags).stdout)
    result = razorctl("predict", "run-d", "d", *flags, "--json", "--out", "p.json")
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    document = json.loads(Path("p.json").read_text())
    keys = ["run_dir", "model", "weights", "classes", "skipped", "predictions"]
    assert [*document] == keys
    assert document["classes"] == [*CLASSES]
    assert document["run_dir"] == "run-d"
    assert len(document["predictions"]) == len(plain)
    for row, line in zip(document["predictions"], plain, strict=True):
        assert (row["file"], row["label"], row["row"]) == (line["file"], line["label"], None)
        assert [entry["label"] for entry in row["top"]] == [
            line["label"],
            line["label_2"],
            line["label_3"],
        ]
        assert row["probabilities"]["car"] == pytest.approx(float(line["p_car"]), abs=1e-5)


def test_texts_from_a_table_a_file_and_stdin(here):
    """The run has the names of its classes: the cache of the hub is gone."""
    table(Path("new.tsv"), ["1\ta cat", "2\tdog sat"], "number\ttext")
    Path("lines.txt").write_text("a cat\ndog sat\n")
    from typer.testing import CliRunner

    from razorctl.cli.app import app

    words = ["predict", "run-texts", "new.tsv", "-", "lines.txt", *QUICK]
    result = CliRunner().invoke(app, words, input="a cat\ndog sat\n")
    assert result.exit_code == 0, result.stderr
    found = rows(result.stdout)
    places = [(file, str(row)) for file in ("new.tsv", "-", "lines.txt") for row in range(2)]
    assert [(row["file"], row["row"]) for row in found] == places
    assert {row["label"] for row in found} <= {"pos", "neg"}
    for row in range(2):
        assert len({found[row + 2 * part]["probability"] for part in range(3)}) == 1


def test_columns_of_tables_stay_beside_predictions(here):
    table(Path("a.csv"), ["7,a cat,pos,no", "8", "9,=dog,neg,"], "id,text,label,=more")
    later = [{"text": "a cat"}, {"text": "dog", "seen": [{"on": 1}], "ids": {"a": None}}]
    Path("b.jsonl").write_text("\n".join(map(json.dumps, later)))
    words = ["predict", "run-texts", "a.csv", "b.jsonl", "--keep-columns", "--skip-bad", *QUICK]
    result = razorctl(*words, "--spreadsheet")
    assert result.exit_code == 0, result.stderr
    header = "file,row,id,text,input_label,=more,seen,ids,label,probability"
    assert result.stdout.splitlines()[0] == header
    plain = rows(razorctl(*[word for word in words if word != "--keep-columns"]).stdout)
    found = rows(result.stdout)
    assert [{name: row[name] for name in plain[0]} for row in found] == plain
    assert [[row[name] for name in header.split(",")[1:8]] for row in found] == [
        ["0", "7", "a cat", "pos", "no", "", ""],
        ["2", "9", "'=dog", "neg", "", "", ""],
        ["0", "", "a cat", "", "", "", ""],
        ["1", "", "dog", "", "", '[{"on": 1}]', '{"a": null}'],
    ]
    document = json.loads(razorctl(*words, "--json").stdout)
    first = {"id": "7", "text": "a cat", "label": "pos", "=more": "no"}
    assert [row["columns"] for row in document["predictions"]][::3] == [first, later[1]]


def test_columns_of_parquet_have_the_names_of_images(here):
    image = {"bytes": Path("d/car/0.jpg").read_bytes(), "path": "car-0.jpg"}
    day, cost = date(2026, 1, 2), Decimal("1.50")
    columns = {"photo": [image, {**image, "path": None}], "day": [day, None], "cost": [cost, cost]}
    pq.write_table(pa.table({**columns, "tags": [[day], []]}), "a.parquet")
    found = razorctl_predict("run-d", "a.parquet", keep_columns=True, progress=False)
    assert [row["columns"] for row in found] == [
        {"photo": "car-0.jpg", "day": "2026-01-02", "cost": "1.50", "tags": ["2026-01-02"]},
        {"photo": None, "day": None, "cost": "1.50", "tags": []},
    ]
    alone = rows(razorctl("predict", "run-d", "d/car", "--keep-columns", *QUICK).stdout)
    assert [*alone[0]] == ["file", "row", "label", "probability"]


def edit(key: str) -> None:
    edit_result(Path("run-d"), lambda result: result.pop(key))


def truncate(file: str) -> None:
    content = Path(file).read_bytes()
    Path(file).write_bytes(content[: len(content) // 2])


def clear(*files: str) -> None:
    for file in files:
        Path(file).unlink()


def nested() -> None:
    shutil.copytree("run-d", "grid/razor-0")


OF_RUNS = {
    "no directory": (lambda: None, "nothing", 2, "nothing does not exist; name a directory"),
    "a file": (lambda: None, "texts.csv", 2, "texts.csv is not a directory; name a directory that"),
    "no run": (lambda: None, "d", 2, "d holds no run; name a directory that `razorctl finetune`"),
    "several runs": (nested, "grid", 2, "grid holds several runs; name one of them, such as grid/"),
    "an unfinished run": (
        lambda: clear("run-d/result.json"),
        *("run-d", 2, "not finished; continue with `razorctl finetune --resume --out run-d`"),
    ),
    "no JSON": (lambda: truncate("run-d/result.json"), "run-d", 5, "result.json is not as this"),
    "truncated weights": (
        lambda: truncate("run-d/model.safetensors"),
        *("run-d", 5, "run-d/model.safetensors cannot be read ("),
    ),
}


@pytest.mark.parametrize("case", OF_RUNS)
@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_run_that_cannot_be_used(command, case, here):
    edit, run, code, sentence = OF_RUNS[case]
    edit()
    more = ["d/car/0.jpg"] if command == "predict" else []
    result = razorctl(command, run, *more, "--weights", "last", "--device", "cpu")
    assert result.exit_code == code, result.output
    assert_ends_with_an_error(result, sentence)
    assert result.stdout == ""


def others(text: str) -> None:
    photos(Path("e"), 2, ["car", "van", "truck"])
    table(Path("e.csv"), [text], "text,label")


BAD = {
    "evaluate run-d e": (5, "not classes of the run: 'truck', 'van'; its classes are 'bus', 'car'"),
    "evaluate run-d e.csv": (2, "vit-micro takes images, and e.csv has texts; name other data"),
    "evaluate run-texts d": (2, "bert-base takes texts, and d has images; name other data"),
    "evaluate run-d --label-column x": (2, "--label-column is for reading DATASET; name DATASET"),
    "evaluate run-d --split dev": (2, "d has no split dev, only train, validation; name one"),
    "evaluate run-d e.csv --split dev": (2, "e.csv has no splits to choose from; leave --split"),
    "evaluate run-d --weights good": (2, "unknown weights 'good'; choose one of best, last"),
    "predict run-d x.jpg y.jpg": (2, "x.jpg, y.jpg do not exist; name files that do"),
    "predict run-d bad.jpg d": (5, "1 bad row: bad.jpg (no image of a known format"),
    "predict run-d empty": (5, "empty has no images; name another folder"),
    "predict run-d texts.csv": (2, "none of the columns of texts.csv clearly holds images: text"),
    "predict run-d d --text-column a": (2, "vit-micro takes images; leave --text-column out"),
    "predict run-d - -": (2, "- is stdin, which can be read only once"),
    "predict run-texts d/car/0.jpg": (2, "0.jpg is an image, and the model takes texts"),
    "predict run-texts d": (2, "d is not a text file; give CSV, TSV, JSONL, JSON, CONLL"),
    "predict run-texts twice.csv --keep-columns": (2, "two columns would be called input_label"),
    "predict run-texts latin.txt": (5, "latin.txt is not UTF-8; save it as UTF-8"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_and_the_exit_code(words, here):
    others("a cat,pos")
    table(Path("twice.csv"), ["a cat,pos,neg"], "text,label,input_label")
    Path("empty").mkdir()
    Path("bad.jpg").write_text("hello")
    Path("latin.txt").write_bytes("é".encode("latin1"))
    code, sentence = BAD[words]
    result = razorctl(*words.split())
    assert result.exit_code == code, result.output
    assert sentence in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_bad_files_are_left_out_with_a_note(here):
    Path("bad.jpg").write_text("hello")
    picture(Path("good.png"), mode="RGBA")
    result = razorctl("predict", "run-d", "bad.jpg", "good.png", *QUICK, "--skip-bad", "--json")
    assert result.exit_code == 0, result.stderr
    assert "bad.jpg (no image of a known format: save it as PNG)" in result.stderr
    document = json.loads(result.stdout)
    assert [row["file"] for row in document["predictions"]] == ["good.png"]
    assert document["skipped"] == ["bad.jpg (no image of a known format: save it as PNG)"]


def test_help_and_usage_errors_load_no_torch(here):
    code = (
        "import sys; from razorctl.cli.app import app\n"
        "for words in ('predict --help', 'evaluate --help', 'predict none x', 'predict run-d none',"
        " 'evaluate none', 'predict run-texts d', 'finetune vit-micro d --batch-size 99',"
        " 'plan bert-base texts.csv --gpu t5'):\n"
        "    try: app(words.split())\n"
        "    except SystemExit: pass\n"
        "    assert not {'torch', 'timm', 'transformers'} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SPEAK = (
    *("doctor", "list models", "evaluate run-d", "predict run-d d", "predict run-texts texts.csv"),
    *("plan --gpu t4", "plan vit-micro d --gpu t4", "profile vit-micro"),
    *("finetune vit-micro digits --out new", "finetune vit-micro d --gpu t4"),
    "finetune --resume --out run-d",
    # Whose names only timm knows.
    *("list defaults resnet18", "plan resnet18 --gpu t4", "plan resnet18 cifar10 --gpu t4"),
    *("profile resnet18", "finetune timm:resnet18 digits --out new", "compare resnet18 digits"),
)  # compare loads torch in other processes


def test_every_command_speaks_before_torch_is_loaded(here):
    code = (
        "import contextlib, io, sys; from razorctl.cli.app import app\n"
        "class Loads:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'timm', 'transformers'): raise SystemExit(77)\n"
        "sys.meta_path.insert(0, Loads())\n"
        f"for words in {SPEAK!r}:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):\n"
        "        try: app(words.split())\n"
        "        except SystemExit as stop: code = stop.code\n"
        "    loads = words != 'list models' and '--resume' not in words\n"
        "    assert code == 77 * loads, (words, code, said.getvalue())\n"
        "    assert said.getvalue().strip(), words"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(here / "empty"), "CC": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
