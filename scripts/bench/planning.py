"""Compares what planning predicts of training steps with what they take, here or published.

    .venv/bin/python scripts/bench/planning.py [here | published]

Here: a grid of models x methods x precisions x batches x input sizes, with fresh weights. On CUDA,
three figures are measured: the bytes that the allocator hands out, the bytes that it has reserved,
and the bytes of the card in use beside these. On a CPU it is the first; razorctl's ops work in the
parts that a GPU takes, and batches are small. The script writes results/planning_DEVICE.json, and
exits with 1 if a prediction is below what was measured (on a CPU, by over 5 %), or over 5 % above
it in the mean. On CUDA it needs nvidia-ml-py.

Published: the rates in published.toml, of cards that need not be here. The benchmark.py of
huggingface/pytorch-image-models makes the steps that are traced: autocast to fp16, contiguous
inputs, and in training cross-entropy and SGD with Nesterov momentum. The training rates are from
torch 1.12, whose attention stored its probabilities, as the traced models do. The script writes
results/published.json and exits with 1 if a listed prediction is off by more than its bar.
"""

import argparse
import gc
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import fmean, median
from typing import Any

import record
import timm
import torch
import torch.nn.functional as F
from pages import HERE, RESULTS
from passes import allocated_on_cpu
from record import device_name, head, on_a_device, options, reason, write
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory import costs, fake, tracker
from razorctl.memory.trace_cache import Trace
from razorctl.ops import chunks, gemm, kernels, topk
from razorctl.optimizer import build_optimizer
from razorctl.planning import gpus
from razorctl.planning import job_trace as tracing
from razorctl.planning.candidates import Predicted
from razorctl.planning.times import on_card
from razorctl.step import DTYPES, ByLogits, train_step
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.surgery.sparsify import sparsify

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
BARS = {"train": 0.25, "infer": 0.20}  # by how much a predicted rate may be off
SHALLOW = (1, 2)  # blocks of a transformer that are traced; each more costs what the second adds


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
            sizes_of = {"batch_size": batch * accumulate, "input_size": size}
            job = Job(model, "random", accumulate=accumulate, precision=precision, **sizes_of)
            job = replace(job, optimizer=optimizer, learning_rate=1e-4, weight_decay=0.0)
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

        losses = ByLogits(self.logits, self.job)
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
        taken = measured["reserved_bytes"] + measured["context_bytes"]
        over = prediction.needed_bytes / taken - 1
    return {**about, "predicted": predicted, "measured": measured, "over": over}


def as_on_a_gpu(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Inside it, razorctl's ops on the CPU work in the parts that they take on a GPU.

    That is what they do without kernels, as planning counts them for a CPU. The workspace of CUDA's
    attention, which the CPU's lacks, is not counted.
    """
    assign(costs, "ATTENTION_BACKWARD", None)
    assign(kernels, "_wanted", False)
    assign(chunks, "CACHED", {})
    for op in (topk.topk_pack, topk.topk_unpack):
        assign(op.definition, "_disabled_kernel", {"cpu"})  # those registered for a CPU
        assign(op, "kernels", {})
    assign(gemm, "has_int8_gemm", lambda device: True)
    assign(gemm, "cpu_gemm", gemm.cublas_gemm)


@dataclass(frozen=True)
class Rate:
    """A published rate, in images per second. held: whether its prediction has to meet the bar."""

    gpu: str
    phase: str
    model: str
    batch: int
    rate: float
    held: bool = True


PUBLISHED = tomllib.loads((HERE / "published.toml").read_text())
RATES = [Rate(*row) for row in PUBLISHED["rates"]["rows"]]


def predicted(row: Rate) -> float:
    """The predicted rate of a row, in images per second."""
    gpu = gpus.load(row.gpu)
    if not row.model.startswith("vit"):
        return row.batch / on_card(traced(row.model, row.phase, row.batch), gpu).likely
    few, more = SHALLOW
    shallow = on_card(traced(row.model, row.phase, row.batch, depth=few), gpu).likely
    deeper = on_card(traced(row.model, row.phase, row.batch, depth=more), gpu).likely
    return row.batch / (shallow + (_depth(row.model) - few) * (deeper - shallow) / (more - few))


@cache
def _depth(name: str) -> int:
    return len(_meta(name).blocks)


def _meta(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **options)


@cache
def traced(name: str, phase: str, batch: int, **options: Any) -> Trace:
    """A step as benchmark.py takes it."""
    model = _meta(name, **options)
    with fake.fake(model):
        images = torch.zeros(batch, *model.pretrained_cfg["input_size"])
        labels = torch.zeros(batch, dtype=torch.long)

    def forward(model: nn.Module, images: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(images)

    def train(model: nn.Module, batches: Iterable[Tensor], updates: Optimizer | None) -> None:
        assert updates is not None
        for images in batches:
            F.cross_entropy(forward(model, images).float(), labels).backward()
        updates.step()

    def infer(model: nn.Module, batches: Iterable[Tensor], updates: Optimizer | None) -> None:
        model.eval()
        for images in batches:
            with torch.no_grad():
                forward(model, images)

    def sgd(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), 1e-4, momentum=0.9, nesterov=True, foreach=True)

    with tracing._AsOnCuda():
        if phase == "infer":
            return tracker.trace_step(model, images, None, infer, forward, 1)
        if hasattr(model, "blocks"):
            sparsify(model, Recipe("full", attention="stored"))
        return tracker.trace_step(model, images, sgd, train, forward, 1)


def published(args: argparse.Namespace) -> bool:
    """Writes predictions beside published rates; whether one is off by more than its bar."""
    rows = []
    for one in RATES:
        rate = predicted(one)
        over = rate / one.rate - 1
        file = PUBLISHED["files"][one.phase if one.phase == "train" else f"infer-{one.gpu}"]
        made = {"predicted": round(rate, 2), "over": round(over, 4)}
        rows.append({**asdict(one), "file": file, **made})
        print(f"{one.gpu} {one.phase} {one.model:22} {one.rate:9,.1f} {rate:9,.1f} {over:+.1%}")
    source = "results of huggingface/pytorch-image-models"
    document = {**head(None, "torch", "timm"), "source": source, "bars": BARS, "rows": rows}
    write(args.out or RESULTS / "published.json", document)
    return any(row["held"] and abs(row["over"]) > BARS[row["phase"]] for row in rows)


def here(args: argparse.Namespace) -> bool:
    """Writes predictions beside what steps of the grid take; whether they are off."""
    out = args.out or RESULTS / f"planning_{args.device}.json"
    cuda = args.device == "cuda"
    if not cuda:
        as_on_a_gpu()
    if cuda and not record.preset():
        sys.exit("the card has no preset")
    gpu = record.preset() if cuda else None
    libraries = ("torch", "timm", "transformers")
    document: dict[str, Any] = head(device_name(args.device), *libraries)
    document["preset"] = gpu and gpu.name
    rows: list[dict[str, Any]] = []
    for point in grid(args.device)[:: args.every]:
        try:
            rows.append(row(point, args.device, gpu))
        except Exception as error:  # the others are worth having
            rows.append({"point": point.name, "error": reason(error)})
        figure = rows[-1].get("error") or f"{rows[-1]['over']:+.2%}"
        print(f"{point.name:48} {figure}", flush=True)
        write(out, {**document, "rows": rows})
    over = [row["over"] for row in rows if "over" in row]
    if not over:
        sys.exit("no step of the grid could be run")
    document |= {"mean_over": fmean(over), "least_over": min(over), "most_over": max(over)}
    write(out, {**document, "rows": rows})
    print(f"predicted over measured: {min(over):+.2%} to {max(over):+.2%}, mean {fmean(over):+.2%}")
    return len(over) < len(rows) or min(over) < -UNDER[args.device] or fmean(over) > OVER


def main() -> None:
    parser = on_a_device(options(__doc__))
    parser.add_argument("against", nargs="?", choices=("here", "published"), default="here")
    parser.add_argument("--every", type=int, default=1, help="take one point of so many")
    args = parser.parse_args()
    sys.exit((here if args.against == "here" else published)(args))


if __name__ == "__main__":
    main()
