import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from razorctl.config import presets
from razorctl.errors import UsageError
from razorctl.job import settle_precision
from razorctl.planning import gpus
from razorctl.planning.gpus import Detected, Process

SHIPPED = sorted(file.stem for file in (presets.SHIPPED / "gpus").glob("*.toml"))
MIB = 2**20

# SMs, boost clock in GHz of the tensor cores and, where it differs, of the others.
CHIPS = {
    "a100-40gb": (108, 1.41),
    "a100-80gb": (108, 1.41),
    "h100-80gb": (132, 1.83, 1.98),
    "h200": (132, 1.83, 1.98),
    "rtx-2080-ti": (68, 1.545),
    "rtx-3060": (28, 1.777),
    "rtx-3090": (82, 1.695),
    "rtx-4060-ti-16gb": (34, 2.535),
    "rtx-4070-ti-super": (66, 2.61),
    "rtx-4090": (128, 2.52),
    "rtx-5090": (170, 2.407),
    "t4": (40, 1.59),
    "v100-16gb": (80, 1.53),
}
GEFORCE = {"fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "int8": 2048}
# Operations per SM and clock, dense, with accumulation in fp32 or int32.
THROUGHPUT = {
    "7.0": {"fp32": 128, "fp16": 1024},
    "7.5": {"fp32": 128, "fp16": 1024, "int8": 2048},
    "8.0": {"fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096},
    "8.6": GEFORCE,
    "8.9": GEFORCE | {"fp8": 1024},
    "9.0": {"fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "int8": 8192, "fp8": 8192},
    "12.0": GEFORCE | {"fp8": 1024},
}


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The folder of the user's own presets, empty at first."""
    monkeypatch.setattr(presets, "user_config_dir", lambda app: str(tmp_path / app))
    folder = tmp_path / "razorctl" / "gpus"
    folder.mkdir(parents=True)
    return folder


def text(name):
    return (presets.SHIPPED / "gpus" / f"{name}.toml").read_text()


@pytest.mark.parametrize("name", SHIPPED)
def test_every_preset_is_plausible(name):
    gpu = gpus.load(name)
    assert gpu.name.startswith(("NVIDIA ", "Tesla "))
    assert gpu.source
    assert gpu.memory_bytes % MIB == 0
    assert 4 <= gpu.memory_bytes / 2**30 <= 300
    capability = tuple(map(int, gpu.compute_capability.split(".")))
    assert capability >= (7, 0)
    assert 2e11 < gpu.bandwidth < 2e13
    assert {"fp32", "fp16"} <= set(gpu.rates) <= set(gpus.PRECISIONS)
    assert all(1e12 < rate < 1e16 for rate in gpu.rates.values())
    assert ("bf16" in gpu.rates) == ("tf32" in gpu.rates) == (capability >= (8, 0))
    assert ("fp8" in gpu.rates) == (capability >= (8, 9))
    assert ("int8" in gpu.rates) == (capability >= (7, 5))
    assert gpu.achieved.source
    assert 0.3 < gpu.achieved.matrix < 1.1
    assert 0.8 < gpu.achieved.bandwidth < 0.95
    assert all(gpu.operations_per_second(p) < 1.1 * rate for p, rate in gpu.rates.items())


@pytest.mark.parametrize("name", SHIPPED)
def test_rates_follow_from_the_chip(name):
    gpu = gpus.load(name)
    per_clock = THROUGHPUT[gpu.compute_capability]
    if name == "rtx-2080-ti":  # GeForce cards halve what accumulates in fp32
        per_clock = per_clock | {"fp16": 512}
    sms, tensor_clock, *other_clock = CHIPS[name]
    assert set(gpu.rates) == set(per_clock)
    for precision, rate in gpu.rates.items():
        clock = other_clock[0] if other_clock and precision == "fp32" else tensor_clock
        assert rate == pytest.approx(sms * clock * 1e9 * per_clock[precision], rel=0.006)


@pytest.mark.parametrize("name", SHIPPED)
def test_attention_is_what_pytorch_allows(name):
    # torch 2.15 sdp_utils.cpp: flash and cuDNN from sm80 to sm121, efficient from sm50;
    # cuDNN goes first on Hopper and last elsewhere.
    gpu = gpus.load(name)
    major = int(gpu.compute_capability.split(".")[0])
    want = ["flash", "efficient", "math", "cudnn"] if major >= 8 else ["efficient", "math"]
    if major in (9, 10):
        want.insert(0, want.pop())
    assert gpu.attention == tuple(want)


def test_every_generation_has_shares_of_its_own():
    assert {gpus.load(name).compute_capability for name in SHIPPED} == set(gpus.MEASURED)
    for capability, name in gpus.MEASURED.items():
        assert "[achieved]" in text(name)
        assert gpus.load(name).compute_capability == capability


@pytest.mark.parametrize(
    ("capability", "name"),
    [("7.5", "rtx-2080-ti"), ("8.7", "rtx-3090"), ("10.0", "h100-80gb"), ("6.1", "v100-16gb")],
)
def test_a_card_without_shares_has_those_of_its_generation_and_says_so(own, capability, name):
    table = text("t4").split("[achieved]")[0].replace('"7.5"', f'"{capability}"')
    (own / "mine.toml").write_text(table)
    mine, known = gpus.load("mine"), gpus.load(name)
    assert mine.achieved.source.startswith(f"none of its own; those of {known.name}, ")
    assert mine.achieved.source.endswith(known.achieved.source)
    borrowed = replace(mine.achieved, source="", borrowed=None)
    assert borrowed == replace(known.achieved, source="")
    assert (mine.achieved.borrowed, known.achieved.borrowed) == (known.name, None)


def test_what_kernels_reach():
    t4 = gpus.load("t4")
    achieved = gpus.Achieved(matrix=0.5, bandwidth=0.25, source="-", int8=0.75, depthwise=0.1)
    gpu = replace(t4, achieved=achieved)
    assert gpu.bytes_per_second == 80e9
    assert gpu.operations_per_second("fp16") == 0.5 * 65.1e12
    assert gpu.operations_per_second("int8") == 0.75 * 130.3e12
    assert gpu.operations_per_second("tf32") == 0.5 * 8.1e12  # which a T4 lacks
    assert gpu.operations_per_second("depthwise") == 0.1 * 8.1e12


def test_no_two_presets_claim_one_card():
    for name in SHIPPED:
        gpu = gpus.load(name)
        card = Detected(gpu.name, gpu.memory_bytes, 0, gpu.compute_capability, ())
        assert gpus.preset_for(card) == gpu


def test_the_mission_cards_are_there():
    assert {"rtx-2080-ti", "rtx-4090", "a100-40gb", "a100-80gb"} <= set(gpus.names())


def test_unknown_gpu_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'rtx-4090'"):
        gpus.load("rtx4090")


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(text("t4").replace("Tesla T4", "NVIDIA µ-GPU"), encoding="utf-8")
    assert gpus.load(str(file)).name == "NVIDIA µ-GPU"
    assert "mine" not in gpus.names()


def test_own_presets_join_the_shipped_and_win(own):
    (own / "mine.toml").write_text(text("t4").replace("Tesla T4", "NVIDIA X"))
    (own / "t4.toml").write_text(text("t4").replace("320e9", "300e9"))
    assert set(gpus.names()) == {*SHIPPED, "mine"}
    assert gpus.load("mine").name == "NVIDIA X"
    assert gpus.load("t4").bandwidth == 300e9
    (own / "our-t4.toml").write_text(text("t4").replace("320e9", "310e9"))
    (own / "t4.toml").unlink()
    found = gpus.preset_for(Detected("Tesla T4", 15360 * MIB, 0, "7.5", ()))
    assert found is not None
    assert found.bandwidth == 310e9


def test_the_folder_of_ones_own_may_be_missing(own):
    own.rmdir()
    assert list(gpus.names()) == SHIPPED


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth = ", "bandwidth: ", "is not TOML, mend it: .*line 4, column"),
        ("bandwidth = 320e9", "", "lacks bandwidth; add"),
        ("bandwidth", "bandwith", "unknown field in .* 'bandwith'; did you mean 'bandwidth'"),
        ("320e9", '"320e9"', "bandwidth '320e9' is not of type float"),
        ("320e9", "true", "bandwidth True is not of type float"),
        ("320e9", "inf", "bandwidth inf is not a positive, finite number"),
        ("320e9", "nan", "bandwidth nan is not a positive, finite number"),
        ("16_106_127_360", "-1", "memory_bytes -1 is not a positive"),
        ("16_106_127_360", "1.6e10", "memory bytes 16000000000.0 is not of type int"),
        ('"7.5"', "7.5", "compute capability 7.5 is not of type str"),
        ('"7.5"', '"sm_75"', "compute_capability 'sm_75' is not major.minor"),
        ("fp16 =", "fp17 =", "unknown name in rates 'fp17'; did you mean 'fp16'"),
        ("fp16 = 65.1e12", "fp16 = 0", "rates.fp16 0 is not a positive, .*operations per second"),
        ("fp16 = 65.1e12", 'fp16 = "65"', "rates.fp16 '65' is not a positive"),
        ("fp32 = 8.1e12", "", "rates lacks 'fp32'"),
        ('"efficient"', '"eficient"', "unknown name in attention 'eficient'; .*'efficient'"),
        ('"efficient"', "1", "unknown name in attention '1'"),
        ('"efficient"', '"math"', "attention .* has a name twice"),
        ('["efficient", "math"]', "[]", "attention lacks 'math'"),
        ('["efficient", "math"]', '"math"', "attention 'math' is not a list"),
        ("matrix = 0.37", "", "achieved lacks 'matrix'; add it, or leave the table out"),
        ("matrix =", "matrx =", "unknown field in achieved 'matrx'; did you mean 'matrix'"),
        ("matrix = 0.37", "matrix = 0", "achieved.matrix 0 is not a share of a peak; .* to 1.5"),
        ("matrix = 0.37", "matrix = 37", "achieved.matrix 37 is not a share of a peak"),
        ("matrix = 0.37", "matrix = nan", "achieved.matrix nan is not a share of a peak"),
        ("matrix = 0.37", 'matrix = "37 %"', "matrix '37 %' is not of type float"),
    ],
)
def test_a_broken_preset_is_refused_in_one_sentence(tmp_path, old, new, message):
    file = tmp_path / "broken.toml"
    assert old in text("t4")
    file.write_text(text("t4").replace(old, new, 1))
    with pytest.raises(UsageError, match=message) as refused:
        gpus.load(str(file))
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rates_must_be_a_table(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("rates = 3\n" + text("t4").split("[rates]")[0])
    with pytest.raises(UsageError, match="rates 3 is not a table"):
        gpus.load(str(file))


def test_achieved_must_be_a_table(tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text("achieved = 0.9\n" + text("t4").split("[achieved]")[0])
    with pytest.raises(UsageError, match=r"achieved 0.9 is not a table; give one, or leave"):
        gpus.load(str(file))


def test_a_preset_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*nowhere.toml \(No such file"):
        gpus.load(str(tmp_path / "nowhere.toml"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError, match=r"latin.toml is not TOML"):
        gpus.load(str(tmp_path / "latin.toml"))


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
        monkeypatch.setattr(gpus, "pynvml", fake)
        return fake

    return install


def test_detects_what_the_driver_says(nvml):
    fake = nvml(card(ComputeRunningProcesses=[process(7, 3 * MIB)]), card("GPU-b2"))
    first, second = gpus.detect()
    seven = Process(7, 3 * MIB)
    assert first == Detected("NVIDIA GeForce RTX 4090", 24564 * MIB, 20000 * MIB, "8.9", (seven,))
    assert second.processes == ()
    assert gpus.preset_for(first) == gpus.load("rtx-4090")
    assert fake.open == 0


@pytest.mark.parametrize("error", [LibraryNotFoundError(), NVMLError()])
def test_no_driver_no_gpus(nvml, error):
    nvml(init=error)
    assert gpus.detect() == ()


def test_nvml_that_fails_later(nvml, monkeypatch):
    fake = nvml(card())

    def fail():
        raise NVMLError

    monkeypatch.setattr(fake, "nvmlDeviceGetCount", fail)
    assert gpus.detect() == ()
    assert fake.open == 0


def test_the_real_binding_has_what_detect_calls():
    pynvml = gpus.pynvml
    assert issubclass(pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError)
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    used = re.findall(r"pynvml\.(\w+)", Path(gpus.__file__).read_text())
    assert {"nvmlInit", "nvmlDeviceGetName", "NVMLLibraryMismatchError"} <= set(used)
    for name in used:
        assert hasattr(pynvml, name)
    assert isinstance(gpus.detect(), tuple)


@pytest.mark.parametrize("field", ["MemoryInfo", "Name", "CudaComputeCapability"])
def test_a_card_the_driver_cannot_describe_is_left_out(nvml, field):
    nvml(card(**{field: NotSupportedError()}), card("GPU-b2", Name="NVIDIA H200"))
    assert [gpu.name for gpu in gpus.detect()] == ["NVIDIA H200"]


def test_names_may_be_bytes(nvml, monkeypatch):
    nvml(card(b"GPU-a1", Name=b"Tesla T4"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1")
    assert [gpu.name for gpu in gpus.detect()] == ["Tesla T4"]


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
    both, one, none = gpus.detect()
    assert both.processes == (Process(3, None), Process(4, MIB), Process(9, 2 * MIB))
    assert one.processes == (Process(4, MIB), Process(9, None))
    assert none.processes == ()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("1", "b"),
        ("2, 0", "ca"),
        ("0,-1,1", "a"),
        ("1,3,0", "b"),
        ("0,0", ""),
        ("GPU-c3000000-0000", "c"),
        ("GPU-c3,GPU-a1", "ca"),
        ("GPU-", ""),  # says which of three?
        ("GPU-b2,GPU-zz,GPU-a1", "b"),
        ("GPU-b2,GPU-b2", ""),
        ("MIG-b2", ""),
    ],
)
def test_cuda_visible_devices(nvml, monkeypatch, visible, found):
    nvml(*(card(f"GPU-{name}{i}000000-0000", Name=name) for i, name in enumerate("abc", 1)))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(gpu.name for gpu in gpus.detect()) == found


def test_a_card_without_uuid_still_counts(nvml, monkeypatch):
    nvml(card(NotSupportedError(), Name="a"), card("GPU-b2", Name="b"))
    assert [gpu.name for gpu in gpus.detect()] == ["a", "b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [gpu.name for gpu in gpus.detect()] == ["b"]


@pytest.mark.parametrize(
    ("name", "mib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA H100 PCIe", 81559, None),
        ("NVIDIA H200 NVL", 143771, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, None),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060"),
        ("NVIDIA GeForce RTX 3060", 8192, None),
        ("GeForce RTX 2080 Ti", 11019, "rtx-2080-ti"),  # as older drivers say
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("Tesla V100-PCIE-16GB", 16160, None),
        ("NVIDIA T4", 15109, "t4"),
        ("A100-SXM4-40GB", 40536, "a100-40gb"),
    ],
)
def test_preset_for(name, mib, preset):
    found = gpus.preset_for(Detected(name, mib * MIB, 0, "0.0", ()))
    assert found == (gpus.load(preset) if preset else None)


def test_precision_of_every_preset():
    bf16 = {
        name
        for name in gpus.names()
        if settle_precision("auto", gpus.load(name).compute_capability) == "bf16"
    }
    assert bf16 == {name for name in gpus.names() if "bf16" in gpus.load(name).rates}
