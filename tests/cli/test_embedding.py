"""Embeddings of texts through the commands: pairs, triplets and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.models.transformers.embedding import FILES, MODULES, POOLING
from tests.cli.commands import (
    assert_ends_with_an_error,
    assert_resumes_to_the_bit,
    done,
    razorctl,
)
from tests.own import written

QUICK = (
    "--batch-size",
    "8",
    "--steps",
    "2",
    "--device",
    "cpu",
    "--input-size",
    "16",
    "--lr",
    "0.01",
)
FULL = ("--method", "full")  # fewer traces, where the method is no matter
ROWS = 40


def texts(word: str) -> list[str]:
    """Texts that are all unlike."""
    return [f"{word} {['cat', 'sat', 'dog', 'a'][row % 4]} {row}" for row in range(ROWS)]


DATA = {
    "pairs": {"anchor": texts("a"), "positive": texts("b")},
    "triplets": {"query": texts("q"), "pos": texts("p"), "neg_1": texts("n"), "neg_2": texts("m")},
    "scores": {
        "sentence1": texts("s"),
        "sentence2": texts("t"),
        "score": [row % 6 for row in range(ROWS)],
    },
}
COLUMNS = {
    "pairs": "anchor and positive",
    "triplets": "query and pos and neg_1 and neg_2",
    "scores": "sentence1 and sentence2, label in score",
}


@pytest.mark.parametrize(
    ("case", "model"), [("pairs", "bert"), ("triplets", "llama"), ("scores", "bert")]
)
def test_a_run_its_evaluation_its_vectors_and_its_export(case, model, kinds):
    data = written(DATA[case])
    task = ["--task", "embedding"] if case == "scores" else []
    result = done("finetune", str(kinds / model), data, *QUICK, *task, "--out", "run")
    figure = "spearman" if case == "scores" else "mrr"
    assert result["metric"] == figure
    assert result["classes"] == (["score"] if case == "scores" else [*DATA[case]])
    assert result["job"]["pooling"] == ("last" if model == "llama" else "mean")
    assert result["saved_bytes"] < 0.3 * result["full_saved_bytes"]
    found = done("evaluate", "run", "--device", "cpu", "--weights", "last")["metrics"]
    assert found == pytest.approx(result["metrics"], rel=1e-4, abs=1e-6)
    Path("t.txt").write_text("cat sat\n\na dog\n")
    rows = done("predict", "run", "t.txt", "--device", "cpu")["predictions"]
    assert [row["row"] for row in rows] == [0, 2]
    assert razorctl("predict", "run", "t.txt", "--device", "cpu", "--out", "v.npy").exit_code == 0
    vectors = np.load("v.npy")
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [row["vector"] for row in rows], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert razorctl("export", "run", "--out", "out").exit_code == 0
    assert all((Path("out") / file).exists() for file in FILES)
    alike = SentenceTransformer("out", device="cpu").encode(["cat sat", "a dog"])
    np.testing.assert_allclose(alike, vectors, atol=1e-5)
    further = done("finetune", "out", data, *QUICK, *FULL, *task, "--out", "further")
    assert further["job"]["pooling"] == result["job"]["pooling"]


def test_columns_are_said_and_rows_are_shown(kinds):
    for case, columns in COLUMNS.items():
        data = written(DATA[case], name=case)
        said = razorctl(
            *("finetune", str(kinds / "bert"), data, *QUICK, *FULL),
            *("--dry-run", "--task", "embedding"),
        )
        assert said.exit_code == 0, said.stderr
        assert f"text in {columns}\n" in said.stderr + said.stdout
    assert "divided by the largest, 5." in said.stderr


def test_a_resumed_run_is_the_same_to_the_bit(kinds):
    settings = {
        "batch_size": 8,
        "input_size": 16,
        "steps": 4,
        "save_every": 1,
        "learning_rate": 0.01,
    }
    job = Job(str(kinds / "bert"), written(DATA["triplets"]), symmetric=True, seed=3, **settings)
    assert_resumes_to_the_bit(job, Recipe("full"))


@pytest.mark.parametrize("change", [{"1_Pooling": "max"}, {"module": "Dense"}, {"pooling": "cls"}])
def test_a_folder_of_sentence_transformers_says_its_pooling(change, kinds):
    """Also as release 6 writes it; what is not trained is refused."""
    data = written(DATA["pairs"])
    done("finetune", str(kinds / "bert"), data, *QUICK, *FULL, "--out", "m")
    if "1_Pooling" in change:
        Path("m", POOLING).write_text(json.dumps({"pooling_mode_max_tokens": True}))
    elif "pooling" in change:
        Path("m", POOLING).write_text(json.dumps({"pooling_mode": "cls"}))
    else:
        modules = json.loads(Path("m", MODULES).read_text())
        modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "x.models.Dense"})
        Path("m", MODULES).write_text(json.dumps(modules))
    run = razorctl("finetune", "m", data, *QUICK, *FULL, "--out", "run")
    if "pooling" in change:
        assert models.find("m", "embedding").defaults["pooling"] == "first"
    else:
        word = "--pooling" if "1_Pooling" in change else "Dense"
        assert (run.exit_code, word in run.stderr) == (2, True)


SAME = [*texts("a")[:-1], "the same"]
BAD = {
    "equal texts": (
        {"anchor": SAME, "positive": [*texts("b")[:-1], "the same"]},
        5,
        "line 40 (its two texts are the same)",
    ),
    "empty text": ({"anchor": [*texts("a")[:-1], " "], "positive": texts("b")}, 5, "empty text"),
    "lists": ({"query": texts("a"), "pos": [["b"]] * ROWS}, 2, "has lists of texts"),
    "words as scores": (
        {"sentence1": texts("a"), "sentence2": texts("b"), "label": ["same"] * ROWS},
        2,
        "not a score of its pair",
    ),
    "scores beside negatives": (
        {**DATA["triplets"], "score": [0.5] * ROWS},
        2,
        "beside negatives",
    ),
    "one text": ({"text": texts("a"), "other": [1] * ROWS}, 2, "no two columns"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_is_refused(case, kinds):
    columns, code, said = BAD[case]
    run = razorctl("finetune", str(kinds / "bert"), written(columns), *QUICK, "--task", "embedding")
    assert run.exit_code == code, run.stderr
    assert said in run.stderr


def test_settings_that_are_refused(kinds):
    data, model = written(DATA["pairs"]), str(kinds / "bert")
    one = razorctl("finetune", model, data, *QUICK, "--batch-size", "1")
    assert_ends_with_an_error(one, "a batch of 1 has none")
    two = razorctl("finetune", model, data, *QUICK, "--accumulate", "2", "--processes", "2")
    assert_ends_with_an_error(two, "share a loss, which several processes do not")
    scored = razorctl(
        *("finetune", model, written(DATA["scores"], name="b"), *QUICK, "--task", "embedding"),
        "--symmetric",
    )
    assert_ends_with_an_error(scored, "has pairs with scores; leave --symmetric out")
    other = razorctl("finetune", "vit-micro", "digits", *QUICK, "--pooling", "first")
    assert_ends_with_an_error(other, "digits is for classification; leave --pooling out")
    flat = razorctl("finetune", model, data, *QUICK, "--temperature", "0")
    assert_ends_with_an_error(flat, "temperature 0")
    done("finetune", model, data, *QUICK, "--out", "run")
    array = razorctl("predict", "run", data, "--json", "--out", "v.npy")
    assert_ends_with_an_error(array, "NumPy array")
    unclear = razorctl("predict", "run", data)
    assert_ends_with_an_error(unclear, "--text-column")
