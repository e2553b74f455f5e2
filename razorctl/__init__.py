"""razorctl fine-tunes whole pretrained models on consumer GPUs by saving pruned activations."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from razorctl.memory import saved_bytes
    from razorctl.recipe import Recipe
    from razorctl.surgery import restore, sparsify

__version__ = "0.1.0"

# Loaded on first use, so that `razorctl --help` imports no torch.
_HOMES = {
    "Recipe": "recipe",
    "restore": "surgery",
    "saved_bytes": "memory",
    "sparsify": "surgery",
}
__all__ = ["Recipe", "restore", "saved_bytes", "sparsify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'razorctl' has no attribute {name!r}")
    return getattr(import_module(f"razorctl.{_HOMES[name]}"), name)
