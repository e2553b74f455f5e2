"""razorctl fine-tunes whole pretrained models on consumer GPUs, from pruned activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from razorctl.version import __version__ as __version__

if TYPE_CHECKING:
    from razorctl.api import compare as compare
    from razorctl.api import finetune as finetune
    from razorctl.api import list as list  # noqa: A004
    from razorctl.api import plan as plan
    from razorctl.api import profile as profile
    from razorctl.cli.results import Result as Result
    from razorctl.config.job import Job as Job
    from razorctl.config.recipe import Recipe as Recipe
    from razorctl.finished import evaluate as evaluate
    from razorctl.finished import export as export
    from razorctl.finished import predict as predict
    from razorctl.planning.gpus import Gpu as Gpu
    from razorctl.planning.plan import Plan as Plan
    from razorctl.rules.base import Rule as Rule
    from razorctl.surgery.byte_budget import saved_bytes as saved_bytes
    from razorctl.surgery.byte_budget import sparsify_within as sparsify_within
    from razorctl.surgery.sparsify import recipe_of as recipe_of
    from razorctl.surgery.sparsify import restore as restore
    from razorctl.surgery.sparsify import sparsify as sparsify
    from razorctl.training.callback import RazorCallback as RazorCallback
    from razorctl.training.metrics import Step as Step
    from razorctl.training.profiler import Profile as Profile

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
    "compare": "api",
    "evaluate": "finished",
    "export": "finished",
    "finetune": "api",
    "list": "api",
    "plan": "api",
    "predict": "finished",
    "profile": "api",
    "recipe_of": "surgery.sparsify",
    "restore": "surgery.sparsify",
    "saved_bytes": "surgery.byte_budget",
    "sparsify": "surgery.sparsify",
    "sparsify_within": "surgery.byte_budget",
}
__all__ = [name for name in _HOMES if name != "list"]  # a star import keeps Python's own


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'razorctl' has no attribute {name!r}")
    import_module("razorctl.system.quiet").hush()
    return getattr(import_module(f"razorctl.{_HOMES[name]}"), name)


def __dir__() -> tuple[str, ...]:
    return (*_HOMES, "__version__")
