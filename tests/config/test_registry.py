import pytest

from razorctl import data, models
from razorctl.methods import METHODS
from razorctl.planning import gpus
from razorctl.registry import MOST, unknown

KNOWN = {
    "model": models.models(),
    "data set": data.DATASETS,
    "method": METHODS,
    "GPU": gpus.names(),
}


@pytest.mark.parametrize(
    ("what", "name", "nearest"),
    [
        ("model", "vit-b", "vit-b16"),
        ("data set", "cifar", "cifar10"),
        ("method", "razr", "razor"),
        ("method", "LORA", "lora"),
        ("GPU", "3090", "rtx-3090"),
        ("model", "bert", "bert-base"),
        ("model", "vitb16", "vit-b16"),
        ("model", "llama3.2", "llama-3.2-1b"),
        ("data set", "CIFAR-10", "cifar10"),
    ],
)
def test_the_nearest_name_is_suggested(what, name, nearest):
    assert str(unknown(what, name, KNOWN[what])).endswith(f"; did you mean {nearest!r}?")


@pytest.mark.parametrize("what", [what for what in KNOWN if len(KNOWN[what]) <= MOST])
@pytest.mark.parametrize("name", ["blah", "xyz", "mnist1", ""])
def test_where_none_is_near_all_are_named(what, name):
    names = ", ".join(sorted(KNOWN[what]))
    assert str(unknown(what, name, KNOWN[what])) == f"unknown {what} {name!r}; known: {names}."


def test_of_many_names_the_likeliest_are_listed():
    known = [f"{letter}{number:03}" for letter in "abcd" for number in range(20)]
    sentence = str(unknown("part", "zz01", known))
    assert sentence.endswith(" and 70 more.")
    assert sentence.count(",") == 9
