"""Documents that razorctl reads back, after somebody or a bad disk has changed them."""

import io
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from razorctl import models
from razorctl.cli import resuming
from razorctl.cli.settings import Settings, settings_of_file
from razorctl.cli.views import common
from razorctl.cli.views import finetune as view
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.data.own.labels import class_names_in
from razorctl.errors import DataError, RazorError, UsageError
from razorctl.memory import trace_cache
from razorctl.ops.triton import tuning
from razorctl.planning import gpus
from razorctl.planning.plan import plan
from razorctl.planning.plan import read as read_plan
from razorctl.system import documents
from razorctl.training import checkpoints, run_files, trackers
from razorctl.training.checkpoints import MARKER, Checkpoints
from razorctl.training.comparing import comparison, finished_run
from razorctl.training.predicting import inference
from razorctl.training.run import finetune
from razorctl.training.schemas import RunResult
from tests.comparing import write as write_run

EDITS = 500
STEP = f"checkpoints/step-00000002/{MARKER}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with all documents that there are, a comparison, and caches."""
    from tests.models import registered

    top = tmp_path_factory.mktemp("whole")
    job = Job("vit-micro", "digits", batch_size=8, steps=2, save_every=1, keep_checkpoints=True)
    with registered(shallow=True):
        cache = trace_cache.Cache(top)
        planned = plan(
            Job("vit-micro", "digits", batch_size=64), gpus.load("t4"), Recipe("full"), cache=cache
        ).document()
        list(finetune(job, Recipe("full"), out=top / "run", device="cpu", plan=planned))
    (top / "plan.json").write_text(documents.text(planned))
    (top / "run/trackers.json").write_text('{"names": ["tensorboard"], "id": "abc"}')
    (top / "kernels.json").write_text('{"card": {"op 1": "way"}}')
    grid = top / "grid"
    write_run(str(grid / "full-0"))
    (grid / "razor-0").mkdir()
    (grid / "razor-0/failure.json").write_text('{"error": "no room.", "exit_code": 4}')
    (grid / "comparison.toml").write_text(
        "[job]\nmodel = 'vit-micro'\ndataset = 'digits'\n[recipe]\nratio = 0.9\n"
        "[runs]\nmethods = ['full', 'razor']\nseeds = [0]\n"
    )
    return top


def traces(top: Path) -> None:
    for fact in trace_cache.Cache(top).facts.values():
        if isinstance(fact, dict) and "refused" not in fact:
            trace_cache.load(fact)


def choices(_: Path) -> None:
    for ways in tuning._stored().values():
        assert all(isinstance(way, str) for way in ways.values())


# Document -> what reads it again, given the folder of `whole`.
READ: dict[str, tuple[Callable[[Path], Any], ...]] = {
    "run/result.json": (
        lambda top: view.show(resuming.finished_result(top / "run")),
        lambda top: inference.load(top / "run", device="cpu"),
        lambda top: finished_run.read_run(top / "run").best,
    ),
    "run/plan.json": (lambda top: resuming.resolve_by_run(top / "run", Settings({}), None),),
    "plan.json": (lambda top: read_plan(top / "plan.json"),),
    f"run/{STEP}": (
        lambda top: Checkpoints(top / "run"),
        lambda top: checkpoints.left(top / "run"),
        lambda top: (checkpoints.newest_marker(top / "run") or {"diverged": 0})["diverged"],
    ),
    "run/checkpoints/step-00000002/state.json": (lambda top: Checkpoints(top / "run"),),
    "run/config.toml": (
        lambda top: resuming.resolve_by_run(top / "run", Settings({}), None),
        lambda top: finished_run.read_run(top / "run"),
    ),
    "run/metrics.jsonl": (lambda top: finished_run.read_run(top / "run").time_to(0.5),),
    "run/trackers.json": (lambda top: trackers.check_trackers((), top / "run"),),
    "grid/razor-0/failure.json": (lambda top: comparison.of_grid(top / "grid"),),
    "grid/comparison.toml": (
        lambda top: comparison.of_grid(top / "grid"),
        lambda top: comparison.repeating(top / "grid"),
    ),
    "traces": (traces,),
    "kernels.json": (choices,),
}


VALUES = (
    *(None, True, 0, -1, 1, 2, 0.5, 1e308, 10**18, "", "x", "NaN", "../../etc/passwd", "/dev/zero"),
    *([], {}, [[]], [None], {"a": {}}, [[[[1]]]], {"": 0}, "\ud800", "\x1b[31m", "9" * 400),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of a JSON value are."""
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [at, *(place for key in keys for place in places(value[key], (*at, key)))]


def same(one: bytes, other: bytes) -> bool:
    """Whether two documents say the same."""
    try:
        first, second = (json.dumps(json.loads(each), sort_keys=True) for each in (one, other))
        return first == second
    except (ValueError, RecursionError):
        return False


def edited(content: bytes, draw: random.Random) -> bytes:
    """A document that is changed somewhere."""
    how = draw.choice(
        ("flip", "flip", "cut", "value", "value", "delete", "rename", "number", "nest")
    )
    data = bytearray(content)
    if how == "flip":
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if how == "cut":
        return bytes(data[: draw.randrange(len(data))])
    if how == "nest":
        return b"[" * 20_000 if draw.random() < 0.2 else b'{"a":' * 300 + content + b"}" * 300
    try:
        value = json.loads(content)
    except ValueError:  # TOML, or lines
        more = b"[job]\n", b"[x", b"\xff", b"{}\n", b"NaN", b"seed = 3\n", b"[recipe]\nratio = []\n"
        if draw.random() < 0.5:
            return draw.choice((b"environment = 3\n", b"job = 'x'\n", b"x = 1\n")) + bytes(data)
        return bytes(data) + b"\n" + draw.choice(more)
    *outer, last = draw.choice([place for place in places(value) if place] or [(None,)])
    if last is None:
        return b"null"
    holder = value
    for key in outer:
        holder = holder[key]
    if how == "delete":
        del holder[last]
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{last}s"] = holder.pop(last)
    elif how == "number":
        holder[last] = draw.choice((math.nan, -math.inf, 10**30, 2**63, -1e300, 10**500))
    else:
        holder[last] = draw.choice(VALUES)
    return json.dumps(value).encode()


@pytest.mark.usefixtures("shallow")
def test_edited_documents_end_in_our_own_errors(whole, tmp_path, monkeypatch, caplog):
    """Of any of the files that a marker names, and of all documents; none that differs is taken."""
    monkeypatch.setattr(common.out, "_file", io.StringIO())
    top = shutil.copytree(whole, tmp_path / "top")
    monkeypatch.setattr(tuning, "_file", lambda: top / "kernels.json")
    files = {name: top / name for name in READ} | {"traces": trace_cache.Cache(top).file}
    contents = {name: file.read_bytes() for name, file in files.items()}
    for uses in READ.values():
        for use in uses:
            use(top)
    draw = random.Random(0)
    for number in range(EDITS):
        name = [*READ][number % len(READ)]
        changed = edited(contents[name], draw)
        if not (top / f"run/{STEP}").exists():  # an edit said that checkpoints are not kept
            shutil.copytree(whole, top, dirs_exist_ok=True)
        files[name].write_bytes(changed)
        for use in READ[name]:
            try:
                use(top)
            except RazorError:
                continue
            except Exception as error:
                raise AssertionError(f"edit {number} of {name}: {changed[:2000]!r}") from error
        if MARKER in name:
            steps = [checkpoint.step for checkpoint in Checkpoints(top / "run").valid]
            assert steps == [2] * same(changed, contents[name]), changed
        files[name].write_bytes(contents[name])


# What a marker says, whose digest is right -> what is wrong with it.
MARKERS = {
    "a device": ({"files": {"/dev/zero": {"bytes": 1, "crc32": 1}}}, "'/dev/zero' is not the name"),
    "above": ({"files": {"../state.json": {"bytes": 1, "crc32": 1}}}, "is not the name of a file"),
    "the folder": ({"files": {"..": {"bytes": 1, "crc32": 1}}}, "is not the name of a file"),
    "a size": ({"files": {"state.json": {"bytes": "1", "crc32": 1}}}, "files.state.json.bytes: "),
    "a step": ({"step": "2"}, "step: Input should be a valid integer"),
    "a key": ({"note": 1}, "note: Unexpected keyword argument"),
    "steps": ({"settings": {"steps": None}}, "settings.steps: it is not a number"),
}


@pytest.mark.parametrize("case", MARKERS)
def test_a_marker_of_another_kind_is_named(case, whole, tmp_path, caplog):
    change, said = MARKERS[case]
    shutil.copytree(whole / "run", tmp_path / "run")
    file = tmp_path / "run" / STEP
    file.write_text(json.dumps(documents.sealed(json.loads(file.read_text()) | change)))
    assert Checkpoints(tmp_path / "run").valid == []
    assert f"is incomplete or damaged ({MARKER}: " in caplog.text
    assert said in caplog.text


def test_what_would_never_end_is_not_read(whole, tmp_path, caplog):
    shutil.copytree(whole / "run", tmp_path / "run")
    place = tmp_path / "run" / STEP
    for name in ("state.json", MARKER):
        (place.parent / name).unlink()
        os.mkfifo(place.parent / name)
        assert Checkpoints(tmp_path / "run").valid == []
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "run/result.json").symlink_to("/dev/zero")
    with pytest.raises(
        DataError, match=r"result\.json cannot be read \(it is not a regular file\)"
    ):
        run_files.finished_run(tmp_path / "run")


# Part of result.json that is changed -> the field that is named.
RESULTS = {
    "job.batch_size": "job.batch_size: Input should be a valid integer",
    "recipe.method": "recipe.method: Input should be a valid string",
}


@pytest.mark.parametrize("field", RESULTS)
def test_an_edited_result_is_refused_by_its_field(field, whole, tmp_path):
    shutil.copytree(whole / "run", tmp_path / "run")
    result = json.loads((tmp_path / "run/result.json").read_text())
    *outer, last = field.split(".")
    holder = result
    for key in outer:
        holder = holder[key]
    holder[last] = {"of": "another kind"}
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    with pytest.raises(DataError) as caught:
        run_files.finished_run(tmp_path / "run")
    assert caught.value.exit_code == 5
    assert RESULTS[field] in str(caught.value)


def test_an_edited_plan_is_refused_by_its_field(whole, tmp_path):
    known = json.loads((whole / "plan.json").read_text())
    edits = {
        "job.batch_size: Input": known | {"job": known["job"] | {"batch_size": "64"}},
        "chosen.recipe: ": known | {"chosen": known["chosen"] | {"recipe": {"method": "razr"}}},
        "budget_bytes: Field required": {k: v for k, v in known.items() if k != "budget_bytes"},
        "it was edited after": known | {"budget_bytes": 1},
    }
    for said, document in edits.items():
        (tmp_path / "plan.json").write_text(json.dumps(document))
        with pytest.raises(UsageError, match=said):
            read_plan(tmp_path / "plan.json")


def test_json_has_no_number_that_is_not_finite():
    value = {"a": [math.nan, (math.inf, 1.5)], "b": {"c": -math.inf}}
    assert documents.text(value) == '{"a": [null, [null, 1.5]], "b": {"c": null}}'
    for text in (
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        "1e999",
        "9" * 30,
        "9" * 5000,
        "[" * 9999,
    ):
        with pytest.raises(documents.UnlikeError):
            documents.parse(text)
    assert documents.parse(str(2**63 - 1)) == 2**63 - 1
    assert documents.parse("1.2345678901234567890e-200") == 1.2345678901234567890e-200


# What reads a file that a user or another library may have written -> the name of the file.
READERS = {
    "settings": (settings_of_file, "razorctl.toml"),
    "recipe": (settings_of_file, "mine.toml"),
    "settings of a run": (read_toml, "config.toml"),
    "card": (gpus.read_preset, "card.toml"),
    "plan": (read_plan, "plan.json"),
    "model": (lambda file: models.named(f"./{file.parent}"), "config.json"),
    "classes": (lambda file: class_names_in(file.parent), "classes.txt"),
    "numbered classes": (lambda file: class_names_in(file.parent), "id2label.json"),
    "result": (lambda file: run_files.read_document(file, RunResult), "result.json"),
}
DEEP = {".toml": "a = " + "[" * 9999 + "]" * 9999, ".json": "[" * 99999 + "]" * 99999}
HUGE = 1 << 31


@pytest.mark.parametrize("what", ["fifo", "device", "huge", "deep", "folder"])
@pytest.mark.parametrize("reader", READERS)
def test_every_document_goes_through_one_door(reader, what, monkeypatch, tmp_path):
    read, name = READERS[reader]
    monkeypatch.chdir(tmp_path)
    file = Path("folder", name)
    file.parent.mkdir()
    if what == "fifo":
        os.mkfifo(file)
    elif what == "device":
        file.symlink_to("/dev/zero")
    elif what == "folder":
        file.mkdir()
    else:
        file.write_text(DEEP.get(file.suffix, "\0" * 99) if what == "deep" else "")
        os.truncate(file, HUGE if what == "huge" else file.stat().st_size)
    with pytest.raises((UsageError, DataError), match=re.escape(str(file))) as refused:
        read(file)
    assert refused.value.exit_code in (2, 5)
    assert "\n" not in str(refused.value)
