// ops.gemm: the scales of an int32 product of int8 codes, and the product itself on CPUs with AVX2
// and without VNNI, by multiplying pairs of 16 bits.
#include "common.h"

// a_scale product b_scale + left right^T; a_scale, left and right may be missing.
struct scales {
    const float *a_scale, *b_scale, *left, *right;
};

// `count` elements of a row of the result from column `from` on, whose memory may be the product's.
inlined void scale_part(struct scales s, const int32_t *product, int64_t row, int64_t from,
                        int64_t count, int64_t columns, void *out, int dtype) {
    const float by = s.a_scale ? s.a_scale[row] : 1, plus = s.left ? s.left[row] : 0;
    const float *b = s.b_scale + from, *r = s.left ? s.right + from : b;
    float buffer[CODES], *to = target(out, dtype, row * columns + from, buffer);
#pragma omp simd
    for (int64_t j = 0; j < count; j++) to[j] = (float)product[j] * b[j] * by + plus * r[j];
    store(out, dtype, row * columns + from, count, to);
}

int razorctl_scaled(const int32_t *product, int64_t rows, int64_t columns, const float *a_scale,
                    const float *b_scale, const float *left, const float *right, void *out,
                    int dtype, int threads) {
    const struct scales scales = {a_scale, b_scale, left, right};
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t from = 0; from < columns; from += CODES)
            scale_part(scales, product + row * columns + from, row, from,
                       least(CODES, columns - from), columns, out, dtype);
    return 0;
}

// int8 codes [rows, terms], contiguous along one of the two dimensions.
struct codes {
    const int8_t *at;
    int64_t rows, row_stride, terms, term_stride;
};

#ifdef __AVX2__
#include <immintrin.h>
#include <omp.h>

#define PAIRS 272 // most pairs of terms of a block: its panel of b stays in the L1 cache
#define TALL 6    // rows of a panel of a
#define WIDE 16   // rows of a panel of b, columns of the product
#define BLOCK 96  // most rows of a task, a multiple of both: their panels stay in the L2 cache

// Panels of `height` rows, [count / height, pairs, height]: `count` rows from `start` on, at most
// BLOCK, and `pairs` pairs of terms from `first` on, padded with zeros.
inlined void make_panels(struct codes x, int64_t start, int64_t count, int height, int64_t first,
                         int64_t pairs, int32_t *restrict to) {
    const int64_t rows = least(count, x.rows - start), terms = least(2 * pairs, x.terms - first);
    const int8_t *from = x.at + start * x.row_stride + first * x.term_stride;
    if (x.term_stride == 1) {
        if (rows < count) memset(to, 0, (size_t)(pairs * count) * sizeof(int32_t));
        for (int64_t row = 0; row < rows; row++) {
            int32_t *restrict into = to + row / height * height * pairs + row % height;
            int16_t line[2 * PAIRS];
            int32_t both[PAIRS];
            line[2 * pairs - 1] = 0;
            for (int64_t k = 0; k < terms; k++) line[k] = from[row * x.row_stride + k];
            memcpy(both, line, sizeof(both));
            for (int64_t p = 0; p < pairs; p++) into[p * height] = both[p];
        }
        return;
    }
    for (int64_t p = 0; p < pairs; p++) {
        int8_t one[BLOCK] = {0}, other[BLOCK] = {0};
        int32_t both[BLOCK];
        const int8_t *at = from + 2 * p * x.term_stride;
        memcpy(one, at, (size_t)rows);
        if (2 * p + 1 < terms) memcpy(other, at + x.term_stride, (size_t)rows);
        for (int64_t row = 0; row < BLOCK; row++)
            both[row] = (uint16_t)one[row] | other[row] * 0x10000;
        for (int64_t row = 0; row < count; row += height)
            memcpy(to + row * pairs + p * height, both + row, (size_t)height * sizeof(int32_t));
    }
}

// The sums of a tile are separate variables: compilers leave an array of them in memory.
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define BEGIN(i) __m256i near##i = _mm256_setzero_si256(), far##i = near##i;
// In assembly: GCC computes all products first and runs out of registers for the sums. With
// intrinsics a step of a ViT-S with razor takes 1.24 times as long, with exact_gemm 1.34 times.
#define STEP(i)                                                                                    \
    __asm__("vpbroadcastd %4, %2\n\t"                                                              \
            "vpmaddwd %5, %2, %3\n\tvpaddd %3, %0, %0\n\t"                                         \
            "vpmaddwd %6, %2, %2\n\tvpaddd %2, %1, %1"                                             \
            : "+x"(near##i), "+x"(far##i), "=&x"(both), "=&x"(product)                             \
            : "m"(a[i]), "x"(first), "x"(second));
#define END(i)                                                                                     \
    out[2 * i] = _mm256_add_epi32(out[2 * i], near##i);                                            \
    out[2 * i + 1] = _mm256_add_epi32(out[2 * i + 1], far##i);

// Adds a panel of a times one of b to `out` [TALL, WIDE].
static void multiply(const int32_t *restrict a, const __m256i *restrict b, int64_t pairs,
                     __m256i *restrict out) {
    EACH_ROW(BEGIN)
    for (int64_t p = 0; p < pairs; p++, a += TALL, b += 2) {
        const __m256i first = b[0], second = b[1];
        __m256i both, product;
        EACH_ROW(STEP)
    }
    EACH_ROW(END)
}

inlined void *vectors(int64_t count) {
    return aligned_alloc(64, (size_t)cdiv(count * 4, 64) * 64);
}

int razorctl_has_int8_gemm(void) { return 1; }

int razorctl_int8_gemm(const struct codes *a, const struct codes *b, const float *a_scale,
                       const float *b_scale, const float *left, const float *right, void *out,
                       int dtype, int threads) {
    const struct scales scales = {a_scale, b_scale, left, right};
    const int64_t panels = cdiv(b->rows, WIDE), width = panels * WIDE, pairs = cdiv(b->terms, 2);
    const int64_t blocks = cdiv(pairs, PAIRS), depth = cdiv(pairs, blocks);
    const int64_t tasks = cdiv(a->rows, BLOCK * threads) * threads; // equally many per thread
    const int64_t height = cdiv(cdiv(a->rows, tasks), TALL) * TALL;
    const int64_t each = cdiv(height * (width + depth), WIDE) * WIDE;
    int32_t *bs = vectors(width * pairs), *buffers = vectors(threads * each);
    const int missing = !bs || !buffers;
#pragma omp parallel num_threads(threads) if (!missing)
    {
        // [width / WIDE, height, WIDE]: rows of the product, scaled once they are complete.
        int32_t *product = buffers + omp_get_thread_num() * each, *as = product + height * width;
#pragma omp for schedule(static) collapse(2)
        for (int64_t first = 0; first < (missing ? 0 : pairs); first += depth)
            for (int64_t j = 0; j < width; j += BLOCK) {
                const int64_t some = least(depth, pairs - first);
                make_panels(*b, j, least(BLOCK, width - j), WIDE, 2 * first, some,
                            bs + first * width + j * some);
            }
#pragma omp for schedule(dynamic)
        for (int64_t top = 0; top < (missing ? 0 : a->rows); top += height) {
            const int64_t rows = least(height, a->rows - top);
            memset(product, 0, (size_t)(height * width) * sizeof(int32_t));
            for (int64_t first = 0; first < pairs; first += depth) {
                const int64_t some = least(depth, pairs - first);
                make_panels(*a, top, height, TALL, 2 * first, some, as);
                for (int64_t j = 0; j < width; j += WIDE)
                    for (int64_t i = 0; i < rows; i += TALL)
                        multiply(as + i * some, (const __m256i *)(bs + first * width + j * some),
                                 some, (__m256i *)(product + j * height + i * WIDE));
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < b->rows; j += WIDE)
                    scale_part(scales, product + j * height + i * WIDE, top + i, j,
                               least(WIDE, b->rows - j), b->rows, out, dtype);
        }
    }
    free(bs), free(buffers);
    return missing;
}

#else

int razorctl_has_int8_gemm(void) { return 0; }

int razorctl_int8_gemm(const struct codes *a, const struct codes *b, const float *a_scale,
                       const float *b_scale, const float *left, const float *right, void *out,
                       int dtype, int threads) {
    (void)a, (void)b, (void)a_scale, (void)b_scale, (void)left, (void)right;
    (void)out, (void)dtype, (void)threads;
    return 1;
}

#endif
