"""Roundings, random numbers and activation functions within a kernel, in single precision."""

import triton
import triton.language as tl

# Phi(x) of GELU and GELU'(x) are 1/2 + x p(s), s = 2 (x / REACH)^2 - 1, with x limited to REACH.
# p: coefficients of the least largest error, by Lawson's iteration; highest power first.
REACH = tl.constexpr(4.8)
SHORT = {
    "gelu": (0.0014437143, -0.0041945893, 0.0053923824, -0.007443427, 0.013864084, -0.022187509,
             0.030720823, -0.040565934, 0.0529041, -0.0729797557, 0.1472127885),
    "slope": (-0.012414559, 0.029725015, -0.023688244, 0.026013222, -0.0612793826, 0.0865281597,
              -0.088707827, 0.0863509923, -0.0805231184, 0.0739234686, -0.0802264139, 0.1484677494),
}  # fmt: skip


@triton.jit
def nearest(x):
    """The whole number nearest to `x`, half to even, for magnitudes below 2 ** 22."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23, where floats are whole numbers


@triton.jit
def as_bfloat16(x):
    """The bfloat16 nearest to `x`, half to even, as float32, so that a cast to bfloat16 is exact.

    Such a cast truncates in Triton's interpreter, and sm_75 has no instruction for it.
    """
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def inverse(x):
    """1 / x, and 0 where x is not positive or 1 / x is not finite."""
    result = tl.div_rn(1.0, tl.where(x > 0, x, 1.0))
    return tl.where((x > 0) & (result < float("inf")), result, 0.0)


@triton.jit
def _mixed(x):
    """The bijection of uint32 in razorctl.ops.random."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def uniform(seed, position):
    """Numbers `position`, uint32, of razorctl.ops.random.uniform for a seed, int64."""
    mixed = _mixed(_mixed(position) ^ _mixed(seed.to(tl.uint32)))
    return (mixed >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _share_of_gelu(x):
    """(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activated(x, FUNCTION: tl.constexpr):
    """f(x) for a name in razorctl.ops.functions.FUNCTIONS."""
    if FUNCTION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu-tanh":
        return x * _share_of_gelu(x)
    elif FUNCTION == "silu":
        return x * _sigmoid(x)
    elif FUNCTION == "quick-gelu":
        return x * _sigmoid(1.702 * x)
    elif FUNCTION == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3, 0.0), 6.0) * 0.16666666666666666
    elif FUNCTION == "relu":
        return tl.maximum(x, 0.0)
    elif FUNCTION == "relu6":
        return tl.minimum(tl.maximum(x, 0.0), 6.0)
    else:
        tl.static_assert(FUNCTION == "leaky-relu")
        return tl.where(x > 0, x, 0.01 * x)


@triton.jit
def slope(x, FUNCTION: tl.constexpr):
    """f'(x)."""
    if FUNCTION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif FUNCTION == "gelu-tanh":
        s = _share_of_gelu(x)
        return s * (1 + x * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x))
    elif FUNCTION == "silu":
        s = _sigmoid(x)
        return s * (1 + x * (1 - s))
    elif FUNCTION == "quick-gelu":
        s = _sigmoid(1.702 * x)
        return s * (1 + 1.702 * x * (1 - s))
    elif FUNCTION == "hardswish":
        return tl.where(x < -3, 0.0, tl.where(x < 3, x * 0.3333333333333333 + 0.5, 1.0))
    elif FUNCTION == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif FUNCTION == "relu6":
        return tl.where((x > 0) & (x < 6), 1.0, 0.0)
    else:
        tl.static_assert(FUNCTION == "leaky-relu")
        return tl.where(x > 0, 1.0, 0.01)


@triton.constexpr_function
def _coefficient(name, power):
    return SHORT[name][power]


@triton.constexpr_function
def _count(name):
    return len(SHORT[name])


@triton.jit
def _half_and_odd(x, NAME: tl.constexpr):
    """1/2 + x p(s) of SHORT."""
    x = tl.minimum(tl.maximum(x, -REACH), REACH)
    s = x * x * (2 / (REACH * REACH)) - 1
    p = tl.full(x.shape, _coefficient(NAME, 0), tl.float32)
    for i in tl.static_range(1, _count(NAME)):
        p = p * s + _coefficient(NAME, i)
    return x * p + 0.5


@triton.jit
def short_activated(x, FUNCTION: tl.constexpr):
    """`activated` for int8 codes: GELU is off by at most 5e-6, in half of the instructions."""
    if FUNCTION == "gelu":
        return x * _half_and_odd(x, "gelu")
    else:
        return activated(x, FUNCTION)


@triton.jit
def short_slope(x, FUNCTION: tl.constexpr):
    """`slope` for int8 codes: GELU's slope is off by at most 1.2e-5, in a third of them."""
    if FUNCTION == "gelu":
        return _half_and_odd(x, "slope")
    else:
        return slope(x, FUNCTION)


@triton.jit
def larger(a, b):
    """The elementwise maximum, NaN where either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(x):
    """The bits of |x|, in the order of magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def low_byte(x):
    """x of -127 to 127, rounded to nearest, as int8; conversions have a quarter of the rate."""
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
