"""razorctl fine-tunes whole pretrained models on consumer GPUs, from pruned activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from razorctl.version import __version__ as __version__

if TYPE_CHECKING:
    from razorctl.cli.calls import compare, finetune, plan, profile
    from razorctl.cli.results import Result
    from razorctl.config.job import Job
    from razorctl.config.recipe import Recipe
    from razorctl.planning.gpus import Gpu
    from razorctl.planning.plan import Plan
    from razorctl.rules.base import Rule
    from razorctl.surgery.byte_budget import saved_bytes, sparsify_within
    from razorctl.surgery.sparsify import recipe_of, restore, sparsify
    from razorctl.training.callback import RazorCallback
    from razorctl.training.metrics import Step
    from razorctl.training.profiler import Profile

# Loaded on first use, so that `razorctl --help` imports no torch.
_HOMES = {
    "Gpu": "planning.gpus",
    "Job": "config.job",
    "Plan": "planning.plan",
    "Profile": "training.profiler",
    "RazorCallback": "training.callback",
    "Recipe": "config.recipe",
    "Rule": "rules.base",
    "Step": "training.metrics",
    "Result": "cli.results",
    "compare": "cli.calls",
    "finetune": "cli.calls",
    "plan": "cli.calls",
    "profile": "cli.calls",
    "recipe_of": "surgery.sparsify",
    "restore": "surgery.sparsify",
    "saved_bytes": "surgery.byte_budget",
    "sparsify": "surgery.sparsify",
    "sparsify_within": "surgery.byte_budget",
}
__all__ = [
    "Gpu",
    "Job",
    "Plan",
    "Profile",
    "RazorCallback",
    "Recipe",
    "Result",
    "Rule",
    "Step",
    "compare",
    "finetune",
    "plan",
    "profile",
    "recipe_of",
    "restore",
    "saved_bytes",
    "sparsify",
    "sparsify_within",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'razorctl' has no attribute {name!r}")
    import_module("razorctl.system.quiet").hush()
    return getattr(import_module(f"razorctl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
