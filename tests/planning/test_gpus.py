from dataclasses import replace

import pytest

from razorctl.config import presets
from razorctl.errors import UsageError
from razorctl.planning import detect, gpus
from razorctl.planning.detect import Detected

SHIPPED = sorted(file.stem for file in (presets.SHIPPED / "gpus").glob("*.toml"))
MIB = 2**20

# SMs, boost clock in GHz of the tensor cores and, where it differs, of the others.
CHIPS = {
    "a10": (72, 1.695),
    "a100-40gb": (108, 1.41),
    "a100-80gb": (108, 1.41),
    "h100-80gb": (132, 1.83, 1.98),
    "h200": (132, 1.83, 1.98),
    "l4": (58, 2.04),
    "l40s": (142, 2.52),
    "rtx-2060": (30, 1.68),
    "rtx-2060-super": (34, 1.65),
    "rtx-2070": (36, 1.62),
    "rtx-2070-super": (40, 1.77),
    "rtx-2080": (46, 1.71),
    "rtx-2080-super": (48, 1.815),
    "rtx-2080-ti": (68, 1.545),
    "rtx-3060": (28, 1.777),
    "rtx-3060-laptop": (30, 1.703),
    "rtx-3060-ti": (38, 1.665),
    "rtx-3070": (46, 1.725),
    "rtx-3070-laptop": (40, 1.62),
    "rtx-3070-ti": (48, 1.77),
    "rtx-3070-ti-laptop": (46, 1.485),
    "rtx-3080-10gb": (68, 1.71),
    "rtx-3080-12gb": (70, 1.71),
    "rtx-3080-laptop-16gb": (48, 1.71),
    "rtx-3080-laptop-8gb": (48, 1.71),
    "rtx-3080-ti": (80, 1.665),
    "rtx-3080-ti-laptop": (58, 1.59),
    "rtx-3090": (82, 1.695),
    "rtx-3090-ti": (84, 1.86),
    "rtx-4050-laptop": (20, 2.37),
    "rtx-4060": (24, 2.46),
    "rtx-4060-laptop": (24, 2.37),
    "rtx-4060-ti-16gb": (34, 2.535),
    "rtx-4060-ti-8gb": (34, 2.535),
    "rtx-4070": (46, 2.475),
    "rtx-4070-laptop": (36, 2.175),
    "rtx-4070-super": (56, 2.475),
    "rtx-4070-ti": (60, 2.61),
    "rtx-4070-ti-super": (66, 2.61),
    "rtx-4080": (76, 2.505),
    "rtx-4080-laptop": (58, 2.28),
    "rtx-4080-super": (80, 2.55),
    "rtx-4090": (128, 2.52),
    "rtx-4090-laptop": (76, 2.04),
    "rtx-5060": (30, 2.497),
    "rtx-5060-laptop": (26, 2.497),
    "rtx-5060-ti-16gb": (36, 2.572),
    "rtx-5060-ti-8gb": (36, 2.572),
    "rtx-5070": (48, 2.512),
    "rtx-5070-laptop": (36, 2.347),
    "rtx-5070-ti": (70, 2.452),
    "rtx-5070-ti-laptop": (46, 2.22),
    "rtx-5080": (84, 2.617),
    "rtx-5080-laptop": (60, 2.287),
    "rtx-5090": (170, 2.407),
    "rtx-5090-laptop": (82, 2.16),
    "rtx-6000-ada": (142, 2.505),
    "rtx-a6000": (84, 1.8),
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
# GeForce cards halve what accumulates in fp32; cards for work have the same chips and do not.
WORK = ("a10", "l4", "l40s", "rtx-6000-ada", "rtx-a6000")
HALVED = ("tf32", "fp16", "bf16", "fp8")


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
    assert 1.5e11 < gpu.bandwidth < 2e13
    assert {"fp32", "fp16"} <= set(gpu.rates) <= set(gpus.PRECISIONS)
    assert all(1e12 < rate < 1e16 for rate in gpu.rates.values())
    assert ("bf16" in gpu.rates) == ("tf32" in gpu.rates) == (capability >= (8, 0))
    assert ("fp8" in gpu.rates) == (capability >= (8, 9))
    assert ("int8" in gpu.rates) == (capability >= (7, 5))
    assert gpu.achieved.source
    assert 0.3 < gpu.achieved.matrix < 1.1
    assert 0.8 < gpu.achieved.bandwidth < 0.95
    assert 0.45 < gpu.achieved.reduces < 0.9 * gpu.achieved.bandwidth
    assert gpu.achieved.of_int8(1024) <= gpu.achieved.of_int8(2048) <= gpu.achieved.of_int8(4096)
    assert all(gpu.operations_per_second(p) < 1.1 * rate for p, rate in gpu.rates.items())


@pytest.mark.parametrize("name", SHIPPED)
def test_rates_follow_from_the_chip(name):
    gpu = gpus.load(name)
    per_clock = THROUGHPUT[gpu.compute_capability]
    if gpu.compute_capability == "7.5" and "GeForce" in gpu.name:
        per_clock = per_clock | {"fp16": 512}
    if name in WORK:
        per_clock = {each: n * (1 + (each in HALVED)) for each, n in per_clock.items()}
    sms, tensor_clock, *other_clock = CHIPS[name]
    assert gpu.multiprocessors == sms
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
    assert mine.achieved.source.startswith(f"borrowed from {known.name}, ")
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
    assert gpu.reduced_per_second == pytest.approx(gpus.REDUCES * 80e9)
    reduces = replace(gpu, achieved=replace(achieved, reduces=0.2))
    assert reduces.reduced_per_second == 64e9


def test_int8_products_of_few_terms_reach_less():
    achieved = gpus.Achieved(matrix=0.5, bandwidth=0.5, source="-", int8=0.8, int8_short=0.6)
    shares = {512: 0.6, 1024: 0.6, 2048: 0.7, 4096: 0.8, 25216: 0.8}
    assert {terms: achieved.of_int8(terms) for terms in shares} == pytest.approx(shares)
    assert replace(achieved, int8_short=None).of_int8(512) == 0.8
    assert replace(achieved, int8=None, int8_short=None).of_int8(512) == 0.5


def test_programs_fill_a_card_in_whole_waves():
    gpu = replace(gpus.load("t4"), multiprocessors=40)
    waves = {1: 1 / 40, 40: 1, 41: 41 / 80, 4000: 1}
    assert {programs: gpu.filled(programs) for programs in waves} == waves
    assert replace(gpu, multiprocessors=None).filled(1) == 1


def test_no_two_presets_claim_one_card():
    for name in SHIPPED:
        gpu = gpus.load(name)
        card = Detected(gpu.name, gpu.memory_bytes, 0, gpu.compute_capability, ())
        assert detect.preset_for(card) == gpu


def test_unknown_gpu_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'rtx-4090'"):
        gpus.load("rtx-4091")


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
    found = detect.preset_for(Detected("Tesla T4", 15360 * MIB, 0, "7.5", ()))
    assert found is not None
    assert found.bandwidth == 310e9


def test_the_folder_of_ones_own_may_be_missing(own):
    own.rmdir()
    assert list(gpus.names()) == SHIPPED


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth = ", "bandwidth: ", r"is not valid TOML \(.*line 5, column"),
        ("bandwidth", "bandwith", "unknown field in .* 'bandwith'; did you mean 'bandwidth'"),
        ("multiprocessors = 40", "multiprocessors = 0", "multiprocessors 0 is not a positive"),
        ("320e9", '"320e9"', "bandwidth '320e9' is not of type float"),
        ("320e9", "inf", r"is not valid TOML \(Infinity is not a number"),
        ("16_106_127_360", "1.6e10", "memory bytes 16000000000.0 is not of type int"),
        ('"7.5"', '"sm_75"', "compute_capability 'sm_75' is not major.minor"),
        ("fp16 =", "fp17 =", "unknown name in rates 'fp17'; did you mean 'fp16'"),
        ("fp16 = 65.1e12", "fp16 = 0", "rates.fp16 0 is not a positive, .*operations per second"),
        ("fp32 = 8.1e12", "", "rates lacks 'fp32'"),
        ('"efficient"', '"eficient"', "unknown name in attention 'eficient'; .*'efficient'"),
        ('"efficient"', '"math"', "attention .* has a name twice"),
        ('["efficient", "math"]', "[]", "attention lacks 'math'"),
        ('["efficient", "math"]', '"math"', "attention 'math' is not a list"),
        ("matrix = 0.37", "", "achieved lacks 'matrix'; add it, or leave the table out"),
        ("matrix = 0.37", 'matrix = "37 %"', "matrix '37 %' is not of type float"),
        ("matrix =", "matrx =", "unknown field in achieved 'matrx'; did you mean 'matrix'"),
        ("matrix = 0.37", "matrix = 37", "achieved.matrix 37 is not a share of a peak"),
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


@pytest.mark.parametrize("table", ["rates", "achieved"])
def test_what_must_be_a_table(table, tmp_path):
    file = tmp_path / "broken.toml"
    file.write_text(f"{table} = 3\n" + text("t4").split(f"[{table}]")[0])
    with pytest.raises(UsageError, match=f"{table} 3 is not a table"):
        gpus.load(str(file))


def test_a_preset_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*nowhere.toml \(No such file"):
        gpus.load(str(tmp_path / "nowhere.toml"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError, match=r"latin.toml is not valid TOML"):
        gpus.load(str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4070 Super", "rtx-4070-super"),
        ("RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("3080-laptop-8gb", "rtx-3080-laptop-8gb"),
        ("H100", "h100-80gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("4080", "rtx-4080"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_a_card_is_known_by_what_people_call_it(name, preset):
    assert gpus.load(name) == gpus.load(preset)


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("A100", "a100-40gb or a100-80gb"),
        ("NVIDIA GeForce RTX 3080", "rtx-3080-10gb or rtx-3080-12gb"),
        ("4060 Ti", "rtx-4060-ti-16gb or rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", "rtx-3080-laptop-16gb or"),
    ],
)
def test_a_name_of_two_cards_is_neither(name, cards):
    with pytest.raises(UsageError, match=f"{name!r}; choose {cards}"):
        gpus.load(name)


@pytest.mark.parametrize(
    "name", ["1080 Ti", "NVIDIA GeForce GTX 970", "Tesla P100-PCIE-16GB", "p40"]
)
def test_a_card_that_pytorch_has_no_code_for(name):
    with pytest.raises(UsageError, match=f"{name} is older than .* 7.0, .*; choose another card"):
        gpus.load(name)


@pytest.mark.parametrize(("text", "gib"), [("24", 24), ("24G", 24), ("24gb", 24), ("24 GiB", 24)])
def test_memory_is_what_the_box_says(text, gib):
    assert gpus.memory_size(text) == gib * 2**30
    found = detect.target("rtx-4090", text)
    assert found.budget == found.gpu.memory_bytes < gib * 2**30
    assert detect.target("t4", "16GB").budget == gpus.load("t4").memory_bytes


@pytest.mark.parametrize(
    ("vram", "preset"),
    [
        ("6", "rtx-4050-laptop"),
        ("8", "rtx-4060"),
        ("16GB", "rtx-4060-ti-16gb"),
        ("24GB", "rtx-3090"),
        ("80GB", "a100-80gb"),
    ],
)
def test_a_card_is_guessed_from_its_memory(vram, preset):
    assert detect.target(vram=vram).gpu == gpus.load(preset)
