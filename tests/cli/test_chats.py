"""Instruction data through the commands: a dry run, a run that learns answers, and bad input."""

import json
import math
import random
from pathlib import Path
from shutil import copytree

import pytest
from transformers import OPTConfig, OPTForCausalLM

from razorctl.planning import cached_traces as traces
from razorctl.training.evaluation_rows import rows_of_run
from tests.cli.commands import done, razorctl
from tests.cli.kinds import WORDS

CPU = ("--input-size", "64", "--device", "cpu", "--method", "full")


def instructions(file, rows=48):
    """Answers that repeat the first word of an instruction, whose other words are noise."""
    draw = random.Random(0)
    made = []
    for _ in range(rows):
        words = draw.choices(WORDS[:8], k=draw.randint(2, 20))
        made.append({"instruction": " ".join(words), "input": "", "output": f"{words[0]} w39 w38"})
    Path(file).write_text(json.dumps(made))


def test_a_dry_run_shows_what_is_trained_and_writes_nothing(kinds):
    instructions("a.json")
    copytree(kinds / "llama", "plain")
    Path("plain/chat_template.jinja").unlink()
    for model, note in ((str(kinds / "llama"), False), ("plain", True)):
        before = sorted(Path().rglob("*"))
        result = razorctl("finetune", model, "a.json", *CPU, "--dry-run", "--json")
        assert result.exit_code == 0, result.stderr
        assert sorted(Path().rglob("*")) == before
        document = json.loads(result.stdout)
        assert document["dry_run"]
        assert document["saved_bytes"] == document["full_saved_bytes"] > 0
        parts = document["sample"]["parts"]
        (answer,) = [text for text, trained in parts if trained]
        assert answer.split()[1:] == ["w39", "w38", "</s>"]
        assert answer.split()[0] in "".join(text for text, trained in parts if not trained)
        assert "[[" in result.stderr
        assert "</s>]]" in result.stderr
        assert ("note: the tokenizer has no chat template" in result.stderr) == note
    refused = razorctl("finetune", "plain", "a.json", *CPU, "--dry-run", "--resume", "--out", "run")
    assert refused.exit_code == 2
    assert "leave --resume out" in refused.stderr


def test_answers_are_learned_in_plain_words(kinds):
    instructions("a.json", 96)
    copytree(kinds / "gpt2", "plain")
    Path("plain/chat_template.jinja").unlink()
    run = ("--batch-size", "8", "--epochs", "5", "--lr", "0.01", "--out", "run", "--json")
    result = razorctl("finetune", "plain", "a.json", *CPU, *run)
    assert result.exit_code == 0, result.stderr
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["metrics"]["perplexity"] < 0.1 * math.exp(steps[0]["loss"])
    assert "### Assistant:" in Path("run/chat_template.jinja").read_text()
    again = razorctl("evaluate", "run", "--device", "cpu", "--json", "--weights", "last")
    assert json.loads(again.stdout)["loss"] == pytest.approx(steps[-1]["metrics"]["loss"], rel=1e-4)
    Path("asked.json").write_text(json.dumps([{"instruction": "w1 w2 w3", "input": "w4"}] * 3))
    asked = razorctl(
        "predict", "run", "asked.json", "--device", "cpu", "--max-new-tokens", "4", "--json"
    )
    assert asked.exit_code == 0, asked.stderr
    assert all("w39 w38" in row["text"] for row in json.loads(asked.stdout)["predictions"])


def test_a_run_with_named_columns_reads_files_with_them_and_with_usual_names(kinds):
    instructions("a.json")
    rows = json.loads(Path("a.json").read_text())
    named = [{"frage": row["instruction"], "antwort": row["output"]} for row in rows]
    files = {
        "named.json": named,
        "prompts.json": [{"frage": row["frage"]} for row in named],
        "asked.json": [{"messages": [{"role": "user", "content": r["frage"]}]} for r in named],
        "others.json": [{"gefragt": row["frage"]} for row in named],
    }
    for file, content in files.items():
        Path(file).write_text(json.dumps(content[:4]))
    Path("train.json").write_text(json.dumps(named))
    few = ("--max-rows", "20", "--steps", "2", "--batch-size", "4", "--out", "run")
    columns = ("--text-column", "frage,antwort")
    run = done("finetune", str(kinds / "llama"), "train.json", *CPU, *columns, *few)
    assert (run["job"]["max_rows"], run["job"]["text_column"]) == (20, "frage,antwort")

    def answers(file, *words):
        words = (file, *words, "--device", "cpu", "--max-new-tokens", "3")
        return [row["text"] for row in done("predict", "run", *words)["predictions"]]

    expected = answers("asked.json")
    assert answers("named.json") == answers("prompts.json") == expected
    assert answers("others.json", "--text-column", "gefragt") == expected
    held_out = done("evaluate", "run", "--device", "cpu")
    assert held_out["loss"] == pytest.approx(run["loss"], abs=1e-6)
    losses = [done("evaluate", "run", file, "--device", "cpu") for file in ("train.json", "a.json")]
    assert losses[0]["loss"] == losses[1]["loss"]
    assert len(rows_of_run("run", "train").rows) == 20


@pytest.mark.parametrize("rows", ["0", "-2", "few"])
def test_a_limit_of_rows_is_a_positive_number(rows):
    Path("a.csv").write_text("text,label\n" + "one,a\ntwo,b\n" * 9)
    result = razorctl("finetune", "bert-base", "a.csv", *CPU, "--max-rows", rows)
    assert result.exit_code == 2
    assert "max" in result.stderr


def test_a_plan_counts_what_a_packed_run_keeps(kinds, monkeypatch):
    traced = []

    def cached_trace(job, *args, **options):
        traced.append(job)
        return traces.cached_trace(job, *args, **options)

    monkeypatch.setattr("razorctl.planning.search.cached_trace", cached_trace)
    instructions("a.json")
    sizes = ("--input-size", "64", "--batch-size", "4", "--precision", "fp32", "--no-cuda-graphs")
    for flags, packing in (((), True), (("--no-packing",), False)):
        settings = (str(kinds / "llama"), "a.json", *sizes, *flags, "--json")
        planned = razorctl(
            "plan", *settings, "--gpu", "t4", "--prefer", "exact", "--method", "full"
        )
        assert planned.exit_code == 0, planned.stderr
        plan = json.loads(planned.stdout)
        run = json.loads(
            razorctl(
                "finetune", *settings, "--device", "cpu", "--method", "full", "--dry-run"
            ).stdout
        )
        assert plan["job"]["packing"] is run["job"]["packing"] is packing
        assert plan["chosen"]["predicted"]["saved_bytes"] == run["full_saved_bytes"]
        gain = plan["packing"]
        assert gain["texts"] < gain["packed"] < 0.8 * gain["padded"]
        assert gain["texts"] < gain["grouped"] < gain["padded"]
        computed = gain["packed" if packing else "grouped"] / plan["steps_per_epoch"]
        assert traced[-1].micro_batch * traced[-1].input_size == pytest.approx(computed, rel=0.25)
        predicted = plan["chosen"]["predicted"]
        seconds = predicted["step_seconds"] * predicted["average_share"] * plan["job"]["steps"]
        assert plan["chosen"]["run_seconds"] == pytest.approx(seconds)
        assert 0 < predicted["average_share"] <= 1
        assert f"--{'' if packing else 'no-'}packing" in plan["command"]


PACKED = {
    "a classifier": ("bert", "text,label", "is for classification, and only texts of a causal-lm"),
    "a model": ("opt", "text", "opt carries one text of a sequence into the next, so none are pa"),
}


@pytest.mark.parametrize("case", PACKED)
def test_packing_where_there_is_none_is_refused(case, kinds):
    model, header, sentence = PACKED[case]
    copytree(kinds / "gpt2", "opt")
    config = {"hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 40, "num_hidden_layers": 1}
    opt = OPTConfig(**config, num_attention_heads=2, vocab_size=64, max_position_embeddings=64)
    OPTForCausalLM(opt).save_pretrained("opt")
    rows = [",".join(["w1 w2", "ab"[n % 2]][: 1 + header.count(",")]) for n in range(12)]
    Path("a.csv").write_text("\n".join([header, *rows]))
    name = "opt" if model == "opt" else str(kinds / model)
    result = razorctl("finetune", name, "a.csv", *CPU, "--packing", "--batch-size", "4")
    assert result.exit_code == 2, result.stderr
    assert sentence in result.stderr.splitlines()[-1]
