"""The command `plan`."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from razorctl.cli.app import app
from razorctl.cli.views import plan as view
from razorctl.cli.views.html import record
from razorctl.planning import detect
from razorctl.planning import plan as planner
from razorctl.planning.detect import Detected, Process
from tests.cli.commands import PLANNED, razorctl

FEW = ["vit-micro", "digits", "--batch-size", "1", "--max-ratio", "0.5"]


def test_the_table_marks_the_choice_and_ends_with_the_command():
    result = razorctl("plan", *PLANNED, "--gpu", "rtx-2080-ti")
    assert result.exit_code == 0, result.stderr
    assert "NVIDIA GeForce RTX 2080 Ti, 11.0 GiB" in " ".join(result.stdout.split())
    assert "> full " in result.stdout
    # A range, since no card has run razor; full's rows rest on measurements, but for the host.
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("   razor 0.5 ≈"))
    assert len(re.findall(r" [0-9.]+-[0-9.]+ m?s", row)) == 2  # of a step and of the run
    assert "All figures are predicted. " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("razorctl finetune vit-micro digits ")
    assert "--precision fp16" in result.stdout.splitlines()[-1]
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[:-1])


def test_long_times_leave_the_labels_whole():
    """Ranges of hours take two lines."""
    predicted = dict.fromkeys(
        ("weights_bytes", "gradients_bytes", "optimizer_bytes", "transient_bytes"), 2**30
    )
    predicted |= {"peak_bytes": 8 * 2**30, "reserve_bytes": 2**30}
    predicted |= {"step_seconds_low": 0.197, "step_seconds_high": 0.209}
    ways = [
        {"label": label, "state": state, "exact": True, "fits": fits, "predicted": predicted}
        for label, state, fits in (
            ("checkpoint", "", True),
            ("full, 8 micro-batches", "", True),
            ("full, state on the host", "state on the host", True),
            ("full, adamw8bit", "adamw8bit", False),
        )
    ]
    job = {"model": "vit-b16", "dataset": "d", "batch_size": 128, "precision": "bf16"}
    job |= {"optimizer": "sgd", "steps": 20_000, "epochs": None, "processes": 1}
    gpu = {"name": "a card", "achieved": {"borrowed": None}}
    document = {"job": job, "gpu": gpu, "budget_bytes": 24 * 2**30, "candidates": ways}
    document["chosen"] = ways[0]
    shown = record(lambda: view.show_ways(document), width=80).text
    assert "> checkpoint " in shown
    assert re.search(r"  full, 8 .*\n micro-batches ", shown)  # broken between words alone
    assert re.search(r" 1 h 6 min\n +to 1 h 10 min\n", shown)
    assert re.search(r"\nWith state on the host: *\n(.*\n){3} +full +3\.00 ", shown)
    assert "adamw8bit" not in shown  # nothing fits with it
    narrow = record(lambda: view.show_ways(document), width=50).text
    assert re.search(r"  full, 8 +9\.00 +197-209 ms +1 h 6 min\n", narrow)
    assert "stored:" not in narrow


def test_explain_says_what_was_tried():
    result = razorctl("plan", *PLANNED, "--gpu", "t4", "--vram", "768MB", "--explain")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if re.match(r"\d+\. ", line)]
    assert lines[0].startswith("1. full: needs ")
    assert any("too slow" in line for line in lines)
    assert lines[-1].endswith(": chosen.")


def test_a_flag_says_no_to_what_the_environment_or_a_file_compiles(tmp_path, monkeypatch):
    def compiles(*flags: str) -> bool:
        document = json.loads(razorctl("plan", *PLANNED, "--gpu", "t4", "--json", *flags).stdout)
        assert (" --compile" in document["command"]) == document["job"]["compile"]
        return document["job"]["compile"]

    assert (compiles(), compiles("--compile")) == (False, True)
    (tmp_path / "razorctl.toml").write_text("[job]\ncompile = true\n")
    assert (compiles(), compiles("--no-compile")) == (True, False)
    monkeypatch.setenv("RAZORCTL_COMPILE", "0")
    assert (compiles(), compiles("--compile")) == (False, True)


def test_what_does_not_fit():
    words = ("plan", *FEW, "--gpu", "t4", "--vram", "640MB")
    result, shown = razorctl(*words, "--json"), razorctl(*words)
    assert (result.exit_code, shown.exit_code) == (3, 3)
    document = json.loads(result.stdout)
    assert document["fits"] is False
    assert document["needed_bytes"] > document["budget_bytes"] == 640 * 2**20
    assert "does not fit in 640 MiB; it needs at least " in result.stderr
    assert all(f"  {way}" in shown.stdout for way in ("full", "checkpoint", "razor 0.5", "lora"))
    assert ">" not in shown.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        *((["--vram", size], f"{size!r} is not a size") for size in ("11XB", "0GB", "-3GB", "inf")),
        (["--gpu", "rtx-4091"], "did you mean 'rtx-4090'?"),
        (["--gpu", "t4", "--vram", "17GB"], "has 15.0 GiB; ask for no more than that."),
        ([], "no GPU was found; name one with --gpu, or its memory with --vram."),
        (["--gpu", "t4", "--prefer", "quick"], "unknown preference 'quick'"),
        (["--gpu", "t4", "--precision", "bf16"], "needs compute capability 8.0"),
    ],
)
def test_bad_input_is_one_sentence(args, message, monkeypatch):
    monkeypatch.setattr(detect, "cards", lambda: ())
    result = razorctl("plan", *PLANNED, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    *said, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert all(line.startswith("planning for ") for line in said)
    assert result.stdout == ""


def test_the_card_of_this_machine(monkeypatch):
    others = Process(1, 2**30), Process(2, None)
    card = Detected("NVIDIA GeForce RTX 4090", 24564 * 2**20, 5 * 2**30, "8.9", others)
    monkeypatch.setattr(detect, "cards", lambda: (card,))
    result = razorctl("plan", *PLANNED, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert document["budget_bytes"] == 5 * 2**30
    assert detect.target()[2] == "free now, beside 2 other processes"
    assert detect.target(vram="8GB")[1:] == (8 * 2**30, "as asked for", False)
    monkeypatch.setattr(detect, "cards", lambda: (replace(card, name="Some Card"),))
    assert "Some Card has no preset; name one with --gpu" in razorctl("plan", *PLANNED).stderr


def test_a_card_whose_rates_were_not_measured_says_whose_stand_in():
    words = " ".join(razorctl("plan", *PLANNED, "--gpu", "rtx-3060").stdout.split())
    assert "times with the measured efficiency of the NVIDIA GeForce RTX 3090" in words


def test_a_card_that_is_assumed_is_named():
    result = razorctl("plan", *PLANNED, "--vram", "11GB")
    assert "RTX 2080 Ti is assumed from --vram alone; name the card with --gpu." in result.stderr
    assert "assumed" not in razorctl("plan", *PLANNED, "--gpu", "t4", "--vram", "8GB").stderr


def test_what_goes_with_a_method_is_planned_and_ordered():
    flags = ("--ratio=0.5", "--lora", "--activation-checkpointing", "--compile")
    result = razorctl("plan", *PLANNED, "--gpu", "t4", *flags, "--activation-memory-budget", "0.1")
    assert result.exit_code == 0, result.stderr
    assert {*flags[1:], "--activation-memory-budget"} <= {*result.stdout.split()}
    assert "note: the effect of the activation memory budget is not predicted." in result.stderr


def test_a_text_model_is_planned_for_texts(monkeypatch):
    monkeypatch.setattr(planner, "plan", lambda job, *_, **__: pytest.fail(job.dataset))
    with pytest.raises(pytest.fail.Exception, match="rte"):
        CliRunner().invoke(app, ["plan", "bert-base", "--gpu", "t4"], catch_exceptions=False)


def test_graphs_and_compiled_steps_that_may_not_pay_are_named():
    predicted = {"peak_bytes": 100 * 2**20, "reserve_bytes": 2**20}
    chosen = {"predicted": predicted, "joint_budget": 1.0, "method": "razor", "recipe": {}}

    def said(room: int, method: str = "razor", **settings: object) -> list[str]:
        job = {"model": "vit-b16", "dataset": "d", "compile": False, **settings}
        plan = {"chosen": {**chosen, "recipe": {"method": method}}, "job": job, "candidates": []}
        plan["budget_bytes"] = (101 + room) * 2**20
        return [*view._compiled(plan), *view._graphs(plan)]

    assert said(18) == [
        "CUDA graphs may reserve 19 MiB more; if less is free, steps run without them."
    ]
    assert said(18, strict=True)[0].endswith("if less is free, the run ends.")
    assert said(19) == said(18, steps=19) == said(18, cuda_graphs=False) == []
    assert said(18, cuda_graphs=True, steps=19)
    (slow,) = said(0, compile=True)
    assert slow.startswith(
        "Compiled, a step of razor is predicted to take 1.1 to 1.3 times as long"
    )
    assert not said(0, "full", compile=True)


def test_what_a_cosine_means_and_when_checkpointing_is_better():
    def way(method: str, peak: int, fits: bool = True, state: str = "", **more: object) -> dict:
        names = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
        predicted = {**dict.fromkeys(names, 3 * 2**30), "peak_bytes": peak * 2**30}
        predicted |= {"reserve_bytes": 0}
        more = {"exact": method != "razor", "cosine": None, **more}
        return {"method": method, "label": method, "fits": fits, "state": state, **more} | {
            "predicted": predicted
        }

    def said(chosen: dict, *others: dict) -> str:
        plan = {"chosen": chosen, "candidates": [chosen, *others]}
        return " ".join([*view._closeness(plan), *view._checkpoint(plan)])

    razor = way("razor", 11, cosine=0.998)
    closeness = said(razor, way("checkpoint", 13))  # more than a tenth more memory
    assert closeness.startswith("A cosine of 1 is exact; ")
    assert closeness.endswith("an orthogonal error of up to 6.3 % of its length.")
    assert said(razor, way("checkpoint", 12)) == (
        f"{closeness} checkpoint is exact and needs 12.0 GiB; 75 % of that are weights, gradients "
        "and optimizer state, which razor does not shrink."
    )
    for other in (way("checkpoint", 12, fits=False), way("checkpoint", 12, state="bf16 weights")):
        assert said(razor, other) == closeness
    large = way("razor", 19, cosine=0.998)
    assert "checkpoint" not in said(large, way("checkpoint", 19))  # state takes less than half
    assert said(way("full", 12), way("checkpoint", 11)) == ""
    assert said(way("razor", 11), way("full", 11)) == ""


def test_a_host_that_takes_longer_than_the_card_is_named():
    predicted = {"host_seconds": 0.054, "card_seconds": 0.04, "host_bytes": 0}
    predicted["peak_bytes"] = 100 * 2**20
    job = dict.fromkeys(("optimizer_in_backward", "cuda_graphs", "compile"), False)
    chosen = {"predicted": predicted, "recipe": {"joint_budget": 1.0}}
    plan = {"chosen": chosen, "job": {**job, "processes": 1, "optimizer_state": "card"}}
    assert [*view._host(plan)] == [
        "Python takes 54 ms to launch a step, and the GPU 40 ms to run it. --cuda-graphs launches "
        "all kernels at once, for up to 19 MiB more reserved memory."
    ]
    for setting in ({"cuda_graphs": True}, {"optimizer_state": "host"}):
        assert not [*view._host({**plan, "job": plan["job"] | setting})]
    plan["job"]["cuda_graphs"], predicted["card_seconds"] = False, 0.05
    assert not [*view._host(plan)]
    plan["job"]["optimizer_in_backward"], predicted["host_bytes"] = True, 2**34
    said = " ".join(view._host(plan))
    assert "not clipped" in said
    assert "The optimizer state takes 16.0 GiB of host memory." in said
