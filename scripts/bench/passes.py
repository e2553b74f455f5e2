"""Passes through a model: their outputs, gradients and bytes, compared with those of stock layers.

q, k and v of a fused projection are parameters apart. Biases of keys are left out, since their
exact gradient is zero: a softmax does not see what is added to all logits of a query.
"""

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from record import reason
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from razorctl.memory.saved import kept_storages, run_forward
from razorctl.memory.tracker import trace_step

LEAST = 1e-3  # of the whole's norm: a smaller vector may be rounding alone
# Projections of q, k and v, by part of the name, and the axis on which these lie side by side.
FUSED = {"qkv.": 0, "in_proj_": 0, "c_attn.": -1}
KEYS = ("[k]", "key.bias", "k_proj.bias", "k_lin.bias", ".k.bias")


@dataclass(frozen=True)
class Pass:
    """The outputs of a forward pass in train mode, the gradients by parameter, the bytes kept."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    kept: int


def undropped(model: nn.Module) -> nn.Module:
    """The model in train mode, without dropout."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model.train()


def redrawn(model: nn.Module, std: float = 0.1) -> nn.Module:
    """The model in train mode, with new values of parameters that start at or near zero.

    No gradient would pass through these, such as layer scales.
    """
    for parameter in model.parameters():
        zero = parameter.numel() and parameter.detach().abs().max() <= 1e-4
        if zero and parameter.requires_grad:
            nn.init.normal_(parameter, std=std)
    return model.train()


def run(model: nn.Module, inputs: Any, autocast: torch.dtype | None = None) -> Pass:
    """Runs a forward pass on a CPU, and a backward pass from random gradients of the outputs.

    inputs: by name if they are a dict. autocast: the dtype of mixed precision, None for none.
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
    # At any precision the same random gradients, rounded.
    drawn = (torch.randn_like(y, dtype=torch.promote_types(y.dtype, torch.float32)) for y in pulled)
    torch.autograd.backward(pulled, [dy.to(y.dtype) for dy, y in zip(drawn, pulled, strict=True)])
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Pass([y.detach() for y in every], gradients, kept)


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


def parts(vectors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each parameter's vector by name, flat; those of fused projections as [q], [k] and [v]."""
    for name, vector in vectors.items():
        axis = next((axis for part, axis in FUSED.items() if part in name), None)
        names, vectors_of = [name], (vector,)
        if axis is not None and vector.shape[axis] % 3 == 0:
            names, vectors_of = [f"{name}[{part}]" for part in "qkv"], vector.chunk(3, axis)
        for each, part in zip(names, vectors_of, strict=True):
            if not (each.endswith(KEYS) and part.dim() == 1):
                yield each, part.flatten().double()


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameter of the lowest cosine: its name, cosine, relative error and differing signs.

    Of those with LEAST of the norm; signs: the share of elements whose signs differ.
    """
    exact, near = dict(parts(want)), dict(parts(got))
    whole = sum(vector.norm().item() ** 2 for vector in exact.values()) ** 0.5
    cosines = {
        name: F.cosine_similarity(near[name], vector, 0).item()
        for name, vector in exact.items()
        if name in near and vector.norm() > LEAST * whole
    }
    if not cosines:
        return {}
    name = min(cosines, key=cosines.__getitem__)
    vector, other = exact[name], near[name]
    return {
        "parameter": name,
        "cosine": cosines[name],
        "relative_error": ((other - vector).norm() / vector.norm()).item(),
        "signs": (other.sign() != vector.sign()).double().mean().item(),
    }


def peak_bytes(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
) -> int:
    """Highest bytes of all tensors in a training step, traced; see `trace_step`.

    Raises UsageError if the model needs tensor values. optimizer: builds one from parameters; with
    None the step ends after the backward pass. accumulate: whether `inputs` are one of several
    micro-batches of the step.
    """

    def step(model: nn.Module, micro_batches: Iterable[Any], updates: Optimizer | None) -> None:
        for inputs in micro_batches:
            leaves = tree_leaves(run_forward(model, inputs, autocast))
            loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
            torch.autograd.backward(loss.float().sum())
        if updates is not None:
            updates.step()

    def build(model: nn.Module) -> Optimizer:
        assert optimizer is not None
        return optimizer(p for p in model.parameters() if p.requires_grad)

    def forward(model: nn.Module, inputs: Any) -> Any:
        return run_forward(model, inputs, autocast)

    make, micro_batches = build if optimizer else None, 2 if accumulate else 1
    return trace_step(model, inputs, make, step, forward, micro_batches=micro_batches).peak


def allocated_on_cpu(run: Callable[[], object]) -> int:
    """Highest bytes that `run` has allocated on the CPU at a time, kernels' workspaces included."""
    now = most = 0
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
