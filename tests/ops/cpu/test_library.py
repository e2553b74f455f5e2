"""Tests of what Python reads from the C files."""

import re
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import pytest
import torch

from razorctl.ops.cpu import library
from razorctl.ops.functions import NUMBERS
from razorctl.system import c_compiler

HEADER = (c_compiler.SOURCES / "common.h").read_text("utf-8")
SOURCES = "\n".join(path.read_text("utf-8") for path in c_compiler.SOURCES.glob("*.c"))


def members(kind: str, source: str) -> list[str]:
    """The names in `struct x {...}` or `enum x {...}`, in their order."""
    inside = re.search(rf"{kind} {{(.*?)}}", source, re.DOTALL)[1]
    return re.findall(r"(\w+)(?=\s*[,;]|\s*$)", inside)


def test_types_of_arguments_are_those_in_c():
    source = """
int razorctl_one(const struct copy *copy, const void *restrict x, int64_t rows,
                 float low, int8_t *codes, int threads) {
}
int razorctl_two(void) { return 1; }
static int mine(double x) {
"""
    types = {"copy": POINTER(library.Copy), "x": c_void_p, "rows": c_int64, "low": c_float}
    types |= {"codes": c_void_p, "threads": c_int}
    assert library.prototypes(source) == {"one": types, "two": {}}
    assert list(library.prototypes(source)["one"]) == list(types)
    with pytest.raises(TypeError, match=r"^razorctl_f takes 'double', but arguments are pointers"):
        library.prototypes("int razorctl_f(double x, int threads) {")


def test_no_kernel_is_called_but_those_whose_types_are_known():
    if library.library() is None:
        pytest.skip(library.state())
    names = re.findall(r"\brazorctl_(\w+)\(", SOURCES)
    assert set(names) == set(library.prototypes(SOURCES))
    with pytest.raises(LookupError, match=r"^no file in .*cpu defines int"):
        library.call("other", x=torch.ones(3))
    with pytest.raises(LookupError, match="n"):
        library.call("slope_bits", x=torch.ones(3), dtype=0)


@pytest.mark.parametrize("name", ["copy", "codes"])
def test_a_structure_has_the_members_that_it_has_in_c(name):
    structure = {"copy": library.Copy, "codes": library.Codes}[name]
    names = members(f"struct {name}", HEADER + SOURCES)
    assert [field for field, _ in structure._fields_] == names


def test_numbers_of_functions_and_dtypes_are_those_in_c():
    names = ["IDENTITY" if f is None else f.upper().replace("-", "_") for f in NUMBERS]
    assert names == members("enum function", HEADER)
    assert list(NUMBERS.values()) == list(range(len(names)))
    assert len(library.DTYPES) == len(members("enum dtype", HEADER))
