"""Says which kernels a training step of ViT-B/16 spends its time in, by every way to launch them.

    .venv/bin/python scripts/bench/phases.py [--device cuda]

A step is forward, cross-entropy, backward and SGD with momentum on 128 random images in bf16. A row
has the median time of a step over three times ten steps, the peak and the reserved memory, and the
milliseconds of its kernels by group, by torch's profiler over three more steps. Captured are both
passes, as `finetune` does it. The script writes results/phases_DEVICE.json after every row.
"""

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
from pages import RESULTS
from record import device_name, head, on_a_device, options, reason, write
from torch.profiler import ProfilerActivity, profile

from razorctl import Recipe, sparsify
from razorctl.training.cuda_graphs import WARM_UPS, Graphs

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
CASES: dict[str, tuple[Recipe, str]] = {  # and how the step runs
    "razor, CUDA graphs": (Recipe("razor", 0.9), "captured"),
    "full": (FULL, ""),
    "full, CUDA graphs": (FULL, "captured"),
    "razor at 0.97, CUDA graphs": (Recipe("razor", 0.97), "captured"),
    "razor": (Recipe("razor", 0.9), ""),
    "full, compiled": (FULL, "compiled"),
}
WARM, TURNS, STEPS, PROFILED = 4, 3, 10, 3


def group(name: str) -> str:
    """The group of a kernel."""
    return next((of for of, pattern in GROUPS.items() if re.search(pattern, name)), OTHER)


def step_of(recipe: Recipe, how: str, device: torch.device, smoke: bool) -> Callable[[], None]:
    """A training step, as often as it is called."""
    torch.manual_seed(0)
    size, batch = (32, 2) if smoke else (224, 128)
    name = "vit_tiny_patch16_224" if smoke else "vit_base_patch16_224"
    model = timm.create_model(name, img_size=size, depth=2 if smoke else 12).to(device).train()
    if recipe != FULL:
        sparsify(model, recipe)
    run = torch.compile(model) if how == "compiled" and not smoke else model
    images = torch.randn(batch, 3, size, size, device=device)
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


def figures(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
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


def main() -> None:
    parser = on_a_device(options(__doc__))
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    args = parser.parse_args()
    device = torch.device(args.device)
    out = args.out or RESULTS / f"phases_{device.type}.json"
    rows: list[dict[str, Any]] = []
    document = {**head(device_name(args.device), "torch", "timm"), "rows": rows}
    for name, (recipe, how) in CASES.items():
        row: dict[str, Any] = {"case": name, "error": None}
        try:
            row |= figures(step_of(recipe, how, device, args.smoke), device)
        except Exception as error:
            row["error"] = reason(error)
        rows.append(row)
        write(out, document)
        print(name, row.get("step_seconds"), row["error"], flush=True)
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
