"""The device for a run."""

import torch

from razorctl.errors import UsageError
from razorctl.system import processes


def find(name: torch.device | str | None) -> torch.device:
    """The device of that name; None for CUDA if available, else the CPU.

    CUDA is this process's card if torchrun has started one process per card, else the current card.
    The device has an index, which some calls of torch need. Raises UsageError if the device cannot
    be used.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if str(name) == "cuda" and processes.count() > 1:
        name = f"cuda:{processes.local_rank()}"
    try:
        device = torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"device {str(name)!r} cannot be used ({reason}); try cpu.") from None
    return device


def other_gpu() -> str | None:
    """A GPU that torch can use and that is not NVIDIA's, for a sentence; None if there is none.

    AMD's are CUDA devices of a torch that is built with ROCm.
    """
    kinds = {
        "an AMD GPU (ROCm)": torch.version.hip is not None and torch.cuda.is_available(),
        "an Apple GPU (mps)": torch.backends.mps.is_available(),
        "an Intel GPU (xpu)": torch.xpu.is_available(),
    }
    return next((kind for kind, there in kinds.items() if there), None)


def name(device: torch.device) -> str:
    """The name of a device for users: a GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def hold_to(budget: int, device: torch.device) -> None:
    """Limits this process to `budget` bytes of tensors, even if the card has more."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)


def reset_peak(device: torch.device) -> None:
    """Resets the peak of the bytes that a CUDA device has allocated."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """The peak of the bytes that a CUDA device has allocated since the reset; None elsewhere."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
