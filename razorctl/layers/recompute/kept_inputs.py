"""The inputs that recomputed code stores; see `code`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from razorctl.errors import UsageError
from razorctl.layers.recompute.replayed_state import Context, Rows
from razorctl.rules.derived import Derived
from razorctl.rules.packed import Packed

RESULT = -1  # the key of the code's result in `Code.read`


class Place(NamedTuple):
    """How the values of a tensor that the code read are stored.

    Args:
        number: its index among the copies, or among the tensors stored as they are.
        packed: whether it is a copy.
        like: the tensor's shape, dtype, strides, and whether it requires a gradient.
        images: its memory format, if its channels are axis 1 and the rows of the copy are pixels.
    """

    number: int
    packed: bool
    like: tuple[torch.Size, torch.dtype, tuple[int, ...], bool]
    images: torch.memory_format | None = None

    def read(self, copy: Packed) -> Tensor:
        """The values of the tensor, from its copy."""
        shape, dtype, *_ = self.like
        if self.images is None:
            return copy.values().to(dtype).reshape(shape)
        return copy.images(shape, dtype, self.images)


class PartOutput(NamedTuple):
    """The output of a part, and how much the code had stored before the call.

    Args:
        place: of the output.
        likes: the number of tensors that autograd had saved.
        copies, exact: the number of packed and of unpacked inputs.
    """

    place: Place
    likes: int
    copies: int
    exact: int


@dataclass(frozen=True)
class CodeInputs(Derived):
    """The inputs of a recomputation: `sources` are the copies, `others` the other tensors."""

    def read(self, places: Sequence[Place]) -> list[Tensor]:
        """The values of the copies; read once for all readers of these inputs."""

        def read() -> list[Tensor]:
            pairs = zip(self.sources, places, strict=False)  # later ones are not needed yet
            return [place.read(source) for source, place in pairs]

        assert self.cell is not None
        given: list[Tensor] = self.cell.take(read)
        return given


@dataclass(frozen=True)
class CodeOutput(Derived):
    """A tensor that the code computes.

    Args:
        sources: the `CodeInputs` of the code.
        code: its `CodeAgain`.
        number: of the call of a part that reads the tensor, or RESULT.
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
    """The object that autograd saves in place of a tensor of the code."""

    code: Any
    number: int


class Code:
    """A piece of code, and what its first run tells its second.

    Args:
        owner: the module that the code belongs to.
        name: the name and class of the owner, for messages.
        call: the code.
        parts: the layers that it calls; they are not recomputed.
        names: the names of its positional arguments.
        feeds: whether to offer the first result as a derived activation.
    """

    channels: Collection[int] = ()  # possible numbers of channels of images among the arguments
    context: Context
    by_rules: ClassVar[bool] = False  # whether the owner's rules pack, and it may `measure`
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
        self.likes: list[tuple[torch.Size, torch.dtype]] = []  # of the tensors that autograd saves
        self.kept: dict[int, Tensor] = {}  # saved tensors of the last run
        self.read: dict[int, Tensor] = {}  # inputs of the parts in it, by number of the call
        self.wanted: set[int] = set()  # numbers in `read` that other layers need recomputed
        self.outputs: list[PartOutput] = []
        self.leaves: list[Any] = []  # the leaves of the arguments; a `Place` for each stored tensor
        self.packed: list[Place] = []  # of all copies, in order
        self.tree: Any = None
        self.caches: dict[Any, Callable[[], Any]] = {}  # makes the caches of a second run
        self.keeper: Any = None
        self.trial: CodeInputs | None = None  # the inputs of the second run while it measures

    def pack(self, t: Tensor) -> KeptByCode:
        """The object that autograd saves in place of a tensor of the code."""
        self.likes.append((t.shape, t.dtype))
        return KeptByCode(self, len(self.likes) - 1)

    def unpack(self, kept: KeptByCode) -> Tensor:
        """The tensor of the second run that corresponds to a saved one."""
        raise NotImplementedError

    def derive(self, views: Sequence[Tensor]) -> Sequence[Packed]:
        """The derived copies of all arguments in `views`, or none."""
        return ()

    def copy(self, x: Tensor, rows: Rows) -> Packed | None:
        """The copy of an activation, perhaps another layer's; None to store it as it is."""
        raise NotImplementedError

    def offer(self, x: Tensor, inputs: Callable[[], CodeInputs], number: int) -> None:
        """Shares a tensor that the code computes, as derived from `inputs`, with its reader."""

    def changes(self) -> UsageError:
        """The error for code that changes an argument in place."""
        return UsageError(
            f"{self.name} changes an argument in place, so it cannot be recomputed; change a clone "
            "of it."
        )

    def differs(self) -> UsageError:
        """The error for code whose second run differs from its first."""
        return UsageError(
            f"{self.name} executes different operations when it is recomputed in backward; "
            "choose method 'full' for this model."
        )
