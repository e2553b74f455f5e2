"""The instructions that passes over activations issue an element stay what plans count.

So do the registers of a thread. Machine code of the kernels of a default step, compiled for cards
that are not in this machine.
"""

import json

import pytest
import triton
from triton import knobs

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.ops.triton.compiled import compile_all
from razorctl.ops.triton.recorded import Card
from razorctl.planning import job_trace
from razorctl.planning.times import INSTRUCTIONS
from scripts.bench import cubins
from tests.models import few_blocks, registered

HOT = {
    *("activation_grad_int8 gelu", "norm_quantize", "quantize", "linear_operands"),
    *("linear_operands gelu", "norm_grad_int8", "int8_heads", "linear_again", "residual_add"),
}
# Registers of a thread on sm_90: at most FEW, but for passes that hold a whole tile or row.
FEW = 80
WIDE = {"quantize": 228, "norm_quantize": 168, "int8_heads": 128, "norm_grad_int8": 122}
WIDE |= {"linear_operands": 117, "activation_grad_int8 gelu": 111, "linear_again": 107}
TABLE = json.loads(INSTRUCTIONS.read_text())
MOST = 1.1  # of the committed instructions; fewer than the inverse are to be committed too


def pytest_generate_tests(metafunc):
    if "capability" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-variant")
        metafunc.parametrize("capability", [80, 89, 90] if every else [90])


def test_hot_kernels_issue_the_instructions_that_are_committed(capability, monkeypatch):
    if triton.__version__ != TABLE["triton"]:
        pytest.skip(f"instructions are counted by Triton {TABLE['triton']}")
    try:
        assert knobs.nvidia.nvdisasm.path
    except RuntimeError:
        pytest.skip("this Triton has no disassembler")
    job = Job("vit-b16", "random", batch_size=128, precision="bf16", optimizer="sgd")
    job = job.resolved({"learning_rate": 1e-3, "weight_decay": 0.0}, 128)
    card = Card(capability)
    with registered(few_blocks("vit-b16")):
        launches = job_trace.launches(job, Recipe("razor", 0.9), 1000, card)[card]
    hot = {name: one for name, one in cubins.passes(launches).items() if name in HOT}
    assert hot.keys() == HOT
    compile_all([launch.variant for launch in hot.values()], capability, threads=2)
    off = {}
    for name, launch in hot.items():
        counted = cubins.per_element(launch, capability)
        registers = cubins.compiled(launch.variant, capability).registers
        if capability == 90 and registers > WIDE.get(name, FEW):
            off[name] = f"{registers} registers"
        committed = TABLE["per_element"][name][str(capability)]
        if not 1 / MOST <= counted / committed <= MOST:
            off[name] = f"{counted:.1f} of {committed}; see scripts/bench/cubins.py"
    assert not off


def test_instructions_of_a_loop_count_for_each_turn():
    code = """
        /*0000*/ MOV R1, c[0x0][0x28] ;
        /*0010*/ @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/ FADD R2, R2, R3 ;
        /*0030*/ @!P1 BRA `(.L_x_1) ;
.L_x_0:
        /*0040*/ @P2 BRA `(.L_x_2) ;
        /*0050*/ CALL.REL.NOINC `($slow) ;
.L_x_2:
        /*0060*/ EXIT ;
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cubins, "_sass", lambda _: code)
        kernel = cubins.CompiledKernel(0, 0, 0, 4, "", "", "", b"")
        assert [kernel.issued(turns) for turns in (1, 10)] == [6, 24]
