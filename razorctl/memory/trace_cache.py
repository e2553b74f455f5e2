"""What tracing a training step tells, and the cache of it; importing neither needs torch."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

LIBRARIES = ("razorctl", "torch", "timm", "transformers")


class Kernel(NamedTuple):
    """What an operation does, as far as its time depends on it.

    precision: of its products, a name in `gpus.PRECISIONS`, or depthwise for convolutions of one
    channel each. operations: of products, additions counted too. bytes: read and written.
    """

    precision: str
    operations: int
    bytes: int


@dataclass(frozen=True)
class Trace:
    """A training step, traced; in bytes.

    peak: most that tensors take at a time; weights, gradients and optimizer are the shares of
    these at that moment, buffers being weights, and the rest is activations and temporaries.
    workspace: by how much kernels exceed that at some moment, on CUDA, by what they take inside.
    saved: between the forward and backward pass of a micro-batch.
    kernels: how often each runs in a step. fused: whether attention, if any, is fused.
    """

    peak: int
    workspace: int
    weights: int
    gradients: int
    optimizer: int
    saved: int
    kernels: Mapping[Kernel, int]
    fused: bool

    @property
    def highest(self) -> int:
        """Most that tensors and the workspaces of kernels take at a time on CUDA."""
        return self.peak + self.workspace

    def on(self, device: str) -> int:
        """What a step takes at a time on a kind of device, as far as that is known."""
        return self.peak if device == "cpu" else self.highest


class Cache:
    """Facts by name, kept in a file of the user's cache directory for these versions of the code.

    What cannot be read counts as empty, and what cannot be written is found out again.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            from platformdirs import user_cache_dir  # a machine that only runs steps may lack it

            folder = Path(user_cache_dir("razorctl"))
        self.file = folder / f"traces-{_code()}.json"
        self.facts: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self.facts = dict(json.loads(self.file.read_text()))

    def get(self, *name: Any) -> Any:
        """The fact of that name, None if there is none."""
        return self.facts.get(json.dumps(name))

    def put(self, fact: Any, *name: Any) -> None:
        """Keeps a fact, of what JSON can hold."""
        self.facts[json.dumps(name)] = fact
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.file.parent, suffix=".partial", delete=False
            ) as partial:
                json.dump(self.facts, partial)
            Path(partial.name).replace(self.file)


def dump(trace: Trace) -> dict[str, Any]:
    """A trace as JSON can hold it."""
    return asdict(trace) | {"kernels": [[*kernel, n] for kernel, n in trace.kernels.items()]}


def load(document: dict[str, Any]) -> Trace:
    """What `dump` was given."""
    kernels = {Kernel(*kernel): n for *kernel, n in document["kernels"]}
    return Trace(**{**document, "kernels": kernels})


def _code() -> str:
    """A digest of what a trace depends on beside its arguments."""
    digest = sha256(" ".join(version(library) for library in LIBRARIES).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*")):
        if file.suffix in (".py", ".json"):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
