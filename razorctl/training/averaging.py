"""The exponential moving average of a model's weights and buffers, by torch's AveragedModel."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average:
    """The exponential moving average of a model.

    The decay of update n is min(decay, (1 + n) / (10 + n)), so that the average of a short run
    leaves the first weights behind. Integers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._averaged = AveragedModel(model, multi_avg_fn=self._blend, use_buffers=True)

    @property
    def model(self) -> nn.Module:
        """The copy of the model with the averages."""
        averaged: nn.Module = self._averaged.module
        return averaged

    def update(self, model: nn.Module) -> None:
        """Averages the weights after a step; the first weights are copied."""
        self._averaged.update_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        """The number of updates; the averages are in the state dict of `model`."""
        return {"updates": int(self._updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates.fill_(state["updates"])

    @property
    def _updates(self) -> Tensor:
        updates: Tensor = self._averaged.n_averaged  # on the CPU
        return updates

    def _blend(self, averages: Any, values: Any, _: Any) -> None:
        done = int(self._updates)
        decay = min(self.decay, (1 + done) / (10 + done))
        if averages[0].is_floating_point():
            blend = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            blend(averages, values, None)
        else:
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)
