"""The state of random numbers, for replaying them in a recomputation."""

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device; in a compiled program, a seed drawn from it.

    A graph can draw a seed like any random number, so it can be compiled and checkpointed. Raises
    RuntimeError while a CUDA graph is captured, since each replay would draw the same numbers.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dropout inside attention, or other recomputed code, is not captured")
    if torch.compiler.is_compiling():
        return torch.randint(2**62, (1,), device="cpu")
    backend = getattr(torch, device.type)
    return backend.get_rng_state(device) if device.type != "cpu" else torch.get_rng_state()
