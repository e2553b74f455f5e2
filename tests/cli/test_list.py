"""`list` as a user meets it."""

import json

from razorctl.methods import METHODS
from tests.cli.commands import razorctl


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


def test_list_of_one_kind_is_whole():
    groups = json.loads(razorctl("list", "--json").stdout)
    for group, names in groups.items():
        kind = group.replace(" ", "")
        assert json.loads(razorctl("list", kind, "--json").stdout) == {group: names}
        words = razorctl("list", kind).stdout.split()
        assert words == [word for entry in names.items() for text in entry for word in text.split()]
    assert "unknown kind 'modles'; did you mean 'models'?" in razorctl("list", "modles").stderr
