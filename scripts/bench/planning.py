"""Compares what planning predicts of training steps with what they take, over a grid.

    .venv/bin/python scripts/bench/planning.py

The grid is models x methods x precisions x batches x input sizes, with fresh weights. On CUDA,
three figures are measured: the bytes that the allocator hands out, the bytes that it has reserved,
and the bytes of the card in use beside these. On a CPU, the bytes that the allocator hands out are
measured; razorctl's ops work in the parts that a GPU takes, and batches are small. The script
writes results/planning_DEVICE.json. It exits with 1 if a prediction is below what was measured (on
a CPU, by over 5 %), or if predictions are over 5 % above it in the mean. Beside torch, timm and
transformers it needs nvidia-ml-py.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import machine
import torch
from pages import RESULTS
from peaks import allocated_on_cpu
from record import head, options, reason, write
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops import chunks, gemm, kernels, topk
from razorctl.optimizer import build_optimizer
from razorctl.planning import gpus
from razorctl.planning import job_trace as tracing
from razorctl.planning.candidates import Predicted
from razorctl.step import DTYPES, by_logits, train_step
from razorctl.surgery.byte_budget import sparsify_within

RATIO, CLASSES = 0.9, 100
WARM_UP, STEPS = 2, 3
OVER = 0.05  # mean over-prediction that is allowed
UNDER = {"cuda": 0.0, "cpu": 0.05}  # kernels of a CPU have workspaces that are not predicted
# Model -> two batches of an input size on CUDA, and two on a CPU; None: the model's own size.
SIZES = {
    "vit-b16": {"cuda": ((64, 224), (16, 384)), "cpu": ((64, 64), (32, 96))},
    "bert-base": {"cuda": ((64, 128), (16, 512)), "cpu": ((64, 16), (32, 32))},
    "resnet50": {"cuda": ((64, 224), (16, 384)), "cpu": ((8, 64), (4, 96))},
    "vit-micro": {"cuda": ((16384, None), (4096, None)), "cpu": ((64, None), (32, None))},
}
WAYS = (  # method, precision, optimizer, which of the two sizes, micro-batches
    ("full", "fp32", "sgd", 0, 1),
    ("full", "bf16", "adamw", 1, 2),
    ("full", "fp16", "sgd", 0, 1),
    ("full-stored", "bf16", "sgd", 0, 1),
    ("checkpoint", "fp32", "adamw", 1, 1),
    ("checkpoint", "bf16", "sgd", 0, 2),
    ("backrazor", "fp32", "sgd", 1, 1),
    ("backrazor", "bf16", "sgd", 0, 1),
    ("prebackrazor++", "bf16", "sgd", 1, 1),
    ("int8", "bf16", "sgd", 0, 1),
    ("half", "fp32", "sgd", 1, 1),
    ("razor", "fp32", "sgd", 0, 1),
    ("razor", "bf16", "sgd", 0, 1),
    ("razor", "bf16", "adamw", 1, 2),
    ("razor", "fp16", "sgd", 0, 1),
)


@dataclass(frozen=True)
class Point:
    """A step of the grid."""

    job: Job
    recipe: Recipe

    @property
    def name(self) -> str:
        job, recipe = self.job, self.recipe
        stored = "-stored" if recipe.attention == "stored" else ""
        words = (job.model, recipe.method + stored, job.precision, job.optimizer)
        size = f"@{job.input_size}" if job.input_size else ""
        return f"{' '.join(words)} {job.batch_size}/{job.accumulate}{size}"


def grid(device: str) -> list[Point]:
    """The points for a kind of device."""
    points = []
    for model, sizes in SIZES.items():
        for method, precision, optimizer, which, accumulate in WAYS:
            if precision == "fp16" and device == "cpu":
                continue  # training in fp16 needs a GPU
            if method == "full-stored" and model == "resnet50":
                continue  # it has no attention
            batch, size = sizes[device][which]
            job = Job(
                model,
                "random",
                batch_size=batch * accumulate,
                accumulate=accumulate,
                precision=precision,  # type: ignore[arg-type]
                optimizer=optimizer,  # type: ignore[arg-type]
                learning_rate=1e-4,
                weight_decay=0.0,
                input_size=size,
            )
            attention = "stored" if method == "full-stored" else "auto"
            recipe = Recipe(method.removesuffix("-stored"), RATIO, attention=attention)  # type: ignore[arg-type]
            points.append(Point(job, recipe))
    return points


class Training:
    """Steps of a point on a device."""

    def __init__(self, point: Point, device: torch.device) -> None:
        job = self.job = point.job
        family = models.find(job.model)
        self.logits = family.logits
        self.model = family.bare(CLASSES, job.input_size).to(device).train()
        assert job.batch_size is not None
        rows = job.batch_size // job.accumulate
        inputs = family.example(self.model, rows, job.input_size)
        self.batch = tree_map_only(
            Tensor, lambda t: t.to(device), (inputs, torch.zeros(rows, dtype=torch.long))
        )
        sparsify_within(self.model, point.recipe, self.batch[0], autocast=DTYPES[job.precision])
        self.updates = build_optimizer(self.model, job)
        self.scaler = torch.amp.GradScaler(device.type, enabled=job.precision == "fp16")

    def step(self) -> None:
        def micro_batches() -> Iterator[Any]:
            for _ in range(self.job.accumulate):
                yield self.batch

        losses = by_logits(self.logits, self.job)
        train_step(self.model, losses, micro_batches(), self.updates, self.job, self.scaler)

    @property
    def resident(self) -> int:
        """The bytes that are allocated between steps."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *tree_leaves(self.batch)]
        tensors += [v for state in self.updates.state.values() for v in state.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in storages.values())


def measure_on_cpu(point: Point) -> dict[str, Any]:
    training = Training(point, torch.device("cpu"))
    training.step()
    gc.collect()
    return {"allocated_bytes": training.resident + allocated_on_cpu(training.step)}


def measure_on_cuda(point: Point) -> dict[str, Any]:
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    training = Training(point, device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": reserved,
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "step_seconds": median(seconds[WARM_UP:]),
    }


def row(point: Point, device: str, gpu: gpus.Gpu | None) -> dict[str, Any]:
    """The prediction and the measurement of a point.

    over: the share by which the prediction is larger.
    """
    trace = tracing.trace(point.job, point.recipe, CLASSES, device)
    about = {"point": point.name, **asdict(point.job), "recipe": asdict(point.recipe)}
    if gpu is None:
        measured = measure_on_cpu(point)
        predicted: dict[str, Any] = {"peak_bytes": trace.highest}
        over = trace.highest / measured["allocated_bytes"] - 1
    else:
        measured = measure_on_cuda(point)
        prediction = Predicted.of(trace, gpu, full=trace)
        predicted = asdict(prediction)
        del predicted["step_seconds_vs_full"]
        over = (
            prediction.needed_bytes / (measured["reserved_bytes"] + measured["context_bytes"]) - 1
        )
    return {**about, "predicted": predicted, "measured": measured, "over": over}


def as_on_a_gpu(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Inside it, razorctl's ops on the CPU work in the parts that they take on a GPU.

    That is what they do without kernels, as planning counts them for a CPU.
    """
    assign(kernels, "_wanted", False)
    assign(chunks, "CACHED", {})
    for op in (topk.topk_pack, topk.topk_unpack):
        assign(op.definition, "_disabled_kernel", {"cpu"})  # those registered for a CPU
        assign(op, "kernels", {})
    assign(gemm, "has_int8_gemm", lambda device: True)
    assign(gemm, "cpu_gemm", gemm.cublas_gemm)


def preset() -> gpus.Gpu:
    """The preset of the current card of this machine."""
    if gpu := machine.preset():
        return gpu
    sys.exit("the card has no preset")


def main() -> None:
    parser = options(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--every", type=int, default=1, help="take one point of so many")
    args = parser.parse_args()
    out = args.out or RESULTS / f"planning_{args.device}.json"
    cuda = args.device == "cuda"
    if not cuda:
        as_on_a_gpu()
    gpu = preset() if cuda else None
    document: dict[str, Any] = {
        **head(machine.device_name(args.device), "torch", "timm", "transformers"),
        "preset": gpu and gpu.name,
    }
    rows: list[dict[str, Any]] = []
    for point in grid(args.device)[:: args.every]:
        try:
            rows.append(row(point, args.device, gpu))
        except Exception as error:  # the others are worth having
            rows.append({"point": point.name, "error": reason(error)})
        print(as_text(rows[-1]), flush=True)
        write(out, {**document, "rows": rows})
    over = [row["over"] for row in rows if "over" in row]
    if not over:
        sys.exit("no step of the grid could be run")
    document |= {"mean_over": fmean(over), "least_over": min(over), "most_over": max(over)}
    write(out, {**document, "rows": rows})
    print(f"predicted over measured: {min(over):+.2%} to {max(over):+.2%}, mean {fmean(over):+.2%}")
    print(f"written to {out}")
    sys.exit(len(over) < len(rows) or min(over) < -UNDER[args.device] or fmean(over) > OVER)


def as_text(row: dict[str, Any]) -> str:
    """A row as a line of text, without the libraries that a bare GPU machine may lack."""
    if "error" in row:
        return f"{row['point']:48} {row['error']}"
    predicted, measured = row["predicted"], row["measured"]
    parts = [f"{row['point']:48}"]
    parts.append(f"predicted {predicted['peak_bytes'] / 2**20:9,.1f}")
    parts += [f"{k.split('_')[0]} {measured[k] / 2**20:9,.1f}" for k in measured if "bytes" in k]
    if "step_seconds" in measured:
        parts.append(f"{predicted['step_seconds']:.3f} {measured['step_seconds']:.3f} s")
    return "  ".join([*parts, f"{row['over']:+.2%}"])


if __name__ == "__main__":
    main()
