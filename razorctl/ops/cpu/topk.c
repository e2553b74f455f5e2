// ops.topk: the k elements of largest magnitude as a bitmap and values, and back.
#include "common.h"

#define CHUNK 65536 // elements of a task
#define WORD 64     // elements that are masked at once
#define BINS 2048

// The order of |x|, NaN above infinity; a bfloat16 is the upper half of a float32.
inlined uint32_t key_of(const void *x, int dtype, int64_t i) {
    uint32_t bits =
        dtype == FLOAT32 ? ((const uint32_t *)x)[i] : (uint32_t)((const uint16_t *)x)[i] << 16;
    return bits & 0x7FFFFFFF;
}

// Counts, by the `width` bits from `shift` on, the keys whose bits above those are `prefix`.
inlined void count(const void *x, int dtype, int64_t from, int64_t to, int shift, int width,
                   uint32_t prefix, uint32_t *bins) {
    for (int64_t i = from; i < to; i++) {
        uint32_t key = key_of(x, dtype, i);
        if (width == 11 || key >> (shift + width) == prefix)
            bins[key >> shift & ((1u << width) - 1)]++;
    }
}

// The k-th largest key, and in `ties` how many of the elements that equal it are among the k.
// Histograms find it from the highest bits down.
static uint32_t kth(const void *x, int dtype, int64_t n, int64_t k, int threads, int64_t *ties) {
    uint32_t prefix = 0;
    for (int shift = 20; shift >= 0; shift -= 10) {
        const int width = shift == 20 ? 11 : 10;
        int64_t bins[BINS] = {0};
#pragma omp parallel num_threads(threads)
        {
            uint32_t counts[BINS] = {0};
#pragma omp for schedule(static) nowait
            for (int64_t c = 0; c < cdiv(n, CHUNK); c++) {
                const int64_t from = c * CHUNK, to = least(n, from + CHUNK);
                if (shift == 20) count(x, dtype, from, to, 20, 11, prefix, counts);
                else count(x, dtype, from, to, shift, 10, prefix, counts);
            }
#pragma omp critical
            for (int b = 0; b < BINS; b++) bins[b] += counts[b];
        }
        int bin = (1 << width) - 1;
        while (k > bins[bin]) k -= bins[bin--];
        prefix = prefix << width | (uint32_t)bin;
    }
    *ties = k;
    return prefix;
}

// A bit for each of 64 flags, 0 or 1, the first in the lowest bit.
inlined uint64_t bits_from(const uint8_t *flags) {
    uint64_t word = 0, eight;
    for (int i = 0; i < 8; i++) {
        memcpy(&eight, flags + 8 * i, 8);
        word |= (eight * 0x0102040810204080u) >> 56 << (8 * i);
    }
    return word;
}

// The bits of at most 64 elements from `at` on that are above `smallest`; `equal`: that equal it.
inlined uint64_t above(const void *x, int dtype, int64_t at, int64_t n, uint32_t smallest,
                       uint64_t *equal) {
    uint8_t more[WORD] = {0}, same[WORD] = {0};
    const int count = (int)least(WORD, n - at);
    for (int i = 0; i < count; i++) {
        uint32_t key = key_of(x, dtype, at + i);
        more[i] = key > smallest, same[i] = key == smallest;
    }
    *equal = bits_from(same);
    return bits_from(more);
}

// `bits` with all but its lowest `count` ones cleared.
inlined uint64_t first_ones(uint64_t bits, int64_t count) {
    uint64_t kept = 0;
    for (; bits && count > 0; count--, bits &= bits - 1) kept |= bits & -bits;
    return kept;
}

// Elements of a chunk above the key, and equal to it.
struct counts {
    int64_t above, equal;
};

static void pack_chunk(const void *x, int dtype, int64_t from, int64_t n, uint32_t smallest,
                       int64_t ties, int64_t place, void *values, uint8_t *bitmap) {
    for (int64_t at = from; at < least(n, from + CHUNK); at += WORD) {
        uint64_t equal, word = above(x, dtype, at, n, smallest, &equal);
        if (equal && ties > 0) {
            word |= first_ones(equal, ties);
            ties -= __builtin_popcountll(equal);
        }
        memcpy(bitmap + at / 8, &word, (size_t)least(8, cdiv(n - at, 8)));
        for (; word; word &= word - 1) {
            const int64_t i = at + __builtin_ctzll(word);
            if (dtype == FLOAT32) ((float *)values)[place++] = ((const float *)x)[i];
            else ((uint16_t *)values)[place++] = ((const uint16_t *)x)[i];
        }
    }
}

// Returns 0, or 1 if there is no memory.
int razorctl_topk_pack(const void *x, int dtype, int64_t n, int64_t k, void *values,
                       uint8_t *bitmap, int threads) {
    const int64_t chunks = cdiv(n, CHUNK);
    struct counts *counts = calloc((size_t)chunks, sizeof *counts);
    int64_t ties;
    if (!counts) return 1;
    const uint32_t smallest = kth(x, dtype, n, k, threads, &ties);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t more = 0, same = 0;
        for (int64_t i = c * CHUNK; i < least(n, (c + 1) * CHUNK); i++) {
            uint32_t key = key_of(x, dtype, i);
            more += key > smallest, same += key == smallest;
        }
        counts[c] = (struct counts){more, same};
    }
    int64_t place = 0, before = 0; // from here on, `counts` has the elements before a chunk
    for (int64_t c = 0; c < chunks; c++) {
        const struct counts in_chunk = counts[c];
        counts[c] = (struct counts){place, before};
        place += in_chunk.above + least(in_chunk.equal, ties > before ? ties - before : 0);
        before += in_chunk.equal;
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; c++)
        pack_chunk(x, dtype, c * CHUNK, n, smallest, ties - counts[c].equal, counts[c].above,
                   values, bitmap);
    free(counts);
    return 0;
}

// The word of the bitmap for the elements from `at` on.
inlined uint64_t word_at(const uint8_t *bitmap, int64_t at, int64_t n) {
    uint64_t word = 0;
    memcpy(&word, bitmap + at / 8, (size_t)least(8, cdiv(n - at, 8)));
    return word;
}

int razorctl_topk_unpack(const void *values, const uint8_t *bitmap, int64_t n, int size, void *x,
                         int threads) {
    const int64_t chunks = cdiv(n, CHUNK);
    int64_t *starts = calloc((size_t)chunks + 1, sizeof *starts);
    if (!starts) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; c++)
        for (int64_t at = c * CHUNK; at < least(n, (c + 1) * CHUNK); at += WORD)
            starts[c + 1] += __builtin_popcountll(word_at(bitmap, at, n));
    for (int64_t c = 0; c < chunks; c++) starts[c + 1] += starts[c];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t end = least(n, (c + 1) * CHUNK);
        int64_t place = starts[c];
        memset((char *)x + c * CHUNK * size, 0, (size_t)((end - c * CHUNK) * size));
        for (int64_t at = c * CHUNK; at < end; at += WORD)
            for (uint64_t word = word_at(bitmap, at, n); word; word &= word - 1) {
                const int64_t i = at + __builtin_ctzll(word);
                if (size == 4) ((uint32_t *)x)[i] = ((const uint32_t *)values)[place++];
                else ((uint16_t *)x)[i] = ((const uint16_t *)values)[place++];
            }
    }
    free(starts);
    return 0;
}
