"""The machine that a bench runs on."""

import os
import platform

import torch

from razorctl.planning.detect import Detected, preset_for
from razorctl.planning.gpus import Gpu


def device_name(device: str = "cpu") -> str:
    """The card, or the cores of the CPU and what their GEMMs run on: with VNNI int8 is faster."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    vnni = " with VNNI" if torch.cpu._is_vnni_supported() else ""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, {capability}{vnni}"


def preset() -> Gpu | None:
    """The preset of the current CUDA device, found by its properties in torch."""
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{card.major}.{card.minor}"
    return preset_for(Detected(card.name, card.total_memory, 0, capability, ()))
