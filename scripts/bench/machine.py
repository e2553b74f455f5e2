"""What benches say of the machine that they ran on."""

import os
import platform

import torch


def device_name(device: str = "cpu") -> str:
    """The card, or the cores of the CPU and what their GEMMs run on: with VNNI int8 is faster."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    vnni = " with VNNI" if torch.cpu._is_vnni_supported() else ""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, {capability}{vnni}"
