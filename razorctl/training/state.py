"""The content of a checkpoint: all that the next step depends on, and the history of the run.

Tensors are in safetensors and the rest is JSON, so reading a checkpoint runs no code from it.
"""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.surgery.drawing import draws
from razorctl.system import documents, processes
from razorctl.training import parallel, tensors

EIGHT_BITS = "OptimState8bit"  # torchao's class of a state in 8 bits
MODEL, TENSORS, REST = "model.safetensors", "state.safetensors", "state.json"


def write(folder: Path, model: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Writes a model's state dict and `state`: mappings, lists, tensors, and values of JSON."""
    state_tensors: dict[str, Tensor] = {}
    tree = _without_tensors(state, state_tensors, "")
    for name, content in ((MODEL, model), (TENSORS, state_tensors)):
        with (folder / name).open("wb") as file:
            tensors.write(file, content)
    (folder / REST).write_text(documents.text(tree), "utf-8")


def load_model(folder: Path, model: nn.Module) -> None:
    """Loads a checkpoint's weights, which the first process reads, into a model. Collective."""
    parallel.put(tensors.read(folder / MODEL) if processes.first() else {}, model)


def read(folder: Path) -> dict[str, Any]:
    """The state that `write` wrote, with tensors on the CPU, and lists for tuples."""
    tree = documents.parse(documents.read_bytes(folder / REST))
    state: dict[str, Any] = _with_tensors(tree, tensors.read(folder / TENSORS))
    return state


def transient(model: nn.Module) -> dict[str, Any]:
    """A copy of the state that a step changes beside weights: random states, draws, buffers."""
    entries = model.state_dict(keep_vars=True).items()  # no view of each, in every step
    changing = {
        "draws": {name: each.state_dict() for name, each in draws(model).items()},
        "buffers": {k: v for k, v in entries if not isinstance(v, nn.Parameter)},
    }
    return {"random": random_states(), **tree_map_only(Tensor, torch.clone, changing)}


def load_transient(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restores the result of `transient`, or its copy in a checkpoint."""
    for name, each in draws(model).items():
        if name in state["draws"]:  # an older checkpoint has none of int8 or logits
            each.load_state_dict(state["draws"][name])
    model.load_state_dict(state["buffers"], strict=False)
    set_random_states(state["random"])


def seed(number: int) -> None:
    """Seeds all default generators."""
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)


def random_states(cuda: bool = True) -> dict[str, Any]:
    """The states of the default generators of torch, CUDA, Python and NumPy.

    cuda: whether the states of CUDA are included, if it is in use.
    """
    kind, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda and _cuda() else [],
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(numpy.int64)), *rest],  # type: ignore[union-attr]
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restores the result of `random_states`; states of missing devices are ignored."""
    torch.set_rng_state(states["torch"])
    if _cuda():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))


def _cuda() -> bool:
    """Whether CUDA is initialized; reading its random states would initialize it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _without_tensors(value: Any, out: dict[str, Tensor], name: str) -> Any:
    """`value` for JSON, with names in place of tensors, which are added to `out`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if type(value).__name__ == EIGHT_BITS:
        parts, [signed, _] = value.__tensor_flatten__()
        tensors = {part: getattr(value, part) for part in parts}
        return {EIGHT_BITS: [_without_tensors(tensors, out, name), signed]}
    if isinstance(value, Tensor):
        out[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):  # pairs, since keys may be numbers
        pairs = ([k, _without_tensors(v, out, f"{name}/{k}")] for k, v in value.items())
        return {"pairs": list(pairs)}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(v, out, f"{name}/{i}") for i, v in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "float" in value:
            return float(value["float"])
        if EIGHT_BITS in value:
            from torchao.optim.subclass_8bit import OptimState8bit

            parts, signed = value[EIGHT_BITS]
            return OptimState8bit(**_with_tensors(parts, tensors), signed=signed)
        return {key: _with_tensors(each, tensors) for key, each in value["pairs"]}
    if isinstance(value, list):
        return [_with_tensors(each, tensors) for each in value]
    return value
