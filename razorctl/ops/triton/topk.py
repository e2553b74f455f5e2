"""Kernels of ops.topk: the key of rank k digit by digit from histograms, then one ordered pass.

values [k] and bits [n] of the k largest |x|; and the dense tensor [n] of them.

Keys are the 15 or 31 bits of |x|, so kernels load integers. Each of at most PROGRAMS programs has
one stretch of positions, and sums the counts of earlier stretches itself. So no scan takes a launch
of its own, and after a histogram is cleared there are four launches for a float16 or bfloat16
tensor and six for a float32 one.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels
from razorctl.ops import topk as op
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.variants import Variant

PROGRAMS = constexpr(1024)
BLOCK = 2048  # elements that a program holds; a multiple of 8, below 2 ** 16
WARPS, STAGES = 8, 2
DIGIT = constexpr(8)  # bits of a histogram
BINS = constexpr(256)
INTEGERS = {2: torch.int16, 4: torch.int32}


@triton.jit
def _keys(bits):
    """The bits of |x|, int32, from the bits of x; NaN is above infinity."""
    return bits.to(tl.int32) & ((1 << (bits.dtype.primitive_bitwidth - 1)) - 1)


@triton.jit
def _chosen(histograms, k, FOUND: tl.constexpr):
    """The first FOUND digits of the key of rank k from above, and its rank among such keys."""
    bins = tl.arange(0, BINS)
    prefix, rank = 0, k
    for digit in tl.static_range(FOUND):
        counts = tl.load(histograms + digit * BINS + bins)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (above < rank) & (rank <= above + counts)
        prefix = (prefix << DIGIT) | tl.sum(tl.where(here, bins, 0), 0)
        rank -= tl.sum(tl.where(here, above, 0), 0)
    return prefix, rank


@launchable
def histogram_kernel(
    x, histograms, n, k, stretch,
    FOUND: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts digit FOUND of the keys that share all digits before it with the key of rank k."""
    prefix, _ = _chosen(histograms, k, FOUND)
    SHIFT: tl.constexpr = (DIGITS - 1 - FOUND) * DIGIT
    start = tl.program_id(0).to(tl.int64) * stretch
    counts = tl.zeros((BINS,), tl.int32)
    for block in range(start, min(start + stretch, n), BLOCK):
        position = block + tl.arange(0, BLOCK)
        inside = position < n
        keys = _keys(tl.load(x + position, inside, 0)) >> SHIFT
        counts += tl.histogram(keys & (BINS - 1), BINS, inside & (keys >> DIGIT == prefix))
    tl.atomic_add(histograms + FOUND * BINS + tl.arange(0, BINS), counts, sem="relaxed")


@launchable
def count_kernel(x, histograms, counts, n, k, stretch, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the keys of each stretch that are above the key of rank k, and that equal it."""
    smallest, _ = _chosen(histograms, k, DIGITS)
    start = tl.program_id(0).to(tl.int64) * stretch
    # Keys above, plus 2 ** 16 times keys equal. Positions past the end may count as equal, but
    # nothing depends on the count of the last stretch.
    both = tl.zeros((BLOCK,), tl.int32)
    for block in range(start, min(start + stretch, n), BLOCK):
        position = block + tl.arange(0, BLOCK)
        keys = _keys(tl.load(x + position, position < n, 0))
        both += tl.where(keys == smallest, 65536, (keys > smallest).to(tl.int32))
    tl.store(counts + tl.program_id(0), tl.sum(both & 65535, 0))
    tl.store(counts + PROGRAMS + tl.program_id(0), tl.sum(both >> 16, 0))


@triton.jit
def _before(counts):
    """The sum of the counts of all stretches before this program's."""
    programs = tl.arange(0, PROGRAMS)
    return tl.sum(tl.load(counts + programs, programs < tl.program_id(0), 0), 0)


@launchable
def pack_kernel(
    x, histograms, counts, values, bitmap, n, k, stretch,
    DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the values of the kept elements of a stretch, and its bits."""
    smallest, ties = _chosen(histograms, k, DIGITS)  # of keys equal to it, `ties` are kept
    above, equal = _before(counts), _before(counts + PROGRAMS)
    start = tl.program_id(0).to(tl.int64) * stretch
    for block in range(start, min(start + stretch, n), BLOCK):
        position = block + tl.arange(0, BLOCK)
        inside = position < n
        bits = tl.load(x + position, inside, 0)
        keys = _keys(bits)
        tie = (keys == smallest) & inside
        # One scan counts both: keys above, plus 2 ** 16 times keys equal.
        one = tl.where(tie, 65536, (keys > smallest).to(tl.int32))
        running = tl.cumsum(one, 0)
        rank = equal + (running >> 16)
        mask = (keys > smallest) | (tie & (rank <= ties))
        place = above + (running & 65535) + tl.minimum(rank, ties) - 1
        tl.store(values + place, bits, mask)
        bitset = mask.to(tl.int32).reshape(BLOCK // 8, 8) << tl.arange(0, 8)[None, :]
        byte = block // 8 + tl.arange(0, BLOCK // 8)
        tl.store(bitmap + byte, tl.sum(bitset, 1).to(tl.uint8), byte < (n + 7) // 8)
        total = tl.sum(one, 0)
        above += total & 65535
        equal += total >> 16


@launchable
def count_bits_kernel(bitmap, counts, n, stretch, BLOCK: tl.constexpr):
    """Counts the bits of each stretch that are set; `n` and `stretch` are numbers of bits."""
    start = tl.program_id(0).to(tl.int64) * stretch
    total = tl.zeros((BLOCK // 8,), tl.int32)
    for block in range(start, min(start + stretch, n), BLOCK):
        byte = block // 8 + tl.arange(0, BLOCK // 8)
        bits = tl.load(bitmap + byte, byte < (n + 7) // 8, 0).to(tl.int32)
        for bit in tl.static_range(8):
            total += (bits >> bit) & 1
    tl.store(counts + tl.program_id(0), tl.sum(total, 0))


@launchable
def unpack_kernel(values, bitmap, counts, dense, n, stretch, BLOCK: tl.constexpr):
    """Writes a stretch of the dense tensor."""
    kept = _before(counts)
    start = tl.program_id(0).to(tl.int64) * stretch
    for block in range(start, min(start + stretch, n), BLOCK):
        position = block + tl.arange(0, BLOCK)
        byte = tl.load(bitmap + (position >> 3), position < n, 0).to(tl.int32)
        mask = (byte >> (position & 7).to(tl.int32)) & 1
        place = kept + tl.cumsum(mask, 0) - 1
        tl.store(dense + position, tl.load(values + place, mask != 0, 0), position < n)
        kept += tl.sum(mask, 0)


def takes(x: Tensor, *others: object) -> bool:
    """Whether the kernels here support the dtype of `x`: float16, bfloat16 or float32."""
    return x.element_size() in INTEGERS


def takes_pack(x: Tensor, k: int) -> bool:
    """Whether `topk_pack` here takes `x`: counts are int32."""
    return takes(x) and x.numel() < 2**31


def takes_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> bool:
    """Whether `topk_unpack` here takes these arguments: counts are int32."""
    return takes(values) and 8 * bitmap.numel() < 2**31


def _stretch(n: int) -> int:
    """The elements of a stretch, a multiple of BLOCK."""
    blocks = -(-n // BLOCK)
    return BLOCK * -(-blocks // int(PROGRAMS))


@kernels.register(op.topk_pack, "cuda", takes_pack)
def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    dtype, n = x.dtype, x.numel()
    x = x.reshape(-1).view(INTEGERS[x.element_size()])
    values, bitmap = x.new_empty(k), x.new_empty((n + 7) // 8, dtype=torch.uint8)
    if not n:
        return values.view(dtype), bitmap
    digits = x.element_size()
    histograms = x.new_zeros(digits * int(BINS), dtype=torch.int32)
    counts = x.new_empty(2 * int(PROGRAMS), dtype=torch.int32)
    stretch = _stretch(n)
    grid = (cdiv(n, stretch),)
    options = {"BLOCK": BLOCK, "num_warps": WARPS, "num_stages": STAGES}
    for digit in range(digits):
        histogram_kernel[grid](x, histograms, n, k, stretch, digit, digits, **options)
    count_kernel[grid](x, histograms, counts, n, k, stretch, digits, **options)
    pack_kernel[grid](x, histograms, counts, values, bitmap, n, k, stretch, digits, **options)
    return values.view(dtype), bitmap


@kernels.register(op.topk_unpack, "cuda", takes_unpack)
def topk_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    dense = values.new_empty(shape)
    n, integers = dense.numel(), INTEGERS[values.element_size()]
    if not n:
        return dense
    counts = bitmap.new_empty(int(PROGRAMS), dtype=torch.int32)
    stretch = _stretch(n)
    grid = (cdiv(n, stretch),)
    options = {"BLOCK": BLOCK, "num_warps": WARPS, "num_stages": STAGES}
    count_bits_kernel[grid](bitmap, counts, n, stretch, **options)
    unpack_kernel[grid](
        values.view(integers), bitmap, counts, dense.view(-1).view(integers), n, stretch, **options
    )
    return dense


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches; 16 bits, loaded eight at once, take most registers."""
    block = {"BLOCK": BLOCK}
    tail = {"n": "i32", "k": "i32", "stretch": "i32"}
    odd = {"": ("k",), " odd": ("n", "k")} if every else {"": ("k",)}
    for bits in (16, 32) if every else (16,):
        kind, digits = f"*i{bits}", bits // 8
        every_pass, head = {"DIGITS": digits, **block}, {"x": kind, "histograms": "*i32"}
        counts, packed = {"counts": "*i32"}, {"values": kind, "bitmap": "*u8"}
        dense = {"dense": kind, "n": "i32", "stretch": "i32"}
        launches = [
            (histogram_kernel, head | tail, every_pass | {"FOUND": digits - 1}),
            (count_kernel, head | counts | tail, every_pass),
            (pack_kernel, head | counts | packed | tail, every_pass),
            (unpack_kernel, packed | counts | dense, block),
        ]
        for kernel, signature, constants in launches:
            for name, unaligned in odd.items():
                yield Variant(
                    kernel, signature, constants, WARPS, STAGES,
                    f"{kernel.__name__} i{bits}{name}", unaligned=unaligned,
                )  # fmt: skip
    signature = {"bitmap": "*u8", "counts": "*i32", "n": "i32", "stretch": "i32"}
    yield Variant(count_bits_kernel, signature, block, WARPS, STAGES, "count_bits_kernel")
