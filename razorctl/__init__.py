"""razorctl fine-tunes whole pretrained models on consumer GPUs by saving pruned activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from razorctl.gpus import Gpu
    from razorctl.job import Job
    from razorctl.planner import Plan, plan
    from razorctl.profiler import Profile, profile
    from razorctl.promise import saved_bytes
    from razorctl.recipe import Recipe
    from razorctl.rules import Rule
    from razorctl.surgery import restore, sparsify
    from razorctl.trainer import Step, finetune

__version__ = "0.1.0"

# Loaded on first use, so that `razorctl --help` imports no torch.
_HOMES = {
    "Gpu": "gpus",
    "Job": "job",
    "Plan": "planner",
    "Profile": "profiler",
    "Recipe": "recipe",
    "Rule": "rules",
    "Step": "trainer",
    "finetune": "trainer",
    "plan": "planner",
    "profile": "profiler",
    "restore": "surgery",
    "saved_bytes": "promise",
    "sparsify": "surgery",
}
__all__ = [
    "Gpu",
    "Job",
    "Plan",
    "Profile",
    "Recipe",
    "Rule",
    "Step",
    "finetune",
    "plan",
    "profile",
    "restore",
    "saved_bytes",
    "sparsify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'razorctl' has no attribute {name!r}")
    return getattr(import_module(f"razorctl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
