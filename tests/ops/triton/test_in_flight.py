"""No kernel of a default job leaves a card's memory or multiprocessors idle, by arithmetic.

Little's law: memory reaches its bandwidth only while bandwidth x latency bytes are requested. The
bytes that a kernel requests follow from its machine code, its registers and its grid. Nothing is
timed here.
"""

from collections import Counter
from math import ceil, prod

from razorctl.ops.triton import gemm_tiles
from razorctl.ops.triton.launch import REGISTERS, WARP
from razorctl.ops.triton.recorded import Launch
from razorctl.planning import gpus
from scripts.bench import cubins
from tests.launches import THIRSTIEST, capability_of, default_job
from tests.ops.triton import releases
from tests.planning.test_gpus import CHIPS

# Seconds from a load to its data while memory is busy. Copies into shared memory reach most of a
# B200's bandwidth, 6.6 TB/s, with 32 KiB in flight on each of 148 SMs, which is 735 ns
# (SemiAnalysis, "Dissecting Nvidia Blackwell", 2026); loads on an RTX 5070 Ti that of GDDR7,
# 847 GB/s, with 8 KiB on each of 70, which is 677 ns (Euhedral, "Memory system of the RTX 5070
# Ti"). Of idle memory it is about half.
LATENCY = 700e-9
# Seconds of an empty launch; a kernel that takes no longer need not fill a card.
SHORTEST = 5e-6
# Of a multiprocessor: KiB of shared memory, of which each program takes one more than it requests,
# and threads (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
PROCESSORS = {
    75: (64, 1024), 80: (164, 2048), 86: (100, 1536), 89: (100, 1536),
    90: (228, 2048), 120: (100, 1536),
}  # fmt: skip
BYTES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*i32": 4, "*i16": 2, "*i8": 1, "*u8": 1}
# Kernels whose programs each read all of the rows' scales.
BY_COLUMNS = ("bounds_kernel", "scales_kernel")


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-variant")
        with_triton = [name for name in CHIPS if gpus.load(name).compute_capability != "7.0"]
        metafunc.parametrize("name", with_triton if every else [THIRSTIEST])


def moved(launch: Launch) -> int:
    """Bytes that a launch reads or writes."""
    kinds = launch.variant.signature
    sizes = {
        name: prod(shape) * BYTES[kinds[name]]
        for name, shape in launch.arguments.items()
        if isinstance(shape, tuple)
    }
    if launch.variant.kernel.__name__ in BY_COLUMNS:
        columns, each = launch.arguments["columns"], launch.variant.constexprs["C"]
        sizes["row_scale"] *= ceil(columns / each)
    return sum(sizes.values())


def resident(kernel: cubins.CompiledKernel, capability: int) -> int:
    """The number of programs that fit a multiprocessor."""
    shared, threads = PROCESSORS[capability]
    registers = ceil(kernel.registers / 8) * 8 * WARP * kernel.warps
    places = REGISTERS // registers, shared * 1024 // (kernel.shared + 1024)
    return min(*places, threads // (WARP * kernel.warps))


def starves(launch: Launch, kernel: cubins.CompiledKernel | None, name: str) -> str | None:
    """Why a launch takes more than twice as long as the card needs for it, or None."""
    gpu, (processors, *_), programs = gpus.load(name), CHIPS[name], prod(launch.grid)
    if launch.variant.kernel is gemm_tiles.scaled_gemm_kernel:
        busy = programs / (processors * ceil(programs / processors))
        return f"{programs} programs keep {busy:.0%} of the card busy" if busy < 0.5 else None
    places = resident(kernel, capability_of(name))
    in_flight = kernel.in_flight * min(places, programs / processors)
    wanted = gpu.bandwidth * LATENCY / processors
    takes = moved(launch) * LATENCY / (in_flight * processors)
    if in_flight >= wanted / 2 or takes <= SHORTEST:
        return None
    return f"{in_flight / 1024:.1f} of {wanted / 1024:.1f} KiB in flight, {1e6 * takes:.0f} us"


def test_kernels_of_the_default_job_fill_a_card(name):
    """On the way, they compile without a fault; test_compiled.py leaves them out."""
    product, card, launches = gemm_tiles.scaled_gemm_kernel, capability_of(name), default_job(name)
    every = {one.variant.key: one.variant for one in launches if one.variant.kernel is not product}
    compilations = {key: cubins.compiled(variant, card) for key, variant in every.items()}
    cubins.read_all(compilations.values(), card)
    faults = {
        every[key].label: why
        for key, kernel in compilations.items()
        if (why := releases.fault(kernel, card))
    }
    starving = Counter[str]()
    for launch in launches:
        if why := starves(launch, compilations.get(launch.variant.key), name):
            kernel = launch.variant.kernel.__name__
            starving[f"{launch.op}: {kernel} of {launch.grid} programs, {why}"] += 1
    assert compilations
    assert not starving
    assert not faults


def test_a_product_of_few_tiles_starves():
    variant = next(v for v in gemm_tiles.variants(90) if v.kernel is gemm_tiles.scaled_gemm_kernel)
    for programs, enough in ((36, False), (108, True), (133, True)):
        launch = Launch("gemm", variant, (programs,), {}, trial=False)
        assert (starves(launch, None, THIRSTIEST) is None) == enough
