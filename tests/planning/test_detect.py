"""The GPUs of this machine, found through a binding that a fake stands in for."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from razorctl.errors import UsageError
from razorctl.planning import detect, gpus
from razorctl.planning.detect import Detected, Process

MIB = 2**20


class NVMLError(Exception):
    pass


class NotSupportedError(NVMLError):
    pass


class LibraryNotFoundError(NVMLError):
    pass


class LibraryMismatchError(Exception):
    """The binding's own error for a driver that lacks a function; not an NVMLError."""


class FakeNvml:
    """NVML as its Python binding shows it; a card's value that is an exception is raised."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = LibraryMismatchError

    def __init__(self, *cards, init=None):
        self.cards, self.init, self.open = cards, init, 0

    def nvmlInit(self):  # noqa: N802
        if self.init is not None:
            raise self.init
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.cards[index]

    def __getattr__(self, function):
        def get(card):
            assert self.open == 1
            value = card[function.removeprefix("nvmlDeviceGet")]
            if isinstance(value, Exception):
                raise value
            return value

        return get


def card(uuid="GPU-a1", **values):
    return {
        "UUID": uuid,
        "Name": "NVIDIA GeForce RTX 4090",
        "MemoryInfo": SimpleNamespace(total=24564 * MIB, free=20000 * MIB, used=4564 * MIB),
        "CudaComputeCapability": (8, 9),
        "ComputeRunningProcesses": [],
        "GraphicsRunningProcesses": [],
    } | values


def process(pid, used):
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.fixture
def nvml(monkeypatch):
    """Puts a fake machine in NVML's place."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*cards, **options):
        fake = FakeNvml(*cards, **options)
        monkeypatch.setattr(detect, "pynvml", fake)
        return fake

    return install


def test_detects_what_the_driver_says(nvml):
    fake = nvml(card(ComputeRunningProcesses=[process(7, 3 * MIB)]), card("GPU-b2"))
    first, second = detect.cards()
    seven = Process(7, 3 * MIB)
    assert first == Detected("NVIDIA GeForce RTX 4090", 24564 * MIB, 20000 * MIB, "8.9", (seven,))
    assert second.processes == ()
    assert detect.preset_for(first) == gpus.load("rtx-4090")
    assert fake.open == 0


@pytest.mark.parametrize("error", [LibraryNotFoundError(), NVMLError()])
def test_no_driver_no_gpus(nvml, error):
    nvml(init=error)
    assert detect.cards() == ()


def test_nvml_that_fails_later(nvml, monkeypatch):
    fake = nvml(card())

    def fail():
        raise NVMLError

    monkeypatch.setattr(fake, "nvmlDeviceGetCount", fail)
    assert detect.cards() == ()
    assert fake.open == 0


def test_the_real_binding_has_what_detect_calls():
    pynvml = detect.pynvml
    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    used = re.findall(r"pynvml\.(\w+)", Path(detect.__file__).read_text())
    assert {"nvmlInit", "nvmlDeviceGetName", "NVMLLibraryMismatchError"} <= set(used)
    for name in used:
        assert hasattr(pynvml, name)
    assert isinstance(detect.cards(), tuple)


@pytest.mark.parametrize("field", ["MemoryInfo", "Name", "CudaComputeCapability"])
def test_a_card_the_driver_cannot_describe_is_left_out(nvml, field):
    nvml(card(**{field: NotSupportedError()}), card("GPU-b2", Name="NVIDIA H200"))
    assert [gpu.name for gpu in detect.cards()] == ["NVIDIA H200"]


def test_processes(nvml):
    computing = [process(os.getpid(), 5), process(9, 2 * MIB), process(3, None)]
    drawing = [process(9, None), process(4, MIB)]
    nvml(
        card(ComputeRunningProcesses=computing, GraphicsRunningProcesses=drawing),
        card(ComputeRunningProcesses=NotSupportedError(), GraphicsRunningProcesses=drawing),
        card(
            ComputeRunningProcesses=LibraryMismatchError(),
            GraphicsRunningProcesses=NotSupportedError(),
        ),
    )
    both, one, none = detect.cards()
    assert both.processes == (Process(3, None), Process(4, MIB), Process(9, 2 * MIB))
    assert one.processes == (Process(4, MIB), Process(9, None))
    assert none.processes == ()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("1", "b"),
        ("2, 0", "ca"),
        ("0,-1,1", "a"),
        ("1,3,0", "b"),
        ("GPU-c3000000-0000", "c"),
        ("GPU-c3,GPU-a1", "ca"),
        ("GPU-", ""),  # says which of three?
        ("GPU-b2,GPU-zz,GPU-a1", "b"),
        ("MIG-b2", ""),
    ],
)
def test_cuda_visible_devices(nvml, monkeypatch, visible, found):
    nvml(*(card(f"GPU-{name}{i}000000-0000", Name=name) for i, name in enumerate("abc", 1)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.name for gpu in detect.cards()) == found


def test_a_card_without_uuid_still_counts(nvml, monkeypatch):
    nvml(card(NotSupportedError(), Name="a"), card("GPU-b2", Name="b"))
    assert [gpu.name for gpu in detect.cards()] == ["a", "b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [gpu.name for gpu in detect.cards()] == ["b"]


@pytest.mark.parametrize(
    ("name", "mib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H100 PCIe", 81559, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 12282, None),
        ("GeForce RTX 2080 Ti", 11019, "rtx-2080-ti"),  # as older drivers say
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("NVIDIA T4", 15109, "t4"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("NVIDIA RTX A6000", 48685, "rtx-a6000"),
        ("NVIDIA GeForce RTX 4090", 23028, "rtx-4090"),  # with ECC
    ],
)
def test_preset_for(name, mib, preset):
    found = detect.preset_for(Detected(name, mib * MIB, 0, "0.0", ()))
    assert found == (gpus.load(preset) if preset else None)


@pytest.mark.parametrize(
    ("capability", "message"),
    [("6.1", "GTX Some is older than compute capability 7.0"), ("7.5", "GTX Some has no preset")],
)
def test_a_card_without_preset_is_refused(capability, message, monkeypatch):
    card = Detected("GTX Some", 11 * 2**30, 2**30, capability, ())
    monkeypatch.setattr(detect, "cards", lambda: (card,))
    with pytest.raises(UsageError, match=message):
        detect.target()


OTHERS = {
    "an AMD GPU": {"version.hip": "6.4", "cuda.is_available": lambda: True},
    "an Apple GPU": {"backends.mps.is_available": lambda: True},
    "an Intel GPU": {"xpu.is_available": lambda: True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_gpu_of_another_maker_is_named(other, monkeypatch):
    monkeypatch.setattr(detect, "cards", lambda: ())
    with pytest.raises(UsageError, match="no GPU was found"):
        detect.target()
    for name, value in OTHERS[other].items():
        monkeypatch.setattr(f"torch.{name}", value)
    with pytest.raises(UsageError, match=f"has {other} .* never tried on; name an NVIDIA GPU with"):
        detect.target()
    assert detect.target(vram="11GB").assumed
