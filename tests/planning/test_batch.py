"""The batch size that a plan chooses."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from razorctl.cli.app import app
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.planning import batch, gpus
from razorctl.planning.batch import largest_batch
from razorctl.planning.search import Search

GPU = gpus.load("rtx-4090")
JOB = Job("vit-micro", "cifar100", steps=10, precision="fp32")
MIB = 2**20


@pytest.mark.parametrize("recipe", [Recipe("full"), Recipe("razor")])
@pytest.mark.parametrize("budget", [700 * MIB, 24 * 2**30])
def test_it_is_the_largest_that_fits_in_one_pass(recipe, budget, cache):
    size = largest_batch(JOB, GPU, recipe, budget, cache=cache)

    def fits(batch: int) -> bool:
        whole = Search(replace(JOB, batch_size=batch), GPU, budget, recipe, cache)
        return whole.predict(recipe).fits(budget)

    assert size & (size - 1) == 0
    assert fits(size)
    assert 2 * size > 50_000 or not fits(2 * size)  # of training examples


@pytest.mark.parametrize("most", [None, 128])
def test_few_sizes_are_tried_where_small_batches_take_what_weights_do(most, cache, monkeypatch):
    def needed(search: Search, recipe: Recipe) -> int:
        return max(600 * MIB, search.job.batch_size * MIB)

    monkeypatch.setattr(Search, "needed_bytes", needed)
    tried: set[str] = set()
    size = largest_batch(JOB, GPU, Recipe(), 700 * MIB, most=most, cache=cache, report=tried.add)
    assert size == (most or 512)
    assert len(tried) == (3 if most else 5)  # 8, 16, the most, 512, 1024


def test_of_several_processes_each_has_that_much(cache):
    one = largest_batch(JOB, GPU, Recipe(), 900 * MIB, cache=cache)
    both = replace(JOB, processes=2, strategy="fsdp")
    assert largest_batch(both, GPU, Recipe(), 900 * MIB, cache=cache) == 2 * one


def test_of_few_examples_each_process_has_its_part(cache):
    both = replace(JOB, dataset="digits", processes=2)  # 1,437 training examples
    assert largest_batch(both, GPU, Recipe(), GPU.memory_bytes, cache=cache) == 1024


def test_where_nothing_fits_it_is_one(cache):
    assert largest_batch(JOB, GPU, Recipe(), MIB, cache=cache) == 1


@pytest.mark.parametrize(("prefer", "method"), [("exact", "full"), ("fast", "razor")])
def test_without_a_recipe_the_preference_says_which_is_tried(prefer, method, monkeypatch):
    tried = []

    def largest(job, gpu, recipe, budget, **options):
        tried.append(recipe)
        raise UsageError("stop.")

    monkeypatch.setattr(batch, "largest_batch", largest)
    args = ["plan", "vit-micro", "digits", "--batch-size", "auto", "--vram", "1GB"]
    assert CliRunner().invoke(app, [*args, "--prefer", prefer]).exit_code == 2
    assert tried == [Recipe(method)]


def test_the_command_line_takes_auto(small, traces, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(traces))
    args = ["plan", "vit-micro", "digits", "--batch-size", "auto", "--vram", "1GB", "--json"]
    # One way, so that few steps are traced.
    result = CliRunner().invoke(app, [*args, "--method", "razor", "--ratio", "0.5"])
    assert result.exit_code == 0, result.stderr
    assert '"batch_size": 1024' in result.stdout  # of 1,437 training examples
    args = ["finetune", "vit-micro", "digits", "--device", "cpu", "--batch-size"]
    result = CliRunner().invoke(app, [*args, "auto"])
    assert result.exit_code == 2
    assert "batch size auto needs a plan; name a card with --gpu, or --vram" in result.stderr
    result = CliRunner().invoke(app, [*args, "some"])
    assert result.exit_code == 2
    assert "'some' is neither a whole number nor auto" in result.stderr
