"""AdamW whose state is on the host: masters and moments in its memory, only weights on the card.

backward   gradient on the card, then in host memory, where micro-batches add up
step       AdamW in single precision on the host, then the weight on the card

A separate stream copies each gradient as soon as it exists, and then frees its memory on the
card. This is ZeRO-Offload (Ren et al., 2021) on one card. With weights in fp32, the update is
bitwise equal to the update of `torch.optim.AdamW`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

log = logging.getLogger(__name__)

# Bytes of gradients on the card whose copies have not ended, beside the newest one. They leave in
# 3 to 5 ms, and the backward pass of as many weights of a decoder takes longer.
AHEAD = 2**26


class _Flight(NamedTuple):
    """A gradient whose copy to the host has begun; event: its end, None if it has ended."""

    master: Tensor
    gradient: Tensor
    event: torch.cuda.Event | None


class HostAdamW(AdamW):
    """AdamW over masters, copies of the weights on the host in single precision.

    Its groups have the masters as parameters, so schedules work as ever. Gradients are clipped by
    `clip`, since masters have none. A hook takes each gradient from its weight.

    Args:
        groups: as of AdamW, with the weights on their device.
        lr: as of AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        self._weights: dict[Tensor, Tensor] = {}
        self._masters: dict[Tensor, Tensor] = {}
        self._buffers: dict[Tensor, Tensor] = {}  # master -> gradient or new weight, pinned
        self._gradients: dict[Tensor, Tensor] = {}  # master -> sum of the micro-batches so far
        self._flights: deque[_Flight] = deque()
        self.grad_scale: Tensor | None = None  # by which AdamW divides gradients as it reads them
        self._stream: torch.cuda.Stream | None = None
        masters = [
            {**group, "params": [self._adopted(weight) for weight in group["params"]]}
            for group in groups
        ]
        super().__init__(masters, lr, fused=True)

    def _adopted(self, weight: Tensor) -> Tensor:
        """The master of a weight."""
        if weight.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(weight.device)  # type: ignore[no-untyped-call]
        master = weight.detach().to("cpu", torch.float32, copy=True).requires_grad_()
        self._weights[master], self._masters[weight] = weight, master
        self._buffers[master] = _pinned(weight)
        hooked: Any = weight
        hooked.register_post_accumulate_grad_hook(self._take)
        return master

    def _take(self, weight: Tensor) -> None:
        """Starts to copy the gradient of a weight to the host, and lets go of it on the card."""
        gradient, master = weight.grad, self._masters[weight]
        assert gradient is not None
        weight.grad, event = None, None
        first = master not in self._gradients and all(master is not f.master for f in self._flights)
        target = self._buffers[master] if first else _pinned(weight)
        with self._beside():
            target.copy_(gradient, non_blocking=True)
            if self._stream is not None:
                gradient.record_stream(self._stream)
                event = self._stream.record_event()
        self._flights.append(_Flight(master, target, event))
        size = sum(flight.gradient.nbytes for flight in self._flights)
        while self._flights and (self._stream is None or size - gradient.nbytes > AHEAD):
            size -= self._land()

    def _land(self) -> int:
        """Waits for the first gradient in flight, and adds it; returns its bytes."""
        master, gradient, event = self._flights.popleft()
        if event is not None:
            event.synchronize()
        if master in self._gradients:
            self._gradients[master].add_(gradient)
        else:
            self._gradients[master] = gradient
        return gradient.nbytes

    def _beside(self) -> AbstractContextManager[Any]:
        """The context of copies: the stream for them, after all work so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    @torch.no_grad()
    def clip(self, weights: Iterable[Tensor], most: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` for the gradients on the host, of all weights."""
        while self._flights:
            self._land()
        masters = [self._masters[weight] for weight in weights if weight in self._masters]
        gradients = [self._gradients[m] for m in masters if m in self._gradients]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self.grad_scale = ((norm.float() + 1e-6) / most).clamp(min=1)
        return norm.to(next(iter(self._masters)).device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates one weight after the other; each is copied to the card meanwhile."""
        while self._flights:
            self._land()
        groups = self.param_groups
        try:
            for group in groups:
                for master in group["params"]:
                    if master in self._gradients:
                        self.param_groups = [{**group, "params": [master]}]
                        self._update(master, self._gradients.pop(master))
        finally:
            self.param_groups = groups
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self.grad_scale = None

    def _update(self, master: Tensor, gradient: Tensor) -> None:
        master.grad = gradient.float()
        super().step()
        master.grad = None
        self._send(master)

    def _send(self, master: Tensor) -> None:
        """Starts to copy a master into its weight."""
        buffer = self._buffers[master].copy_(master)
        with self._beside():
            self._weights[master].copy_(buffer, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        while self._flights:
            self._land()
        self._gradients.clear()
        self.grad_scale = None

    def state_dict(self) -> dict[str, Any]:
        """As of AdamW, with the masters, which have more bits than weights in bf16."""
        return {**super().state_dict(), "masters": [master.detach() for master in self._weights]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        for master, value in zip(self._weights, state_dict["masters"], strict=True):
            master.copy_(value)


def _pinned(weight: Tensor) -> Tensor:
    """Host memory for a weight or its gradient; pinned if the weight is on a card."""
    global _pins
    if weight.is_cuda and _pins:
        try:
            return torch.empty_like(weight, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _pins = False
            log.warning(
                "the system pins no more memory, so gradients and weights are copied slower and "
                "not beside the backward pass: %s",
                str(error).partition("\n")[0],
            )
    return torch.empty_like(weight, device="cpu")


_pins = True  # whether the system has pinned all memory that was asked for


class TracedHostAdamW(Optimizer):
    """Has as many bytes on the card as `HostAdamW`: gradients until AHEAD bytes came after them."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self._held: deque[Tensor] = deque()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.register_post_accumulate_grad_hook(self._take)

    def _take(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._held.append(weight.grad)
        weight.grad = None
        while sum(gradient.nbytes for gradient in self._held) - self._held[-1].nbytes > AHEAD:
            self._held.popleft()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(weight)
        self._held.clear()

    def clip(self, weights: Iterable[Tensor], most: float) -> Tensor:
        return torch.zeros(())
