"""Random numbers that can be replayed, by a seed and a position or by a generator's state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Murmur3's finalizer for 32 bits (Austin Appleby, public domain).
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def uniform(seed: Tensor, offset: int, count: int) -> Tensor:
    """The `count` numbers from `offset` on in the sequence of `seed` (0-dim, int64), [count].

    They are uniform in [0, 1), single precision, multiples of 2 ** -24. The sequence repeats after
    2 ** 32.
    """
    start = (offset + 2**31) % 2**32 - 2**31  # as int32, whose sums and products wrap around
    position = torch.arange(count, dtype=torch.int32, device=seed.device) + start
    mixed = _mixed(_mixed(position) ^ _mixed(seed.to(torch.int32)))
    return ((mixed >> 8) & 0xFFFFFF).float() * 2**-24


def _mixed(x: Tensor) -> Tensor:
    """A bijection of int32 in which each input bit flips each output bit half of the time."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


@contextmanager
def replaying(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Inside the block random numbers follow `state`; afterwards the generator is restored.

    state: a state of the generator, or a seed, int64 [1], on the CPU; None changes nothing.
    """
    if state is None:
        yield
        return
    accelerator = None if device.type == "cpu" else getattr(torch, device.type)
    with torch.random.fork_rng([device] if accelerator else [], device_type=device.type):
        if state.dtype == torch.int64:
            (accelerator or torch.default_generator).manual_seed(int(state))
        else:
            accelerator.set_rng_state(state, device) if accelerator else torch.set_rng_state(state)
        yield
