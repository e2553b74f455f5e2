"""Says which kernels a training step of ViT-B/16 spends its time in, by every way to launch them.

    .venv/bin/python scripts/bench/phases.py [--device cuda] [--part PART]

A step is forward, cross-entropy, backward and SGD with momentum on 128 random images in bf16. A row
has the median time of a step over three times ten steps, the peak and the reserved memory, and the
milliseconds of its kernels by group, by torch's profiler over three more steps. Captured are both
passes, as `finetune` does it. The script writes results/PART_DEVICE.json after every row; parts are

- phases: these steps of ViT-B/16. large: a few of them of ViT-L/16, batch 64.
- products: seconds of copies, of attention by every backend, also as razor runs it, forward twice,
  and of each product of a step by every way; those of fp8 are for comparison alone. Copies and the
  product of 8,192 cubed are the most that a card reaches.
- finetune: the step and the memory of a run with defaults, from random weights on random images.
"""

import gc
import itertools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import timm
import torch
import torch.nn.functional as F
from pages import RESULTS, Row
from PIL import Image
from record import device_name, head, on_a_device, options, reason, timed, write
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import razorctl
from razorctl import Recipe, sparsify
from razorctl.ops.gemm import scaled_gemm
from razorctl.training.cuda_graphs import WARM_UPS, Graphs
from razorctl.training.doctor import BACKENDS

GROUPS = {  # the first whose pattern is in a kernel's name
    "inductor": "^triton_",
    "int8 GEMMs": "scaled_gemm_kernel|epilogue_kernel",
    "codes of operands": "codes_kernel|scales_kernel",
    "activation gradients": "activation_grad",
    "few-bit copies": "quantize|statistics_kernel",
    "norm gradients": "norm_grad|layer_norm_grad|GammaBeta",
    "residual sums and norms": "residual_add|normalize_kernel|norm_again|layer_norm",
    "int8 rows": "row_operands|int8_heads|int8_rows",
    "column sums": "column_sums",
    "attention": "flash|fmha|sdpa|attention",
    "bf16 GEMMs": "gemm|cutlass|xmma|nvjet|cublas|conv",
    "GELU": "[gG]elu|GELU",
    "optimizer": "multi_tensor",
}
OTHER = "other"
FULL = Recipe("full")
RAZOR = Recipe("razor", 0.9)
CASES: dict[str, tuple[Recipe, str]] = {  # and how the step runs
    "razor, CUDA graphs": (RAZOR, "captured"),
    "full, compiled": (FULL, "compiled"),
    "full, CUDA graphs": (FULL, "captured"),
    "razor at 0.97, CUDA graphs": (Recipe("razor", 0.97), "captured"),
    "full": (FULL, ""),
    "razor": (RAZOR, ""),
}
LARGE = ("razor, CUDA graphs", "full, CUDA graphs", "full, compiled")
STEPS_OF = {"phases": ("base", 128, [*CASES]), "large": ("large", 64, LARGE)}
TOKENS, LENGTH, HEADS, HEAD = 128 * 197, 197, 12, 64
LAYERS = {"qkv": (2304, 768), "proj": (768, 768), "fc1": (3072, 768), "fc2": (768, 3072)}
PRODUCTS = {  # of a step of ViT-B/16: rows and columns of the result, and terms of a sum
    "8,192 cubed": (8192, 8192, 8192),
    **{f"{name} again": (TOKENS, *LAYERS[name]) for name in ("qkv", "fc1")},
    **{f"dX of {name}": (TOKENS, k, n) for name, (n, k) in LAYERS.items()},
    **{f"dW of {name}": (n, k, TOKENS) for name, (n, k) in LAYERS.items()},
}
SETS, CALLS = 3, 12  # operands that take turns, so that none is in the cache; calls of a timing
WARM, TURNS, STEPS, PROFILED = 4, 3, 10, 3


def group(name: str) -> str:
    """The group of a kernel."""
    return next((of for of, pattern in GROUPS.items() if re.search(pattern, name)), OTHER)


def step_of(
    size: str, batch: int, recipe: Recipe, how: str, device: torch.device, smoke: bool
) -> Callable[[], None]:
    """A training step, as often as it is called."""
    torch.manual_seed(0)
    side, batch = (32, 2) if smoke else (224, batch)
    depth = {"depth": 2} if smoke else {}
    name = f"vit_{'tiny' if smoke else size}_patch16_224"
    model = timm.create_model(name, img_size=side, **depth).to(device).train()
    if recipe != FULL:
        sparsify(model, recipe)
    run = torch.compile(model) if how == "compiled" and not smoke else model
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def passes() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad()

    if how != "captured" or device.type != "cuda":
        return step
    graphs = Graphs(device)
    for _ in range(WARM_UPS):
        graphs.warm_up(step)
    _, replay = graphs.capture(passes)

    def replayed() -> None:
        replay()
        optimizer.step()

    return replayed


def figures(step: Callable[[], None], device: torch.device) -> Row:
    """The times, the memory and the kernels of a step."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(WARM):
        step()
    seconds = []
    for _ in range(TURNS):
        wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        seconds.append((time.perf_counter() - start) / STEPS)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    reserved = torch.cuda.memory_reserved() if cuda else None
    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as profiled:
        for _ in range(PROFILED):
            step()
        wait()
    taken = Counter[str]()
    for event in profiled.events() or ():
        if not cuda or event.device_type is torch.autograd.DeviceType.CUDA:
            taken[group(event.name)] += event.time_range.elapsed_us() / PROFILED / 1e6
    groups = {name: taken[name] for name in (*GROUPS, OTHER) if taken[name]}
    return {
        "step_seconds": median(seconds),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "groups": groups,
    }


def by_way(work: int, ways: dict[str, Callable[[], object]], device: torch.device) -> Row:
    """The seconds of each way. work: its operations, or its bytes."""
    row: Row = {"work": work, "seconds": {}, "failed": {}}
    for way, call in ways.items():
        try:
            row["seconds"][way] = median(timed(call, CALLS, device) for _ in range(TURNS))
        except Exception as error:
            row["failed"][way] = reason(error)
    return row


def product(m: int, n: int, k: int, device: torch.device, smoke: bool) -> Row:
    """Of a product [m, n] of k terms by every way; of fp8, which no step uses, for comparison."""
    m, n, k = (max(64, size // 64 // 16 * 16) if smoke else size for size in (m, n, k))
    of_weight, scale = k > max(m, n), torch.rand(n, device=device)
    row_scale = torch.rand(m, 1, device=device)
    ours = None if of_weight else row_scale, scale, torch.float32 if of_weight else torch.bfloat16
    new = partial(torch.randint, -127, 128, dtype=torch.int8, device=device)
    sets = [[new((rows, k)) for rows in (m, n)] for _ in range(1 if smoke else SETS)]

    def turns(way: Callable[[Tensor, Tensor], object], to: torch.dtype) -> Callable[[], object]:
        pairs = ([x if x.dtype is to else x.bfloat16().to(to) for x in pair] for pair in sets)
        operands = itertools.cycle(list(pairs))
        return lambda: way(*next(operands))

    ways = {"bf16": turns(lambda a, b: a @ b.t(), torch.bfloat16)}
    ways["_int_mm alone"] = turns(lambda a, b: torch._int_mm(a, b.t()), torch.int8)
    fp8_scales = {"fp8": (row_scale, scale[None]), "fp8, one scale": (scale[0], scale[0])}
    for name, (by_row, by_column) in fp8_scales.items():
        fp8 = partial(torch._scaled_mm, scale_a=by_row, scale_b=by_column, out_dtype=torch.bfloat16)
        ways[name] = turns(lambda a, b, fp8=fp8: fp8(a, b.t()), torch.float8_e4m3fn)
    if device.type == "cpu":
        ways["razorctl"] = turns(lambda a, b: scaled_gemm(a, b, *ours), torch.int8)
        return by_way(2 * m * n * k, ways, device)
    from razorctl.ops.triton import gemm
    from razorctl.ops.triton.launch import capability, processors

    out = gemm.GemmOutput(scale.new_empty(m, n, dtype=ours[-1]))
    card, rest = capability(device), (*ours[:-1], None, None, out)
    parts = (gemm.programs_per_tile(t, m, n, k, processors(device)) for t in gemm.tiles_for(card))
    for name, fill in gemm.ways(card, aligned=True, few=next(parts, 1) > 1).items():
        ways[name] = turns(lambda a, b, fill=fill: fill(a, b, *rest), torch.int8)
    return by_way(2 * m * n * k, ways, device)


def attention(forwards: int, gradient: bool, device: torch.device, smoke: bool) -> Row:
    """Of a layer's attention by every backend; heads lie side by side, as timm has them."""
    batch = 2 if smoke else 128
    joint = torch.randn(batch, LENGTH, 3, HEADS, HEAD, device=device, dtype=torch.bfloat16)
    q, k, v = joint.requires_grad_().permute(2, 0, 3, 1, 4).unbind(0)
    dout = torch.randn_like(q)

    def run(name: str) -> None:
        with sdpa_kernel(BACKENDS[name]):
            for _ in range(forwards):
                out = F.scaled_dot_product_attention(q, k, v)
        if gradient:
            torch.autograd.grad(out, (q, k, v), dout)

    operations = 2 * batch * HEADS * LENGTH**2 * HEAD * (2 * forwards + 5 * gradient)
    return by_way(operations, {name: partial(run, name) for name in BACKENDS}, device)


def copies(device: torch.device, smoke: bool) -> Row:
    """Of a copy of 1 GiB: its bytes are read and written."""
    source = torch.ones(2**16 if smoke else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return by_way(2 * len(source), {"copy": partial(target.copy_, source)}, device)


def finetune(device: torch.device, smoke: bool) -> Row:
    """The step and memory of a run with defaults, but for its steps and random weights."""
    generator, side = np.random.default_rng(0), 32 if smoke else 224
    with tempfile.TemporaryDirectory() as folder:
        for i in range(32 if smoke else 512):
            file = Path(folder, "images", "ab"[i % 2], f"{i}.jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (side, side, 3), np.uint8)).save(file)
        steps, model = (3, "vit-micro") if smoke else (60, "vit-b16")
        where = {"out": Path(folder, "run"), "device": device.type, "progress": False}
        data = Path(folder, "images")
        result = razorctl.finetune(model, data, steps=steps, from_scratch=True, **where)
    row = {key: result[key] for key in ("recipe", "job", "step_seconds", "peak_bytes", "predicted")}
    reserved = torch.cuda.max_memory_reserved() if device.type == "cuda" else None
    return row | {"reserved_bytes": reserved}


def measured(part: str) -> dict[str, Callable[[torch.device, bool], Row]]:
    """Case of a part -> what measures it."""
    if part == "finetune":
        return {"finetune with defaults": finetune}
    if part == "products":
        return {
            "copies": copies,
            "attention": partial(attention, 1, False),
            "attention, forward twice and backward": partial(attention, 2, True),
            **{name: partial(product, *sizes) for name, sizes in PRODUCTS.items()},
        }
    size, batch, names = STEPS_OF[part]

    def case(recipe: Recipe, how: str, device: torch.device, smoke: bool) -> Row:
        return figures(step_of(size, batch, recipe, how, device, smoke), device)

    return {name: partial(case, *CASES[name]) for name in names}


def main() -> None:
    parser = on_a_device(options(__doc__))
    parser.add_argument("--smoke", action="store_true", help="tiny models and products")
    parts = "products", *STEPS_OF, "finetune"
    parser.add_argument("--part", choices=parts, default="phases", help="what is measured")
    args = parser.parse_args()
    device = torch.device(args.device)
    out = args.out or RESULTS / f"{args.part}_{device.type}.json"
    rows: list[Row] = []
    document = {**head(device_name(args.device), "torch", "timm"), "rows": rows}
    for name, measure in measured(args.part).items():
        row: Row = {"case": name, "error": None}
        try:
            row |= measure(device, args.smoke)
        except Exception as error:
            row["error"] = reason(error)
        rows.append(row)
        write(out, document)
        print(name, row.get("step_seconds", row.get("seconds")), row["error"], flush=True)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
