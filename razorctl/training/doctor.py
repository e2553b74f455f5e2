"""doctor: the parts of this machine, and whether razorctl works on it.

Kernels and attention run forward and backward on small tensors, and folders are written to, since
versions and capabilities alone are no proof.
"""

import copy
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from razorctl import units
from razorctl.config.job import Job, resolve_precision
from razorctl.config.recipe import Recipe
from razorctl.errors import first_line
from razorctl.ops import kernels
from razorctl.ops.cpu.gemm import makes_products
from razorctl.ops.gemm import has_vnni
from razorctl.planning import detect
from razorctl.step import ByLogits, ForwardBackward, forward_backward
from razorctl.surgery.sparsify import sparsify
from razorctl.system import c_compiler, devices, folders, hub
from razorctl.training.cuda_graphs import WARM_UPS, CapturedPasses
from razorctl.version import __version__

State = Literal["ok", "note", "problem"]
PACKAGES = (
    *("torch", "torchvision", "triton", "timm", "transformers", "datasets", "peft", "accelerate"),
    "torchao",
)
# Library -> the oldest and the pinned release that the tests run with.
TESTED = {
    "torch": ("2.11", "2.15.0"),
    "torchvision": ("0.26", "0.29.2"),
    "timm": ("1.0.28", "1.0.31"),
    "transformers": ("5.17", "5.24.0"),
    "peft": ("0.21", "0.21.2"),
}
# Together they call the ops of all rules; the gradient of the first is close to the exact one.
RECIPES = (
    Recipe("razor", 0.5),
    Recipe("razor", 0.9),
    Recipe("razor", 0.9, int8_forward=True),
    Recipe("backrazor", 0.9),
    Recipe("prebackrazor", 0.9),
    Recipe("int2"),
)
BATCH = 64  # images of a trial, enough for GEMMs in int8
CLOSE = 0.95  # least cosine of the first recipe's gradient to the exact gradient
SAME = 0.999  # least cosine of a replayed gradient to the eager one; the order of sums differs
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ROOM = 5 * 2**30  # free bytes of a disk, below which there is a note


@dataclass(frozen=True)
class Check:
    """The state of one part of the machine.

    state: "note" if it works, but could work better. found: a description. mend: how to improve it.
    tested: the oldest and the pinned release of a library that the tests ran with.
    """

    group: str
    name: str
    state: State
    found: str
    mend: str | None = None
    tested: tuple[str, ...] = ()


def diagnose() -> Iterator[Check]:
    """All checks, in groups; the slow ones are last."""
    yield from _software()
    yield from _cpu()
    yield from _gpus()
    yield from _files()
    yield from _hub()
    for device in _devices():
        yield _attention(device)
        yield from _kernels(device)
        if device.type == "cuda":
            yield graphs(device)


def _devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def _software() -> Iterator[Check]:
    yield Check("software", "razorctl", "ok", __version__)
    yield Check("software", "python", "ok", platform.python_version())
    for name in PACKAGES:
        if find_spec(name) is not None:
            yield library(name, version(name))


def library(name: str, installed: str) -> Check:
    """Checks that the release of a library is between the oldest and the pinned one."""
    if name not in TESTED:
        return Check("software", name, "ok", installed)
    oldest, pinned = tested = TESTED[name]
    if Version(oldest) <= Version(Version(installed).public) <= Version(pinned):
        return Check("software", name, "ok", installed, tested=tested)
    found = f"razorctl's tests ran with {name} {oldest} to {pinned}, and {installed} is installed"
    mend = f"if something fails, install '{name}>={oldest},<={pinned}'"
    return Check("software", name, "note", found, mend, tested)


def _cpu() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", "cores", "ok", f"{cores} of {platform.machine()}")
    if has_vnni():
        yield Check("cpu", "int8 GEMMs", "ok", "by VNNI")
    elif makes_products():
        yield Check("cpu", "int8 GEMMs", "ok", "by AVX2, not as fast as by VNNI")
    else:
        yield Check("cpu", "int8 GEMMs", "note", "no VNNI: they run in single precision")
    if not kernels.wanted():
        yield _turned_off("cpu")
        return
    built = c_compiler.built()
    mend = None if built.path else "install gcc or clang, or name a compiler with CC"
    yield Check("cpu", "C compiler", "ok" if built.path else "note", built.why, mend)


def _turned_off(group: str) -> Check:
    found = f"fused kernels are off, as {kernels.SETTING}=torch says"
    return Check(group, "kernels", "note", found, f"unset {kernels.SETTING}")


def _gpus() -> Iterator[Check]:
    cards = detect.cards()
    if not cards:
        yield _no_card()
        return
    yield Check("gpu", "driver", "ok", detect.driver())
    for number, card in enumerate(cards):
        others = units.count(len(card.processes), "process")
        found = f"{card.name}, {units.size(card.memory_bytes)}, {units.size(card.free_bytes)} free"
        found += f", {others} on it" if card.processes else ""
        precision = resolve_precision("auto", card.compute_capability)
        found += f", compute capability {card.compute_capability}, so {precision}"
        if detect.preset_for(card) is None:
            mend = "name a similar one with --gpu, or write a preset file"
            yield Check("gpu", f"card {number}", "note", f"{found}; it has no preset", mend)
        else:
            yield Check("gpu", f"card {number}", "ok", found)
    found = "razorctl was tested on an H100 and an H200; the checks below run on this machine"
    yield Check("gpu", "tests of razorctl", "note", found)
    yield _cuda(len(cards))
    if kernels.wanted():
        yield _launcher()


def _no_card() -> Check:
    """The check of a machine on which no driver of NVIDIA shows a card."""
    other = devices.other_gpu()
    if other is None:
        found = "none that a driver shows: training runs on the CPU"
        return Check("gpu", "card", "note", found)
    found = f"{other}: razorctl was tried on NVIDIA GPUs and on CPUs, and never on this kind"
    mend = "train on the CPU, with --device cpu; plan for an NVIDIA GPU with --gpu or --vram"
    return Check("gpu", "card", "note", found, mend)


def _cuda(cards: int) -> Check:
    """Checks that torch computes on all cards of the driver."""
    if torch.version.cuda is None:
        mend = "install a torch that is built with CUDA"
        return Check("gpu", "CUDA", "problem", "torch is built without it", mend)
    try:
        for index in range(cards):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:
        mend = f"update the driver, or install a torch for it; this one is for {torch.version.cuda}"
        return Check("gpu", "CUDA", "problem", first_line(error), mend)
    return Check("gpu", "CUDA", "ok", f"{torch.version.cuda}, computes on {cards}")


def _launcher() -> Check:
    """Checks that Triton can compile its launcher of kernels, a Python module in C."""
    name = "Triton's launcher"
    if find_spec("triton") is None:
        found = "no Triton, so PyTorch operations run, slower"
        return Check("gpu", name, "note", found, "install triton")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        mend = "install gcc or clang, or name a compiler with CC"
        return Check("gpu", name, "problem", "no C compiler, so no kernel can be launched", mend)
    # Triton's place of headers; Debian's default scheme has none.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme)["include"]
    command = [compiler, "-x", "c", "-fsyntax-only", f"-I{headers}", "-"]
    code = "#include <stdlib.h>\n#include <Python.h>\n"
    try:
        subprocess.run(command, input=code, capture_output=True, text=True, check=True)
    except OSError as error:
        mend = "name a compiler with CC, without options"
        return Check("gpu", name, "problem", f"{compiler} cannot be run: {error.strerror}", mend)
    except subprocess.CalledProcessError as error:
        why = next((line for line in error.stderr.splitlines() if "error:" in line), "no reason")
        minor = "{}.{}".format(*sys.version_info)
        mend = f"install the headers of Python {minor} and of C (python{minor}-dev and libc6-dev)"
        return Check("gpu", name, "problem", f"{compiler} failed: {why}", mend)
    return Check("gpu", name, "ok", f"compiled by {compiler}")


def _files() -> Iterator[Check]:
    from huggingface_hub import constants

    places = {
        "model cache": Path(constants.HF_HUB_CACHE),
        "kernel cache": folders.cache(),
        "this directory": Path.cwd(),
    }
    for name, folder in places.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        found = f"{folder}, {units.size(free)} free"
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(1))
        except OSError as error:
            mend = "change its permissions, or name another folder"
            yield Check("files", name, "problem", f"{found}, not writable: {error.strerror}", mend)
        else:
            if free < ROOM:
                yield Check("files", name, "note", found, "free some space, or take another disk")
            else:
                yield Check("files", name, "ok", found)


def _hub() -> Iterator[Check]:
    from huggingface_hub import constants, get_token

    cached = "only cached models and data sets can be used"
    if constants.HF_HUB_OFFLINE:
        found = f"HF_HUB_OFFLINE is set: {cached}"
        yield Check("hub", "network", "note", found, "unset HF_HUB_OFFLINE")
    elif why := hub.unreachable():
        mend = "check the network, or name a mirror with HF_ENDPOINT"
        yield Check("hub", "network", "note", f"{why}: {cached}", mend)
    else:
        yield Check("hub", "network", "ok", f"{constants.ENDPOINT} answers")
    yield Check("hub", "login", "ok", "logged in" if get_token() else "not logged in")


def _attention(device: torch.device) -> Check:
    """The kernels of SDPA that run forward and backward on a device."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    runs = []
    for name, backend in BACKENDS.items():
        x = torch.randn(2, 2, 32, 32, device=device, dtype=dtype, requires_grad=True)
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(x, x, x).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            continue
        runs.append(name)
    state: State = "note" if runs in ([], ["math"]) else "ok"
    return Check("attention", str(device), state, ", ".join(runs) or "none")


def _kernels(device: torch.device) -> Iterator[Check]:
    """A check of a small ViT's gradient by all rules, and one of each op's kernel that it used."""
    if not kernels.wanted():
        if device.type == "cuda":
            yield _turned_off(f"kernels, {device}")
        return
    group = f"kernels, {device}"
    torch.manual_seed(0)
    model, images = _small_vit().to(device), torch.randn(BATCH, 3, 32, 32, device=device)
    exact, *gradients = (_gradient(model, images, recipe) for recipe in (None, *RECIPES))
    cosine = F.cosine_similarity(exact, gradients[0], 0).item()
    found = f"cosine {cosine:.4f} to the exact one, {RECIPES[0].method} at {RECIPES[0].ratio:g}"
    mend = f"set {kernels.SETTING}=torch, which runs PyTorch operations in their place"
    if cosine >= CLOSE:
        yield Check(group, "gradient", "ok", found)
    else:
        yield Check(group, "gradient", "problem", found, mend)
    for op, why in kernels.outcomes(device).items():
        if why:
            yield Check(group, op, "problem", first_line(why), mend)
        else:
            yield Check(group, op, "ok", "ran")


def graphs(device: torch.device) -> Check:
    """Checks that steps of razor run as CUDA graphs on a device, with the same gradient."""
    job = Job("", "", precision="fp16" if _narrow(device) is torch.float16 else "bf16")
    torch.manual_seed(0)
    model, captured = _small_vit().to(device).train(), CapturedPasses()
    sparsify(model, RECIPES[0])
    losses = ByLogits(lambda net, images: net(images), job)
    scaler = torch.amp.GradScaler(device.type, enabled=False)

    def gradient(run: ForwardBackward, images: Tensor) -> Tensor:
        model.zero_grad()
        run(model, losses, (images, torch.arange(BATCH, device=device) % 10, None), job, scaler)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    mend = "leave --cuda-graphs out"
    for _ in range(WARM_UPS + 2):  # the last one is a replay
        images = torch.randn(BATCH, 3, 32, 32, device=device)
        try:
            replayed = gradient(captured, images)
        except RuntimeError as error:
            return Check(str(device), "CUDA graphs", "note", first_line(error), mend)
    if not captured.works:
        return Check(str(device), "CUDA graphs", "note", "a step cannot be captured", mend)
    cosine = F.cosine_similarity(
        replayed.double(), gradient(forward_backward, images).double(), 0
    ).item()
    found = f"cosine {cosine:.4f} of a replayed step's gradient to the eager one"
    if cosine >= SAME:
        return Check(str(device), "CUDA graphs", "ok", found)
    return Check(str(device), "CUDA graphs", "problem", found, mend)


def _small_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=256, depth=2, num_heads=4, num_classes=10
    )
    return model


def _gradient(model: nn.Module, images: Tensor, recipe: Recipe | None) -> Tensor:
    """The gradient of all parameters by a recipe; on a card it is computed in 16 bits."""
    device = images.device
    model = copy.deepcopy(model).train()
    if recipe is not None:
        sparsify(model, recipe)
    with torch.autocast(device.type, dtype=_narrow(device), enabled=device.type == "cuda"):
        logits = model(images)
    labels = torch.arange(len(images), device=device) % logits.shape[1]
    F.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def _narrow(device: torch.device) -> torch.dtype:
    """The 16-bit dtype that a device computes in."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16
