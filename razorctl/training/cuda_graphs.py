"""Micro-batches as CUDA graphs, without torch.compile: a forward and a backward pass in one launch.

The host launches a step of hundreds of kernels in a few calls: 47 ms for a step of razor on an H100
that takes 96 ms without (scripts/bench/phases.py). `doctor` tries graphs on the user's card.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from razorctl.config.job import SLOW_COMPILED, Job
from razorctl.config.recipe import Recipe
from razorctl.ops import kernels
from razorctl.ops.weight_copies import shared_by
from razorctl.step import Losses, forward_backward
from razorctl.training import state
from razorctl.training.compiled import failure_reason

log = logging.getLogger(__name__)

T = TypeVar("T")
Gradients = list[Tensor | None]  # of all parameters

# Micro-batches of a kind that run before one is captured: they compile and time kernels.
WARM_UPS = 2
KINDS = 6  # the most kinds that are captured, and the most others


def resolve(job: Job, recipe: Recipe, device: torch.device) -> tuple[Job, str]:
    """A resolved job with `cuda_graphs`, and a note if its steps run without them; "" if not."""
    if device.type != "cuda":
        note = "CUDA graphs need a CUDA device; steps run without." if job.cuda_graphs else ""
        return replace(job, cuda_graphs=False), note
    slow = job.compile and recipe.has_byte_budget
    note = SLOW_COMPILED.format(method=recipe.method) if slow else ""
    if job.cuda_graphs is not None and not (job.cuda_graphs and job.cached_embeddings):
        return job, note
    why = job.eager_reason(recipe.joint_budget)
    note = note if why is None or job.compile else f"CUDA graphs are not used, since {why}."
    return replace(job, cuda_graphs=why is None), note


class Graphs:
    """Graphs of one device; they share memory, since they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # Warm-ups and captures share a stream, as torch requires.
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], T]) -> T:
        """Calls `run` on the stream of the capture."""
        now = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            result = run()
        now.wait_stream(self.stream)
        return result

    def capture(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Captures `run`, which computes nothing; returns its result and the replay of the graph.

        A replay reads the same memory as `run`, and writes the result into the same memory.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: one of a DataLoader pins memory.
        mode = "thread_local"
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
            result = run()
        return result, graph.replay


class _Graph(NamedTuple):
    """A captured micro-batch.

    loss: the tensor into which `replay` writes the share of the loss. before: the gradients that
    the micro-batch adds to. after: the gradients afterwards.
    """

    replay: Callable[[], None]
    loss: Tensor
    before: Gradients
    after: Gradients


@dataclass
class _Kind:
    """Micro-batches of one kind.

    like: their structure, shapes and dtypes. warm: how many have run before one is captured.
    batch: the inputs of graphs; each micro-batch is copied there.
    """

    like: Any
    warm: int = 0
    batch: Any = None
    graphs: list[_Graph] = field(default_factory=list)


class CapturedPasses:
    """`step.passes` that runs micro-batches as CUDA graphs, after the first WARM_UPS of each kind.

    A kind has one shape. The first micro-batch of a step writes the gradients, and the others add
    to them, so there are two graphs of each kind. All share one memory for gradients: kinds after
    the first copy theirs there. At most KINDS kinds are captured, so that rare shapes run as they
    are. If a micro-batch cannot be captured, or shapes change all the time, training goes on
    without graphs after one warning. A graph would repeat random numbers drawn on the host, so a
    model that draws them is not captured. Results of graphs stay in memory until `forget`.
    """

    def __init__(self) -> None:
        self.works = True  # as far as is known
        self.forget()

    def forget(self) -> None:
        """Frees all graphs; called when the model or the sizes of micro-batches may change."""
        self._kinds: list[_Kind] = []
        self._maker: Graphs | None = None
        self._model: nn.Module | None = None
        self._weights: list[tuple[nn.Module, type, str, nn.Parameter, int]] = []
        self._parameters: list[nn.Parameter] = []
        self._gradients: Gradients = []  # that all graphs write

    def __call__(
        self,
        model: nn.Module,
        losses: Losses,
        batch: tuple[Any, Tensor, Tensor | None],
        job: Job,
        scaler: torch.amp.GradScaler,
        phase: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
        check: Callable[[Tensor, Tensor], object] = lambda *_: None,
    ) -> Tensor:
        passes = partial(forward_backward, model, losses, job=job, scaler=scaler)
        plain = partial(passes, batch, phase=phase, check=check)
        kind = self._kind(model, batch, job) if self.works else None
        if kind is None or kind.warm < WARM_UPS:
            return self._eager(kind, plain)
        before = [parameter.grad for parameter in self._parameters]
        graph = next((g for g in kind.graphs if _same(g.before, before)), None)
        if graph is None and self._lasting(before):
            graph = self._capture(kind, passes, batch, before)
        try:
            if graph is not None:
                with phase("forward"):
                    self._replay(graph, kind, batch)
        except Exception as error:
            self._give_up(error, before, batch[1].device)
            graph = None
        if graph is None:
            return self._eager(kind, plain)
        with phase("backward"):
            self._set(graph.after)
        return graph.loss.clone()

    def _kind(self, model: nn.Module, batch: Any, job: Job) -> _Kind | None:
        """The kind of a micro-batch; None if it is one too many to be captured.

        Graphs of weights that have other memory now are forgotten first.
        """
        if self._moved(model):
            self.forget()
            self._model, self._maker = model, Graphs(batch[1].device)
            self._parameters = list(model.parameters())
            self._weights = [
                (module, type(module), name, parameter, parameter.data_ptr())
                for module in model.modules()
                for name, parameter in module.named_parameters(recurse=False)
            ]
        leaves, structure = tree_flatten(batch)
        like = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves]
        like = [job.accumulate, structure, like]
        kind = next((kind for kind in self._kinds if kind.like == like), None)
        captured = sum(bool(kind.graphs) for kind in self._kinds)
        if kind is None:
            if len(self._kinds) - captured == KINDS:
                self._end(f"micro-batches have more than {KINDS} shapes")
                return None
            kind = _Kind(like)
            self._kinds.append(kind)
        return kind if kind.graphs or captured < KINDS else None

    def _moved(self, model: nn.Module) -> bool:
        """Whether the model or the memory of its weights has changed."""
        return self._model is not model or any(
            type(module) is not kind
            or getattr(module, name, None) is not weight
            or weight.data_ptr() != place
            for module, kind, name, weight, place in self._weights
        )

    def _eager(self, kind: _Kind | None, plain: Callable[[], Tensor]) -> Tensor:
        """Runs a micro-batch without graphs."""
        if kind is not None:
            kind.warm += 1
        with self._shared():
            return plain() if self._maker is None else self._maker.warm_up(plain)

    def _lasting(self, gradients: Gradients) -> bool:
        """Whether gradients have the same memory in later steps.

        They do not in the rest of a step that began before the first graph.
        """
        graphs = (graph for kind in self._kinds for graph in kind.graphs)
        none = all(gradient is None for gradient in gradients)
        return none or any(_same(graph.after, gradients) for graph in graphs)

    def _capture(
        self, kind: _Kind, passes: Callable[[Any], Tensor], batch: Any, before: Gradients
    ) -> _Graph | None:
        """Captures a micro-batch; if that fails, returns None and ends the use of graphs."""
        assert self._maker is not None
        if kind.batch is None:
            kind.batch = tree_map_only(Tensor, torch.clone, batch)
        host = state.random_states(cuda=False)
        try:
            with shared_by(1), self._shared():  # a graph would read copies of weights of another
                loss, replay = self._maker.capture(partial(passes, kind.batch))
            graph = _Graph(replay, loss, before, [p.grad for p in self._parameters])
        except Exception as error:
            self._give_up(error, before, batch[1].device)
            return None
        finally:
            drawn = _listed(host) != _listed(state.random_states(cuda=False))
            state.set_random_states(host)
        self._set(before)
        if drawn:
            self._end("the model draws random numbers on the host, which a graph would repeat")
            return None
        kind.graphs.append(graph)
        self._gradients = self._gradients or graph.after
        return graph

    def _replay(self, graph: _Graph, kind: _Kind, batch: Any) -> None:
        for target, source in zip(tree_leaves(kind.batch), tree_leaves(batch), strict=True):
            if isinstance(source, Tensor):
                target.copy_(source)
        graph.replay()

    def _give_up(self, error: Exception, before: Gradients, device: torch.device) -> None:
        """Ends the use of graphs after an error; raises it on a lack of memory or a dead card."""
        self._set(before)
        if isinstance(error, torch.OutOfMemoryError) or kernels.unusable(device) is not None:
            raise error
        self._end(failure_reason(error))

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Inside the block gradients have the memory of the first graph's gradients."""

        def move(memory: Tensor, parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad is not memory:
                memory.copy_(parameter.grad)
                parameter.grad = memory

        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(move, memory)
            )
            for parameter, memory in zip(self._parameters, self._gradients, strict=False)
            if memory is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _set(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _end(self, why: str) -> None:
        """Ends the use of graphs."""
        log.warning("training continues without CUDA graphs: %s", why)
        self.works = False
        self.forget()


def _same(some: Gradients, others: Gradients) -> bool:
    """Whether two lists have the same gradient tensors."""
    return all(a is b for a, b in zip(some, others, strict=True))


def _listed(states: Any) -> Any:
    """The states of generators as lists, for comparison."""
    return tree_map_only(Tensor, Tensor.tolist, states)
