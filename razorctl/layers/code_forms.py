"""Code that runs again, and the forms in which it keeps; see `code_again`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from razorctl.errors import UsageError
from razorctl.layers.autocast import AVAILABLE
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.fused_attention import random_state
from razorctl.layers.second_run import Buffer
from razorctl.rules.derived import Derived

RESULT = -1  # the place of the result of the code among `Code.read`


class Place(NamedTuple):
    """Where the values of a tensor are that the code got.

    Args:
        number: among the copies, or among the tensors kept as they are.
        packed: whether it is a copy.
        like: the tensor's shape, dtype, strides, and whether it has a gradient.
        images: its memory format, if its channels are axis 1 and the copy's rows its pixels.
    """

    number: int
    packed: bool
    like: tuple[torch.Size, torch.dtype, tuple[int, ...], bool]
    images: torch.memory_format | None = None


class PartOutput(NamedTuple):
    """The output of a part, and how much the code had before its call.

    Args:
        place: of the output.
        likes, copies, exact: numbers of tensors that the code had kept, and of those kept for it.
    """

    place: Place
    likes: int
    copies: int
    exact: int


@dataclass(frozen=True)
class CodeInputs(Derived):
    """The copies and the tensors that code runs again with: `sources` and `others`."""

    def read(self) -> list[Tensor]:
        """The values of the copies; each is read once for all that keep this form."""
        assert self.cell is not None
        given: list[Tensor] = self.cell.take(lambda: [source.values() for source in self.sources])
        return given


@dataclass(frozen=True)
class CodeOutput(Derived):
    """A tensor that the code makes.

    Args:
        sources: the `CodeInputs` of the code.
        code: its `CodeAgain`.
        number: of the call of a part that got the tensor, or RESULT.
    """

    code: Any = None
    number: int = RESULT

    def saved_by(self, ctx: Any) -> None:
        assert self.code is not None
        super().saved_by(ctx)
        self.code.wanted.add(self.number)

    def make(self) -> Tensor:
        (inputs,) = self.sources
        assert self.code is not None
        assert isinstance(inputs, CodeInputs)
        made: Tensor = self.code.output(self.number, inputs)
        return made


class Context(NamedTuple):
    """The state of randomness and of autocast in which the code ran first."""

    random: Tensor | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def now(cls, device: torch.device) -> "Context":
        kind = device.type
        on = kind in AVAILABLE and torch.is_autocast_enabled(kind)
        return cls(random_state(device), torch.get_autocast_dtype(kind) if on else None)

    def autocast(self, device: torch.device) -> Any:
        return torch.autocast(device.type, self.dtype, enabled=self.dtype is not None)


class Code:
    """Some code, and what its two runs tell each other.

    Args:
        owner: the layer whose code it is; it packs by its rules.
        call: the code.
        parts: the layers that it calls, which do not run again.
        names: of its arguments, as far as they are positional.
        feeds: whether a layer outside makes the first of its results again.
    """

    def __init__(
        self,
        owner: RazorLayer,
        call: Callable[..., Any],
        parts: Sequence[nn.Module] = (),
        names: Sequence[str] = (),
        feeds: bool = False,
    ) -> None:
        self.owner, self.call, self.parts = owner, call, parts
        self.names, self.feeds = names, feeds
        self.likes: list[tuple[torch.Size, torch.dtype]] = []  # of what autograd keeps of the code
        self.kept: dict[int, Tensor] = {}  # of the last run
        self.read: dict[int, Tensor] = {}  # what the parts got in it, by number of the call
        self.wanted: set[int] = set()  # numbers in `read` that other layers make again
        self.outputs: list[PartOutput] = []
        self.leaves: list[Any] = []  # of the arguments: a `Place` for each tensor
        self.tree: Any = None
        self.keeper: Any = None
        self.buffers: list[Buffer] = []
        self.context = Context()

    def differs(self) -> UsageError:
        """The error of code whose second run is not like its first."""
        kind = stock_type(self.owner).__name__
        return UsageError(
            f"{self.owner.place or 'a layer'} ({kind}) does other operations when it runs again in "
            "the backward pass; choose method 'full' for this model."
        )
