"""A stand-in for CUDA graphs on a CPU: operations are recorded, and replayed in place."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations for which the host waits for the device, which no capture permits.
WAITING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recording(TorchDispatchMode):
    """Keeps each operation with its arguments and results, whose memory `replay` fills again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self.created: set[int] = set()  # storages
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors from outside, and their values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tensors((args, kwargs))
        if func.overloadpacket in WAITING:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if func._schema.is_mutable or "batch_norm" in func.name():  # its schema hides mutation
            outside = (t for t in operands if t.untyped_storage()._cdata not in self.created)
            self.before += [(t, t.clone()) for t in outside]
        result = func(*args, **(kwargs or {}))
        storages = {t.untyped_storage()._cdata for t in operands}
        results = [t for t in tensors(result) if t.untyped_storage()._cdata not in storages]
        self.created |= {t.untyped_storage()._cdata for t in results}
        self.calls.append((partial(func, *args, **(kwargs or {})), results))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for call, results in self.calls:
                new_results = tensors(call())
                first = len(new_results) - len(results)
                for old, new in zip(results, new_results[first:], strict=True):
                    old.copy_(new)

    def undo(self) -> None:
        """Restores all memory, since a graph computes nothing while it is captured."""
        with torch.no_grad():
            for tensor, values in reversed(self.before):
                tensor.copy_(values)
            for _, results in self.calls:
                for tensor in results:
                    tensor.fill_(0)


class Graphs:
    """`captured.Graphs` where there is no card."""

    def __init__(self, device: torch.device) -> None:
        self.captured = self.replayed = 0

    def warm_up(self, run: Callable[[], Any]) -> Any:
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        capturing = patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        refused = RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during capture")
        reading = patch.object(torch, "get_rng_state", side_effect=refused)
        recording = Recording()
        try:
            with capturing, reading, recording:
                result = run()
        finally:
            recording.undo()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return result, replay
