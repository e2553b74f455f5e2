"""Models and data of every kind, from local folders, through the commands."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from razorctl.cli.app import app
from tests.cli.commands import assert_ends_with_an_error, done, razorctl
from tests.own import texts

CASES = {
    "gpt2": ("gpt2", "texts.txt", 32, "perplexity"),
    "llama, chats": ("llama", "chats.jsonl", 32, "perplexity"),
    "bert": ("bert", "texts.txt", 32, "perplexity"),
    "segformer": ("segformer", "shapes", 32, "mean_iou"),
    "linear head": ("resnet", "shapes", 32, "mean_iou"),
    "network of convolutions": ("resnet", "digits", 32, "accuracy"),
}
QUICK = ("--batch-size", "4", "--steps", "2", "--device", "cpu", "--json")


@pytest.mark.parametrize("case", CASES)
def test_a_run_and_its_evaluation(case, kinds):
    model, dataset, size, metric = CASES[case]
    task = ["--task", "segmentation"] if case == "linear head" else []
    if metric in ("mean_iou", "accuracy"):
        task += ["--class-weights", "balanced"]
    data = dataset if dataset == "digits" else str(kinds / dataset)
    settings = [*QUICK[:-1], "--input-size", str(size), *task, "--ratio", "0.5", "--lr", "0.01"]
    result = done("finetune", str(kinds / model), data, *settings, "--out", "run")
    assert result["metric"] == metric
    assert result["saved_bytes"] < 0.5 * result["full_saved_bytes"]
    found = done("evaluate", "run", "--device", "cpu", "--weights", "last")
    figures, by_class = found["metrics"], found["by_class"]
    assert (by_class is None) == (metric == "perplexity")
    if result["best_step"] == result["steps"]:
        assert by_class == result["by_class"]
    assert figures == pytest.approx(result["metrics"], rel=1e-4)
    if metric == "perplexity":
        assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]), rel=1e-5)


def test_a_run_of_masked_tokens_becomes_a_classifier(kinds, caplog):
    size = [*QUICK[:-1], "--input-size", "32", "--lr", "0.01", "--method", "full"]
    done("finetune", str(kinds / "bert"), str(kinds / "texts.txt"), *size, "--out", "words")
    texts(Path("a.csv"))
    result = razorctl("finetune", "words", "a.csv", *size, "--out", "run")
    assert result.exit_code == 0, result.stderr
    (said,) = (record.getMessage() for record in caplog.records if "random" in record.getMessage())
    assert said.endswith("is new; it is trained from random weights (bert.pooler, classifier)")
    assert "newly initialized" not in result.stderr
    done("evaluate", "run", "--device", "cpu")


@pytest.mark.parametrize("case", ["gpt2", "linear head"])
def test_a_plan_and_a_profile(case, kinds):
    model, dataset, size, _ = CASES[case]
    task = ["--task", "segmentation"] if case == "linear head" else []
    size = ["--input-size", str(size), "--batch-size", "4", *task]
    few = ["--max-ratio", "0.5"]  # ways to trace
    planned = done("plan", str(kinds / model), str(kinds / dataset), "--gpu", "t4", *size, *few)
    assert planned["fits"]
    ways = {way["method"] for way in planned["candidates"]}
    assert ways >= {"full", "razor"}
    assert ("lora" in ways) == (case == "gpt2")
    data = [str(kinds / dataset)] if case == "gpt2" else []
    profiled = done("profile", str(kinds / model), *data, *size, "--steps", "1", "--ratio", "0.5")
    assert profiled["dataset"] == (data[0] if data else None)
    totals = profiled["totals"]
    assert totals["saved_bytes"] < 0.5 * totals["full_saved_bytes"]


CONFIGS = {
    "code": ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, 2, "needs code of its own"),
    "type": ({"model_type": "mine"}, 2, "is of the type mine"),
    "quantized": ({"model_type": "llama", "quantization_config": {"quant_method": "q"}}, 2, "(q)"),
    "speech": ({"model_type": "whisper"}, 2, "Whisper (speech to text)"),
    "nothing": ({}, 5, "is of no library that razorctl knows"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_model_that_cannot_be_trained_is_refused(case):
    config, code, sentence = CONFIGS[case]
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    result = razorctl("finetune", "./model", "digits")
    assert result.exit_code == code
    assert_ends_with_an_error(result, sentence)


def foreign(folder: Path, *, own: bool) -> None:
    """Names Python code in the folder of a model for all that transformers has.

    own: whether transformers has a tokenizer for it too.
    """
    code = "from pathlib import Path\nPath('ran').touch()\nclass Mine: pass\n"
    (folder / "mine.py").write_text(code)
    kinds = ("Config", "ModelForCausalLM", "ModelForMaskedLM", "ModelForSequenceClassification")
    names = {f"Auto{kind}": "mine.Mine" for kind in (*kinds, "ModelForImageClassification")}
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        if file.exists():
            found = json.loads(file.read_text())
            found["auto_map"] = names | {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}
            if not own:
                found.pop("tokenizer_class", None)
            file.write_text(json.dumps(found))


def answering_yes(*args: str) -> Result:
    return CliRunner().invoke(app, args, input="y\n" * 20)


@pytest.mark.parametrize("case", ["gpt2", "llama, chats", "bert"])
def test_code_beside_a_model_is_never_run(case, kinds):
    model, dataset, size, _ = CASES[case]
    copytree(kinds / model, "model")
    foreign(Path("model"), own=True)
    settings = [*QUICK[:-1], "--input-size", str(size), "--ratio", "0.5", "--lr", "0.01"]
    asked = "finetune", "./model", str(kinds / dataset), *settings
    result = answering_yes(*asked, "--out", "run")
    assert result.exit_code == 0, result.stderr
    foreign(Path("run"), own=False)
    answering_yes("evaluate", "run", "--device", "cpu")
    Path("prompts.txt").write_text("w1 w2")
    answering_yes("predict", "run", "prompts.txt", "--device", "cpu", "--max-new-tokens", "2")
    foreign(Path("model"), own=False)
    result = answering_yes(*asked, "--out", "again")
    assert not Path("ran").exists()
    if case.startswith("llama"):  # for whose models transformers names no tokenizer
        assert result.exit_code == 2
        assert "needs code of its own" in result.stderr.splitlines()[-1]
