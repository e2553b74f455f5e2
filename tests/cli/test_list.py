"""The command `list`."""

import json

from razorctl.methods import METHODS
from tests.cli.commands import razorctl
from tests.drawings import shapes


def test_list_names_everything():
    groups = json.loads(razorctl("list", "--json").stdout)
    assert set(groups) == {"models", "data sets", "methods", "gpus", "recipes"}
    assert set(groups["methods"]) == set(METHODS)
    recipes = groups.pop("recipes")
    names = [name for group in groups.values() for name in group]
    lines = razorctl("list").stdout.splitlines()
    assert len(lines) == len(names) + 1  # which says how to see more, such as recipes
    assert all(f" {name} " in line for name, line in zip(names, lines, strict=False))
    assert all(len(line) <= 80 for line in lines)
    assert "recipes" in lines[-1]
    assert not any(name in line for name in recipes for line in lines)


def defaults(*words: str) -> dict[str, tuple[object, str]]:
    found = json.loads(razorctl("list", "defaults", *words, "--json").stdout)
    return {entry["setting"]: (entry["value"], entry["from"]) for entry in found["defaults"]}


def test_list_of_defaults_says_where_each_comes_from(tmp_path, monkeypatch):
    known = defaults("vit-micro", "digits")
    assert (known["steps"], known["learning_rate"]) == ((300, "model"), (0.2, "model"))
    assert (known["patience"], known["augment"]) == ((None, "general"), ("none", "general"))
    monkeypatch.chdir(shapes(tmp_path / "here", 30).parent)
    own = defaults("vit-micro", "here")
    assert (own["batch_size"], own["epochs"], own["steps"]) == (
        *((8, "data"), (90, "data"), (270, "data")),
    )
    assert (own["warmup_steps"], own["evaluate_every"]) == ((27, "data"), (15, "data"))
    assert (own["patience"], own["augment"]) == ((9, "data"), ("crop", "data"))
    table = razorctl("list", "defaults", "vit-micro", "here").stdout.splitlines()
    assert table[0] == "vit-micro on here, 27 rows to train on"
    shown = [line.split() for line in table if line.startswith(("patience", "epochs"))]
    assert shown == [["epochs", "90", "data"], ["patience", "9", "data"]]
    for name in ("bert-base", "distilbert", "roberta-base"):
        known = defaults(name)
        assert (known["optimizer"], known["learning_rate"]) == (("adamw", "model"), (2e-5, "model"))
    table = razorctl("list", "defaults", "vit-b16").stdout.splitlines()
    assert ["steps", "20,000", "model"] in map(str.split, table)


def test_defaults_are_of_a_model():
    assert "list defaults needs a model" in razorctl("list", "defaults").stderr
    assert "leave it out" in razorctl("list", "models", "vit-micro").stderr
