"""The learner: a model with its optimizer, schedule and loss scaling, as checkpoints save them."""

import gc
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.optimizer import build_optimizer
from razorctl.step import ByLogits, forward_backward, refuse_infinite, train_step
from razorctl.system import processes
from razorctl.training import parallel, state
from razorctl.training.averaging import Average
from razorctl.training.compiled import Trial
from razorctl.training.cuda_graphs import CapturedPasses
from razorctl.training.recovery import Relief, parted

log = logging.getLogger(__name__)

T = TypeVar("T")
PARTS = ("optimizer", "scheduler", "scaler", "trial")  # attributes with a state dict


class Learner:
    """The model of a resolved job, its optimizer, schedule, loss scaling and trial of compiling.

    parts: the number of equal parts of each micro-batch, which are taken one after the other. torn:
    whether a step failed while it changed the weights.
    """

    def __init__(self, model: nn.Module, losses: ByLogits, device: torch.device) -> None:
        self.model, self.job = model, losses.job
        job = losses.job
        self.average = None if job.ema is None else Average(model, job.ema)
        together, self._losses = parallel.parallel(model, losses, job, device)
        self.optimizer = build_optimizer(model, job)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, job.decay)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")
        self.trial = Trial(together, job)
        self._captured = CapturedPasses() if job.captured else None
        self.parts, self.torn = 1, False
        self._transient: dict[str, Any] | None = None  # of a checkpoint, until the first step

    def relieve(self, relief: Relief) -> None:
        """Takes later steps with the smaller memory of a relief."""
        self.parts = relief.parts
        if not relief.captured:
            self._captured = None

    @property
    def rate(self) -> float:
        """The highest learning rate of the next step; layers may have lower ones."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def beside_graphs(self, evaluate: Callable[[], T]) -> T:
        """Returns `evaluate()`; frees the CUDA graphs first if it runs out of memory with them."""
        try:
            return evaluate()
        except torch.OutOfMemoryError:
            if self._captured is None:
                raise
        log.warning("out of memory in an evaluation; from now on, steps run without CUDA graphs.")
        self._captured = None
        gc.collect()  # only now, since the error held what its frames held
        torch.cuda.empty_cache()
        return evaluate()

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and exported: the average, if there is one."""
        return self.model if self.average is None else self.average.model

    def end(self) -> None:
        """Copies the exported weights into the model; called after the last step."""
        self._captured = None  # what is evaluated then needs memory too
        if self.average is not None:
            self.model.load_state_dict(self.average.model.state_dict())
            self.average = None

    def begin(self) -> None:
        """Restores the random states of `load`; called before the first step."""
        if self._transient is not None:
            state.load_transient(self.model, self._transient)
            self._transient = None

    def step(
        self, micro_batches: Iterable[tuple[Any, Tensor]], total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Takes a step; arguments: see `train_step`.

        Raises DivergedError if the loss or the gradient is not finite, and OutOfMemoryError. After
        any error the state is as before the step, unless `torn`.
        """
        before, job = state.transient(self.model), self.job
        if self.parts > 1:
            micro_batches = (part for each in micro_batches for part in parted(each, self.parts))
            accumulate = job.accumulate * self.parts
            if job.packing:  # a packed micro-batch may have too few rows for as many parts
                micro_batches = list(micro_batches)
                accumulate = len(micro_batches)
            job = replace(job, accumulate=accumulate)
        try:
            if self.trial.works:
                micro_batches = list(micro_batches)  # taken again if compiling fails
            if not all(module.training for module in self.model.modules()):
                self.model.train()  # which takes longer than to ask
            loss_and_norm = self.trial.step(
                train_step,
                self._losses,
                micro_batches,
                self.optimizer,
                job,
                self.scaler,
                check=self._check,
                unsynced=parallel.unsynced,
                total=total,
                run=self._captured or forward_backward,
            )
        except Exception:
            if self._captured is not None:
                self._captured.forget()  # the model may change before the next step
            self.model.zero_grad()
            self.optimizer.zero_grad()
            state.load_transient(self.model, before)
            raise
        if self.average is not None:
            self.average.update(self.model)
        self.torn = False
        self.scheduler.step()
        return loss_and_norm

    def _check(self, loss: Tensor, norm: Tensor) -> None:
        refuse_infinite(loss, norm, scaled=self.scaler.is_enabled())
        self.torn = True  # until all weights are changed

    @property
    def finite(self) -> bool:
        """Whether all weights in this process are finite."""
        parts = (parallel.local(weight.detach()) for weight in self.model.parameters())
        return all(bool(part.sum(dtype=torch.float32).isfinite()) for part in parts)  # in one pass

    def snapshot(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """The state dict of what is evaluated, and the state of all else, for a checkpoint.

        Collective. The tensors are those that the next step changes, or copies if they were
        sharded.
        """
        states = {name: getattr(self, name).state_dict() for name in PARTS}
        transient = self._transient or state.transient(self.model)
        transients = processes.every(tree_map_only(Tensor, Tensor.cpu, transient))
        snapshot: tuple[Mapping[str, Tensor], dict[str, Any]] = parallel.full_tensors(
            (self.evaluated.state_dict(), {**states, **self._averaged(), "transient": transients})
        )
        return snapshot

    def _averaged(self) -> dict[str, Any]:
        """The state of the average, and the trained weights beside it."""
        if self.average is None:
            return {}
        return {"average": self.average.state_dict(), "trained": self.model.state_dict()}

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Restores a snapshot from a checkpoint, and returns the checkpoint's state. Collective.

        The job's learning rate replaces the snapshot's.
        """
        snapshot = state.read(folder)
        state.load_model(folder, self.evaluated)
        if self.average is not None:
            self.average.load_state_dict(snapshot["average"])
            self.model.load_state_dict(snapshot["trained"])
        parallel.shard(snapshot["optimizer"], self.optimizer)
        for name in PARTS:
            getattr(self, name).load_state_dict(snapshot[name])
        self._transient = snapshot["transient"][processes.rank()]
        self.scheduler.base_lrs = list(self._rates)
        share = self.job.decay(self.scheduler.last_epoch)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["initial_lr"] = rate
            if isinstance(group["lr"], Tensor):  # in torchao's optimizers
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        return snapshot
