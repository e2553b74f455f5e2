"""The command `profile`."""

import io
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import Result

from razorctl.cli.views import common as views
from razorctl.cli.views import profile as profile_view
from razorctl.config.recipe import Recipe
from razorctl.methods import DEFAULT_METHOD
from tests.cli.commands import assert_ends_with_an_error, razorctl


def profile(*args: str) -> Result:
    return razorctl(
        "profile", "vit-micro", "--batch-size", "4", "--steps", "1", "--device", "cpu", *args
    )


@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_a_profile_fit(width, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(views, "out", Console(file=screen, width=width))
    result = profile("--ratio", "0.8")
    assert result.exit_code == 0, result.stderr
    table = screen.getvalue()
    assert f"vit-micro: {DEFAULT_METHOD}, ratio 0.8, batch 4, fp32, sgd, on cpu" in table
    kind = "  linear" if width > 60 else " +\\d"  # which is left out first
    assert re.search(rf"attn\.qkv +2 x{kind}", table)
    for row in ("linear", "head", "total", "sampling", "step"):
        assert row in table
    assert re.search(r"traced +\d", table)
    assert "measured" not in table  # by nothing on a CPU
    assert not re.search(r"\S…", table)  # names alone are cut, at their beginning
    assert max(map(len, table.splitlines())) <= width
    assert result.stderr == "profiling vit-micro ...\n"


def test_long_names_of_modules_keep_their_end(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(views, "out", Console(file=screen, width=80))
    names = [f"model.encoder.layer.{i}.attention.output.dense" for i in range(2)]
    names += [f"{letter}." for letter in "abcdefghijklmnop"] + [""]
    result = {
        "model": "odd",
        "dataset": None,
        "recipe": asdict(Recipe("full")),
        "batch_size": 1,
        "precision": "bf16",
        "optimizer": "sgd",
        "device": "a GPU",
        "kernels": "fused kernels",
        "steps": 5,
        "totals": {"saved_bytes": 0, "full_saved_bytes": 19},
        "by_kind": {"linear": 0},
        "by_kind_full": {"linear": 19},
        "rows": [
            {"module": name, "kind": "linear", "saved_bytes": 0, "full_saved_bytes": 1}
            for name in names
        ],
        "peak_bytes": {"traced": 2**20, "measured_allocated": 2**21, "measured_reserved": 2**30},
        "phases": dict.fromkeys(profile_view.PHASES, 0.1),
        "step_s": 0.5,
        "compiled": True,
        "cuda_graphs": False,
    }
    profile_view.show(result)
    table = screen.getvalue()
    assert re.search(r"….*\.output\.dense +2 x", table)
    assert "others" in table
    assert "sgd, compiled, on a GPU" in table
    assert "activations stored for backward, traced without compiling" in " ".join(table.split())
    assert re.search(r"traced without compiling +1\.0 MiB", table)
    assert re.search(r"sampling +.* in forward", table)
    assert re.search(r"measured, allocated +2\.0 MiB", table)
    assert re.search(r"measured, reserved +1\.0 GiB", table)
    assert table.count("20 %") == len(profile_view.PHASES)
    profile_view.show(result | {"compiled": False, "cuda_graphs": True})
    table = screen.getvalue().removeprefix(table)
    assert "sgd, CUDA graphs, on a GPU" in table
    assert re.search(r"backward +.* in forward", table)


def test_json_of_a_profile_is_one_document_and_nothing_else():
    result = profile("--json", "--method", "backrazor", "--trace", "trace.json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["recipe"]["method"] == "backrazor"
    assert document["totals"]["saved_bytes"] < document["totals"]["full_saved_bytes"]
    assert set(document["phases"]) == set(profile_view.PHASES)
    assert document["peak_bytes"]["measured_allocated"] is None
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert result.stderr == "profiling vit-micro ...\n"


def test_a_profile_takes_the_recipe_and_the_batch_of_a_run_but_not_its_steps():
    Path("run.toml").write_text(
        "[job]\nmodel = 'vit-micro'\nsteps = 1000\nbatch_size = 3\n"
        "[recipe]\nmethod = 'backrazor'\nmean_correction = true\n"
    )
    result = razorctl("--config", "run.toml", "profile", "--device", "cpu", "--json")
    document = json.loads(result.stdout)
    assert (document["batch_size"], document["steps"]) == (3, 5)
    assert document["recipe"]["method"] == "backrazor"
    assert document["recipe"]["mean_correction"] is True


def test_a_profile_of_a_data_set_has_its_batches():
    rows = ["label,text"] + [f"{'ab'[i % 2]},{'word ' * (i + 1)}" for i in range(40)]
    Path("rows.csv").write_text("\n".join(rows))
    result = profile("rows.csv", "--json")
    assert result.exit_code == 2
    assert "vit-micro takes images, and rows.csv has texts" in result.stderr
    result = profile("digits", "--method", "full", "--json")
    document = json.loads(result.stdout)
    assert document["dataset"] == "digits"
    assert document["phases"]["data_s"] > 0
    table = profile("digits", "--method", "full").stdout
    assert table.count("reading, transforming and moving rows") == 1
    none = profile("--label-column", "a")
    assert (none.exit_code, "--label-column is for reading a data" in none.stderr) == (2, True)


def test_equal_blocks_of_ones_own_are_one_row_and_layers_are_not():
    rows = [
        {"module": name, "type": "Linear", "saved_bytes": 1, "full_saved_bytes": 2}
        for name in ("0", "1.a.0", "1.a.2", "2.a.0", "2.a.2", "3")
    ]
    found = profile_view._largest(rows, "type")
    assert found == {
        ("0", "", "Linear"): (1, 2),
        ("3", "", "Linear"): (1, 2),
        ("*.a.0", "2 x", "Linear"): (2, 4),
        ("*.a.2", "2 x", "Linear"): (2, 4),
    }


def test_a_function_of_ones_own_is_refused():
    result = razorctl("profile", "mymodels:build", "--json")
    assert result.exit_code == 2
    assert_ends_with_an_error(result, "in Python, by razorctl.profile(model, inputs).")
