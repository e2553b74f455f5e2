"""Compares passes through a model: outputs and gradients of stock and razor layers."""

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
from record import reason
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from razorctl.memory.saved import kept_storages


@dataclass(frozen=True)
class Pass:
    """The outputs of a forward pass in train mode, the gradients by parameter, the bytes kept."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    kept: int


def run(model: nn.Module, inputs: Any, autocast: torch.dtype | None = None) -> Pass:
    """Runs a forward pass, and a backward pass from random gradients of the outputs.

    Args:
        model: on a CPU.
        inputs: of the model, by name if they are a dict.
        autocast: the dtype of mixed precision, None for none.
    """
    torch.manual_seed(2)
    model.zero_grad()
    outputs: list[Any] = []

    def forward() -> None:
        outputs.append(model(**inputs) if isinstance(inputs, dict) else model(inputs))

    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        kept = sum(storage.size for storage in kept_storages(model, forward, lambda: None))
    every = [y for y in tree_leaves(outputs) if isinstance(y, Tensor)]
    pulled = [y for y in every if y.requires_grad]
    torch.autograd.backward(pulled, [_gradient(y) for y in pulled])
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Pass([y.detach() for y in every], gradients, kept)


def _gradient(y: Tensor) -> Tensor:
    """A random gradient of an output: at any precision the same one, rounded."""
    return torch.randn_like(y, dtype=torch.promote_types(y.dtype, torch.float32)).to(y.dtype)


def cosine(a: Pass, b: Pass) -> float:
    """The cosine of all gradients together, of the parameters that have one in both passes."""
    products = [0.0] * 3
    for name in sorted(a.gradients.keys() & b.gradients.keys()):
        x, y = (p.gradients[name].flatten().double() for p in (a, b))
        for at, (one, other) in enumerate(((x, y), (x, x), (y, y))):
            products[at] += one.dot(other).item()
    dot, *squares = products
    return dot / math.sqrt(math.prod(squares)) if all(squares) else 0.0


def equal(a: Pass, b: Pass) -> bool:
    """Whether the outputs are the same to the bit; where both are NaN they are."""
    pairs = zip(a.outputs, b.outputs, strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def guarded(check: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The row that `check` returns in a process of its own; if it dies, its end is the fault."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(check, *args).result()
        except BrokenProcessPool:
            return {"faults": ["the process died"]}
        except Exception as error:
            return {"faults": [reason(error)]}
