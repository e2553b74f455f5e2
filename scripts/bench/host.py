"""Says what a training step of razor takes the host, beside full's, if a card did all the rest.

    .venv/bin/python scripts/bench/host.py [--steps 100]

A ViT of depth 12 and of tiny tensors trains on the CPU, under bf16 autocast and on one thread. Ops
of razor run what they run on a card of compute capability 8.9, but that nothing is launched: the
first launch of a kind runs Triton's binder, later ones what `launch` does without it. So the time
is that of Python, autograd and PyTorch's dispatcher; a card's driver takes a few microseconds more
for each launch. Steps of razor and full take turns, in seconds of the process. The counts are
exact. The script writes results/host.json.
"""

import json
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from record import device_name, head, options, write
from timm.models.vision_transformer import VisionTransformer
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import razorctl
import razorctl.ops.triton
from razorctl.layers.kinds.linear import Linear
from razorctl.ops import kernels
from razorctl.ops.op import OPS
from razorctl.ops.triton.launch import WARP, Kernel

CAPABILITY, RATIO, DEPTH = 89, 0.9, 12


class Compiled:
    """A stand-in for a compiled kernel, which counts its launches."""

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.launches.update([self.name])


def _bound(kernel: Kernel, launches: Counter[str]) -> Callable[..., Compiled]:
    """A stand-in for `kernel.run`: it runs Triton's binder, and counts the launch."""
    backend = make_backend(GPUTarget("cuda", CAPABILITY, WARP))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(*args: Any, grid: Any, warmup: bool, **settings: Any) -> Compiled:
        bind(*args, **settings)
        launches[kernel.__name__] += 1
        return Compiled(kernel.__name__, launches)

    return run


@contextmanager
def card() -> Iterator[Counter[str]]:
    """Inside, ops on CPU tensors run as on a card, without launches, which it counts by kernel."""
    launches: Counter[str] = Counter()
    with ExitStack() as stack:
        names = [name for _, name, _ in pkgutil.iter_modules(razorctl.ops.triton.__path__)]
        modules = {name: import_module(f"razorctl.ops.triton.{name}") for name in names}
        values = {id(v): v for m in modules.values() for v in vars(m).values()}
        for kernel in (value for value in values.values() if isinstance(value, Kernel)):
            stack.enter_context(patch.object(kernel, "run", _bound(kernel, launches)))
            stack.enter_context(patch.object(kernel, "plans", {}))
        gemm: Any = modules["gemm"]
        stack.enter_context(patch.object(gemm, "_capability", lambda device: CAPABILITY))
        first = patch.object(gemm.tuning, "fastest", lambda ways, *_: next(iter(ways.values())))
        stack.enter_context(first)
        stack.enter_context(patch.object(Linear, "SMALLEST", 0))
        for op in OPS.values():
            if "cuda" in op.kernels:
                stack.callback(op.register, "cpu", op.kernels.get("cpu", op.body))
                op.register("cpu", op.kernels["cuda"])
        stack.enter_context(kernels.assumed(dot=True))
        yield launches


def stepper(ratio: float | None) -> Callable[[], None]:
    """A training step of the ViT, of razor's at a ratio or of full's."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 64, "depth": DEPTH, "num_heads": 1, "num_classes": 10}
    model = VisionTransformer(img_size=32, patch_size=16, **sizes).train()
    if ratio is not None:
        razorctl.sparsify(model, razorctl.Recipe("razor", ratio))
    x, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        F.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


class Calls(TorchDispatchMode):
    """Counts operations: those of PyTorch, and razorctl's own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found["op_calls" if func.namespace == "razorctl" else "aten_calls"] += 1
        return func(*args, **(kwargs or {}))


def counts() -> dict[str, Any]:
    """The launches and calls of a step of razor, and the calls of a step of full."""
    every: dict[str, Any] = {}
    for name, ratio in (("razor", RATIO), ("full", None)):
        with card() as launches:
            step = stepper(ratio)
            step()
            launches.clear()
            with Calls() as calls:
                step()
        every[name] = {"launches": launches.total(), "op_calls": 0, **calls.found}
        every[name]["by_kernel"] = dict(launches.most_common())
    return every


def timed(steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps that take turns."""
    torch.set_num_threads(1)
    full = stepper(None)
    seconds: dict[str, list[float]] = {"razor": [], "full": []}
    with card():
        razor = stepper(RATIO)
        for number in range(-3, steps):
            for name, step in (("razor", razor), ("full", full)):
                start = time.process_time()
                step()
                if number >= 0:
                    seconds[name].append(1e3 * (time.process_time() - start))
    return seconds


def main() -> None:
    parser = options(__doc__, "host")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    times = timed(args.steps)
    ratios = sorted(r / f for r, f in zip(times["razor"], times["full"], strict=True))
    document = {
        **head(device_name(), "torch", "triton"),
        "precision": "bf16",
        "model": f"ViT of depth {DEPTH}, 64 wide, razor@{RATIO}",
        "steps": args.steps,
        "host_ms": {name: median(each) for name, each in times.items()},
        "host_time_vs_full": median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        **counts(),
    }
    write(args.out, document)
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
