"""Notes on given settings that have no effect, or not the expected one."""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.cli.command import PREFIX
from razorctl.cli.settings import Call
from razorctl.cli.views import common as views
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.methods import METHODS
from razorctl.registry import unknown

if TYPE_CHECKING:
    from razorctl.rules.base import Rule

# Setting of swapped linear layers -> the start of its note.
INT8 = {
    "int8_weight_grad": "int8 weight gradients do",
    "int8_input_grad": "int8 input gradients do",
    "int8_forward": "the int8 forward pass does",
}


def note_settings(call: Call, *settings: Recipe | Job) -> None:
    """Prints a note for each setting of a call that has an effect in none of `settings`.

    A default value in a file is not a setting of the call: a run's config.toml has all defaults.
    """
    defaults = {field.name: field.default for field in (*fields(Job), *fields(Recipe))}
    given = {name for name, value in call.file.items() if value != defaults[name]}
    given |= call.given.keys()
    first, *others = (without_effect(given, each) for each in settings)
    for sentence in first:
        if all(sentence in other for other in others):
            views.note(sentence)


def note_variables(commands: Iterable[Any]) -> None:
    """Prints a note for each RAZORCTL_ variable that no command reads."""
    options = (o for c in commands for o in c.params if o.param_type_name == "option")
    prefix, names = f"{PREFIX}_", {"kernels"}  # `ops.kernels` reads RAZORCTL_KERNELS
    for each in options:
        names.add(each.name)
        if isinstance(each.envvar, str):
            names.add(each.envvar.removeprefix(prefix).lower())
    for variable in sorted(os.environ):
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name not in names:
            views.note(f"{variable} does nothing: {unknown('setting', name, names)}")


def without_effect(given: Collection[str], settings: Recipe | Job) -> list[str]:
    """A sentence for each given field that has no effect in `settings`."""
    notes = _of_recipe(settings) if isinstance(settings, Recipe) else _of_job(settings)
    return [sentence for name, sentence in notes if name in given]


def _of_recipe(recipe: Recipe) -> Iterator[tuple[str, str]]:
    way = f"method {recipe.method}" + ("" if recipe.has_effect else f" at ratio {recipe.ratio:g}")
    if not METHODS[recipe.method].has_ratio:
        yield "ratio", f"the ratio does nothing: method {recipe.method} has no ratio."
    if recipe.joint_budget == 1:
        yield "joint", f"joint {recipe.joint} does nothing without a joint budget below 1."
    if recipe.unbiased and recipe.joint_budget == 1 and not any(r.draws for r in _rules(recipe)):
        yield "unbiased", f"unbiased does nothing: {way} samples nothing."
    if recipe.mean_correction and not any(r.prunes for r in _rules(recipe)):
        yield "mean_correction", f"the mean correction does nothing: {way} prunes nothing."
    if recipe.activation_checkpointing and METHODS[recipe.method].checkpoints:
        yield "activation_checkpointing", f"activation checkpointing adds nothing to {way}."
    if recipe.lora and METHODS[recipe.method].part:
        yield "lora", f"lora adds nothing to {way}."
    if recipe.part != "adapters":
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            yield name, f"{name.replace('_', ' ')} does nothing: {way} has no adapters."
    for name, what in INT8.items():
        if getattr(recipe, name) and "linear" not in recipe.rules:
            yield name, f"{what} nothing: {way} leaves linear layers as they are."


def _rules(recipe: Recipe) -> set[type["Rule"]]:
    """The classes of the rules of a recipe."""
    from razorctl.rules.registry import RULES  # imported here: usage errors load no torch

    return {RULES[names.wide].rule for names in recipe.rules.values()}


def _of_job(job: Job) -> Iterator[tuple[str, str]]:
    if job.optimizer not in (None, "sgd"):
        yield "momentum", f"the momentum does nothing: {job.optimizer} does not use it."
    if job.optimizer_in_backward:
        yield "clip_norm", "the clip norm does nothing: the optimizer runs in the backward pass."
    if job.processes == 1:
        yield "strategy", f"strategy {job.strategy} does nothing: there is one process."
    warmup, steps = job.warmup_steps, job.steps
    if warmup is not None and steps is not None and warmup >= steps:
        yield (
            "warmup_steps",
            f"the learning rate never reaches its highest value: the warmup takes "
            f"{units.count(warmup, 'step')}, and the run has {steps:,}.",
        )
