"""Code that runs again, and the forms in which it keeps; see `code_again`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from razorctl.errors import UsageError
from razorctl.layers.recompute.replayed_state import Context, Rows
from razorctl.rules.derived import Derived
from razorctl.rules.packed import Packed

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

    def read(self, copy: Packed) -> Tensor:
        """The values of the copy that was made of the tensor."""
        shape, dtype, *_ = self.like
        if self.images is None:
            return copy.values().to(dtype).reshape(shape)
        return copy.images(shape, dtype, self.images)


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

    def read(self, places: Sequence[Place]) -> list[Tensor]:
        """The values of the copies; each is read once for all that keep this form."""

        def read() -> list[Tensor]:
            pairs = zip(self.sources, places, strict=False)  # later ones are of no use yet
            return [place.read(source) for source, place in pairs]

        assert self.cell is not None
        given: list[Tensor] = self.cell.take(read)
        return given


@dataclass(frozen=True)
class CodeOutput(Derived):
    """A tensor that the code makes.

    Args:
        sources: the `CodeInputs` of the code.
        code: its `CodeAgain`.
        number: of the call of a part that got the tensor, or RESULT.
    """

    lasting = False
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


class KeptByCode(NamedTuple):
    """The object that autograd holds in place of a tensor that code keeps."""

    code: Any
    number: int


class Code:
    """Some code, and what its two runs tell each other.

    Args:
        owner: the module whose code it is.
        name: the name and class of the owner, for messages.
        call: the code.
        parts: the layers that it calls, which do not run again.
        names: of its arguments, as far as they are positional.
        feeds: whether a layer outside makes the first of its results again.
    """

    channels: Collection[int] = ()  # how many an image among the arguments has
    context: Context
    by_rules: ClassVar[bool] = False  # whether rules of the owner pack, and it may `measure`
    measure: Callable[..., None]

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        call: Callable[..., Any],
        parts: Sequence[nn.Module] = (),
        names: Sequence[str] = (),
        feeds: bool = False,
    ) -> None:
        self.owner, self.name, self.call, self.parts = owner, name, call, parts
        self.names, self.feeds = names, feeds
        self.likes: list[tuple[torch.Size, torch.dtype]] = []  # of what autograd keeps of the code
        self.kept: dict[int, Tensor] = {}  # of the last run
        self.read: dict[int, Tensor] = {}  # what the parts got in it, by number of the call
        self.wanted: set[int] = set()  # numbers in `read` that other layers make again
        self.outputs: list[PartOutput] = []
        self.leaves: list[Any] = []  # of the arguments: a `Place` for each that is kept
        self.packed: list[Place] = []  # of all copies
        self.tree: Any = None
        self.caches: dict[Any, Callable[[], Any]] = {}  # makes those that the second run fills
        self.keeper: Any = None
        self.trial: CodeInputs | None = None  # which the second run gets while it measures

    def pack(self, t: Tensor) -> KeptByCode:
        """The object that autograd holds in place of a tensor that the code keeps."""
        self.likes.append((t.shape, t.dtype))
        return KeptByCode(self, len(self.likes) - 1)

    def unpack(self, kept: KeptByCode) -> Tensor:
        """A tensor that the code keeps, of the second run."""
        raise NotImplementedError

    def derive(self, views: Sequence[Tensor]) -> Sequence[Packed]:
        """The derived copies of arguments, together, since they may view one tensor; or none."""
        return ()

    def copy(self, x: Tensor, rows: Rows) -> Packed | None:
        """The copy of an activation, which may be another layer's; None keeps it as it is."""
        raise NotImplementedError

    def offer(self, x: Tensor, inputs: Callable[[], CodeInputs], number: int) -> None:
        """Offers what the code makes of its inputs to the layer that it feeds."""

    def changes(self) -> UsageError:
        """The error of code that changes an argument in place."""
        return UsageError(
            f"{self.name} changes an argument in place, so it cannot be run again; change a clone "
            "of it."
        )

    def differs(self) -> UsageError:
        """The error of code whose second run is not like its first."""
        return UsageError(
            f"{self.name} does other operations when it runs again in the backward pass; choose "
            "method 'full' for this model."
        )
