import importlib
import json
from pathlib import Path

import pytest

from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.layers.by_type import LIBRARIES, swaps
from razorctl.methods import CLOSE, EXACT, FAMILIES, METHODS, WEIGHTS
from razorctl.rules.allocation import RESERVE, width
from razorctl.rules.registry import RULES

for library in LIBRARIES:  # so that `swaps` has all that it may have
    importlib.import_module(f"razorctl.layers.libraries.{library}")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_names_known_kinds_and_rules(name):
    method = METHODS[name]
    assert method.name == name
    assert method.summary
    assert method.source
    assert set(method.rules) <= {swap.kind for swap in swaps().values()}.union(EXACT)
    assert set(method.rules.values()) <= set(RULES)
    assert Recipe(name).method == name


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), float("inf"), False, "0.9"])
def test_ratio_outside_its_range_is_refused(ratio):
    with pytest.raises(UsageError, match=r"outside \[0, 1\)|of type float"):
        Recipe(ratio=ratio)


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.01, float("nan")])
def test_joint_budget_outside_its_range_is_refused(budget):
    with pytest.raises(UsageError, match=r"outside \(0, 1\]"):
        Recipe(joint_budget=budget)


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("method", "backrazer", "backrazor"),
        ("attention", "flsh", "flash"),
        ("joint", "weigts", "weights"),
    ],
)
def test_unknown_names_get_the_nearest(field, value, nearest):
    with pytest.raises(UsageError, match=f"did you mean '{nearest}'"):
        Recipe(**{field: value})


def test_auto_attention_is_the_methods_own():
    assert Recipe("backrazor").backend == "stored"
    assert Recipe("backrazor", attention="flash").backend == "flash"
    assert Recipe("prebackrazor++").backend == "sparse-flash"
    assert Recipe("full").backend == "auto"


def test_ratio_zero_has_no_rules_and_leaves_attention_alone():
    for name, method in METHODS.items():
        if method.ratio != "nothing":
            assert not Recipe(name, 0).rules
            assert Recipe(name, 0).backend == "auto"
            assert Recipe(name, 0).int8 == (False, False, False)


def test_a_forward_pass_in_int8_is_asked_for_and_its_gradient_is_not_called_close():
    assert Recipe().int8 == (True, True, False)
    assert Recipe(int8_forward=True).int8 == (True, True, True)
    assert Recipe().close("fp32", "attention")
    assert not Recipe(int8_forward=True).close("fp32", "attention")


FAMILY_OF = {"squeezenet": "convolution", "mobilenet": "convolution"}  # others have attention


def test_cosines_are_the_least_of_the_measured_ones():
    """Of the tasks of a family, over that of `full`, whose rounding MobileNetV2 enlarges."""
    results = json.loads(Path("scripts/bench/results/gradients.json").read_text())
    rows = [row for row in results["rows"] if not row["int8_forward"]]
    rounded = {
        (row["task"], row["precision"]): row["closeness"]["all"]["cosine"]
        for row in rows
        if row["method"] == "full"
    }
    measured: dict[tuple[str, ...], dict[float, list[float]]] = {}
    for row in (row for row in rows if row["method"] != "full"):
        cosine = row["closeness"]["all"]["cosine"]
        cosine /= 1 if row["precision"] == "fp32" else rounded[row["task"], row["precision"]]
        family = FAMILY_OF.get(row["task"], "attention")
        of_method = measured.setdefault((row["method"], family, width(row["precision"])), {})
        of_method.setdefault(row["ratio"] or 1.0, []).append(min(cosine, 1.0))
    for name, method in METHODS.items():
        for family in FAMILIES:
            for size in RESERVE:
                of_method = measured.get((name, family, size), {})
                least = {ratio: min(each) for ratio, each in of_method.items()}
                close = max(least.values(), default=0) >= CLOSE
                cosines = method.cosines.get(family, {}).get(size, {})
                if method.ratio == "nothing" and close:
                    assert cosines[1] <= least[1] + 5e-5  # one for all models
                else:
                    assert cosines == pytest.approx(least if close else {}, abs=5e-5)


def test_the_cosine_is_that_of_the_precision_and_of_the_next_measured_ratio():
    measured = METHODS["razor"].cosines["attention"]
    assert Recipe(ratio=0.9).cosine("fp32", "attention") == measured["wide"][0.9]
    assert Recipe(ratio=0.9).cosine("bf16", "attention") == measured["narrow"][0.9]
    assert Recipe(ratio=0.9).cosine("fp16", "attention") == measured["narrow"][0.9]
    assert Recipe(ratio=0.89).cosine("bf16", "attention") == measured["narrow"][0.9]
    assert Recipe(ratio=0.985).cosine("bf16", "attention") is None
    assert Recipe(ratio=0.97).close("bf16", "attention")
    assert Recipe(ratio=0.95).close("bf16", "convolution")
    assert not Recipe(ratio=0.97).close("bf16", "convolution")


@pytest.mark.parametrize("recipe", [Recipe("full"), Recipe("checkpoint"), Recipe("razor", 0)])
def test_an_exact_gradient_has_cosine_1(recipe):
    assert recipe.cosine("bf16", "attention") == 1
    assert recipe.close("bf16", "attention")


@pytest.mark.parametrize(
    "recipe",
    [Recipe("lora"), Recipe("razor", joint_budget=0.5), Recipe("full", int8_forward=True)],
)
def test_what_was_not_measured_has_no_cosine(recipe):
    assert recipe.cosine("bf16", "attention") is None
    assert not recipe.close("bf16", "attention")


def test_a_joint_budget_draws_the_weights_of_methods_that_prune_nothing():
    for recipe in (Recipe("full", joint_budget=0.5), Recipe("backrazor", 0, joint_budget=0.5)):
        assert recipe.rules == dict.fromkeys(WEIGHTS, ("dense", "dense"))
