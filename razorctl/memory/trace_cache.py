"""The trace of a training step and the cache of traces; neither imports torch."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.system import documents, folders
from razorctl.system.atomic import atomic_file

LIBRARIES = ("razorctl", "torch", "timm", "transformers")
FUSED = "fused by inductor"  # of the `op` of kernels of a compiled step
LONGEST = 10  # seconds that a process waits for another that writes the cache


class KernelWork(NamedTuple):
    """The work of a kernel; its time depends on it.

    Args:
        precision: a name in `gpus.PRECISIONS`, or "depthwise" for depthwise convolutions.
        operations: multiplications and additions in its products.
        bytes: bytes read and written.
        reduces: whether its results wait for sums or maxima of its operands, as in norms.
        own: whether it is a kernel of razorctl instead of PyTorch.
        terms: terms of each sum of an int8 product, 0 for other kernels.
        programs: programs of 128 x 128 sums that share a product.
        written: bytes that an int8 product writes after its last term, or that a FUSED kernel may
            move beside `bytes`.
        op: a name in `planning.times.instructions`, if its instructions count.
        elements: results for each of which it issues these instructions.
        plain: those among them that the function of `op` is not applied to.
    """

    precision: str
    operations: int
    bytes: int
    reduces: bool = False
    own: bool = False
    terms: int = 0
    programs: int = 0
    written: int = 0
    op: str = ""
    elements: int = 0
    plain: int = 0


class Calls(NamedTuple):
    """The host's calls in a step: of PyTorch's operations, and of razorctl's ops."""

    aten: int = 0
    ops: int = 0


NONE = Calls()


@dataclass(frozen=True)
class Trace:
    """A traced training step; sizes are in bytes.

    Args:
        peak: the most bytes of all tensors.
        weights, gradients, optimizer: parts of `peak`; buffers count as weights. The rest of it is
            activations and temporaries.
        workspace: the most bytes of tensors and CUDA kernels' workspaces together, minus `peak`.
        saved: bytes that a micro-batch stores for backward.
        kernels: how often each runs in a step.
        compiled: how often each runs if torch.compile compiles the step; see `fusion`.
        fused: whether an attention kernel is fused.
        block, rest: bytes of the parameters of the largest block, and outside all blocks.
        trained: the number of weights with a gradient.
        calls: of the whole step.
        update: calls after the last micro-batch, by the optimizer.
    """

    peak: int
    workspace: int
    weights: int
    gradients: int
    optimizer: int
    saved: int
    kernels: Mapping[KernelWork, int]
    fused: bool
    compiled: Mapping[KernelWork, int] = field(default_factory=dict)
    block: int = 0
    rest: int = 0
    trained: int = 0
    calls: Calls = NONE
    update: Calls = NONE

    @property
    def highest(self) -> int:
        """The most bytes of tensors and workspaces together, on CUDA."""
        return self.peak + self.workspace

    def on(self, device: str) -> int:
        """The most bytes of the step on a kind of device; for a CPU, without workspaces."""
        return self.peak if device == "cpu" else self.highest


# A kernel, and how often it runs.
Listed = tuple[str, int, int, bool, bool, int, int, int, str, int, int, int]


@dataclass(frozen=True)
class Traced(Trace):
    """A trace in the form that `dump` writes."""

    kernels: Sequence[Listed]  # type: ignore[assignment]
    compiled: Sequence[Listed]  # type: ignore[assignment]


@dataclass(frozen=True)
class Refused:
    """Why a step cannot be traced."""

    refused: str


class Cache:
    """Facts by name, in a file of the user's cache directory for this version of the code.

    An unreadable file counts as empty. If it cannot be written, facts live as long as the object.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.file = (folder or folders.cache()) / f"traces-{_code()}.json"
        self._version: tuple[int, ...] | None = None
        self.facts = self._stored()

    def get(self, *name: Any) -> Any:
        """The fact of this name, else None."""
        return self.facts.get(documents.text(name))

    def put(self, fact: Any, *name: Any) -> None:
        """Stores a fact, a JSON value, under a name; keeps the facts of other processes."""
        from filelock import FileLock  # imported here: a cached plan does not need it

        self.facts[documents.text(name)] = fact
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.file}.lock", timeout=LONGEST):
                if self._status() != self._version:  # another process has written it
                    self.facts = self._stored() | self.facts
                with atomic_file(self.file, replace=True) as partial:
                    partial.write_text(documents.text(self.facts))
                self._version = self._status()

    def _stored(self) -> dict[str, Any]:
        """The facts in the file; none if it cannot be read or has another format."""
        self._version = self._status()
        return documents.read_cached(self.file, dict[str, Traced | Refused | int]) or {}

    def _status(self) -> tuple[int, ...] | None:
        """Identifies a version of the file; None if there is no file."""
        with suppress(OSError):
            status = self.file.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None


LISTS = "kernels", "compiled"


def dump(trace: Trace) -> dict[str, Any]:
    """A trace as a JSON value."""
    lists = {name: [[*kernel, n] for kernel, n in getattr(trace, name).items()] for name in LISTS}
    return asdict(replace(trace, kernels={}, compiled={})) | lists


def load(document: dict[str, Any]) -> Trace:
    """The inverse of `dump`."""
    kernels = {name: {KernelWork(*kernel): n for *kernel, n in document[name]} for name in LISTS}
    calls = {name: Calls(*document[name]) for name in ("calls", "update")}
    return Trace(**{**document, **kernels, **calls})


@cache
def _code() -> str:
    """A digest of the code and of library versions; traces depend on both."""
    digest = sha256(" ".join(version(library) for library in LIBRARIES).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".json"):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
