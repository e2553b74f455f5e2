// Shared by all kernels: dtypes, packed codes, and the functions of ops.activation.
//
// Activations are [rows, columns]. A row of codes whose length is a multiple of 64, else all rows as
// one line, is divided into 8 strips of equal length; a byte holds codes of the same position in
// several strips (see ops.packing). A task has the same `width` columns of each strip of a row, and
// so whole bytes.
#ifndef RAZORCTL_COMMON_H
#define RAZORCTL_COMMON_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels number bits and bytes from the lowest on"
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STRIPS 8
#define GROUP 64                   // codes that a line is padded to a multiple of
#define WIDEST 256                 // most columns of a strip in a task
#define CODES (STRIPS * WIDEST)    // most codes of a row in a task
#define ROWS 64                    // rows of a task, where tiles do not set them
#define PARTS 8                    // a zero point is a whole number of these parts of a code
#define LEVELS 127                 // largest int8 code
#define LARGEST_FLOAT 3.4028235e38f
#define inlined static inline __attribute__((always_inline))

// Elements of two vectors by index; `numbers` is the type of a vector of integers of their width.
#ifdef __clang__
#define SHUFFLED(numbers, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(numbers, a, b, ...) __builtin_shuffle(a, b, (numbers){__VA_ARGS__})
#endif

#define LANES 8
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t numbers __attribute__((vector_size(4 * LANES)));

// a where the bits of `which` are all set, b where none is.
inlined floats either(numbers which, floats a, floats b) {
    return (floats)(((numbers)a & which) | ((numbers)b & ~which));
}

enum dtype { FLOAT32, BFLOAT16 };
enum function { IDENTITY, GELU, GELU_TANH, SILU, QUICK_GELU, HARDSWISH, RELU, RELU6, LEAKY_RELU };

inlined int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inlined float lower(float a, float b) { return a < b ? a : b; }
inlined float higher(float a, float b) { return a > b ? a : b; }
inlined int64_t cdiv(int64_t count, int64_t size) { return (count + size - 1) / size; }

inlined uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inlined float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inlined float widened(uint16_t x) { return float_of((uint32_t)x << 16); }

inlined uint16_t narrowed(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Elements `at` to `at + count` of x as floats: in place, or converted into `buffer`.
inlined const float *loaded(const void *x, int dtype, int64_t at, int64_t count, float *buffer) {
    if (dtype == FLOAT32) return (const float *)x + at;
    const uint16_t *from = (const uint16_t *)x + at;
    for (int64_t i = 0; i < count; i++) buffer[i] = widened(from[i]);
    return buffer;
}

// The destination of elements of y from `at` on: in place, or `buffer`, which `store` converts.
inlined float *target(void *y, int dtype, int64_t at, float *buffer) {
    return dtype == FLOAT32 ? (float *)y + at : buffer;
}

inlined void store(void *y, int dtype, int64_t at, int64_t count, const float *buffer) {
    if (dtype == FLOAT32) return;
    uint16_t *to = (uint16_t *)y + at;
    for (int64_t i = 0; i < count; i++) to[i] = narrowed(buffer[i]);
}

// The columns of a task: `width` from `first` on of each strip. Whole strips are one stretch of
// columns.
struct share {
    int64_t strip, first, width, stretches, length;
};

inlined struct share share_of(int64_t columns, int64_t strips, int64_t width, int64_t number) {
    int64_t strip = columns / strips, first = number * width;
    width = least(width, strip - first);
    int whole = width == strip;
    return (struct share){strip, first, width, whole ? 1 : strips, whole ? columns : width};
}

inlined int64_t column(struct share s, int64_t stretch) { return stretch * s.strip + s.first; }

// `count` codes of a line of packed bytes, from code `from` on.
void unpack_codes(const uint8_t *line, int64_t strip, int bits, int64_t from, int64_t count,
                  uint8_t *codes);
// Packs the codes of a share of one line; codes of consecutive strips are `apart`.
void pack(const uint8_t *codes, int64_t apart, struct share s, int bits, uint8_t *line);
// Packs codes as one line; they are padded with zeros to a multiple of GROUP.
void pack_line(const uint8_t *codes, int64_t count, int bits, uint8_t *line, int threads);

// The codes of a share of one row, stretch after stretch; `line` is the row's packed bytes.
inlined void unpack(const uint8_t *line, struct share s, int bits, uint8_t *codes) {
    for (int64_t k = 0; k < s.stretches; k++)
        unpack_codes(line, s.strip, bits, column(s, k), s.length, codes + k * s.length);
}

// A copy of ops.quantize; a value is offset + scale * code.
struct copy {
    const uint8_t *packed;
    const int16_t *zero_point;
    const float *scale, *bias;
    int64_t rows, columns, tile_rows;
    int bits;
};

inlined const uint8_t *line_of(const struct copy *c, int64_t row) {
    return c->packed + row * (c->columns / STRIPS * c->bits);
}

// `count` of the packed codes [rows, columns], from column `first` of a row on.
inlined void codes_at(const uint8_t *packed, int64_t rows, int64_t columns, int bits, int64_t row,
                      int64_t first, int64_t count, uint8_t *codes) {
    if (columns % GROUP) {
        const int64_t strip = cdiv(rows * columns, GROUP) * (GROUP / STRIPS);
        unpack_codes(packed, strip, bits, row * columns + first, count, codes);
    } else {
        const int64_t strip = columns / STRIPS;
        unpack_codes(packed + row * strip * bits, strip, bits, first, count, codes);
    }
}

// Offset and scale of the columns of a share in one tile, in the order of `unpack`.
inlined void affine(const struct copy *c, struct share s, int64_t tile, float *offset,
                    float *scale) {
    for (int64_t k = 0; k < s.stretches; k++) {
        int64_t from = column(s, k), at = tile * c->columns + from, to = k * s.length;
        for (int64_t j = 0; j < s.length; j++) {
            scale[to + j] = c->scale[at + j];
            offset[to + j] = -c->zero_point[at + j] * (1.0f / PARTS) * c->scale[at + j];
        }
        for (int64_t j = 0; c->bias && j < s.length; j++) offset[to + j] += c->bias[from + j];
    }
}

// The values of `count` codes, rounded to dtype.
inlined void values_of(const uint8_t *restrict codes, const float *restrict offset,
                       const float *restrict scale, int64_t count, int dtype, float *restrict to) {
    for (int64_t j = 0; j < count; j++) to[j] = offset[j] + scale[j] * (float)codes[j];
    for (int64_t j = 0; dtype == BFLOAT16 && j < count; j++) to[j] = widened(narrowed(to[j]));
}

// ops.int8: 1 / scale, and 0 where scale is 0 or 1 / scale is not finite.
inlined float inverse(float scale) {
    float one = 1.0f / scale;
    return scale > 0 && one <= LARGEST_FLOAT ? one : 0;
}

// The scale for a largest magnitude, given by its bits; NaN for NaN.
inlined float scale_of(uint32_t largest) {
    if (largest > 0x7F800000) return NAN;
    return lower(float_of(largest), LARGEST_FLOAT) / LEVELS;
}

inlined int8_t code_of(float x) {
    return (int8_t)(int)rintf(lower(higher(x, -LEVELS), LEVELS));
}

// The bits of the largest magnitude, in the order of magnitudes, with NaN above infinity.
inlined uint32_t largest_of(const float *v, int64_t count) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < count; j++) {
        uint32_t magnitude = bits_of(v[j]) & 0x7FFFFFFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// The larger magnitude, where |most| is most and NaN is larger than infinity.
inlined float larger(float x, float most) {
    uint32_t magnitude = bits_of(x) & 0x7FFFFFFF;
    return float_of(magnitude > bits_of(most) ? magnitude : bits_of(most));
}

// Writes the int8 codes of a row, and returns the scale. of_rows: NULL, or [2, columns]; the row is
// added to the first, and the second raised to |row| / sqrt(scale).
inlined float int8_row(const float *restrict v, int64_t columns, int8_t *restrict codes,
                       float *restrict of_rows) {
    const float scale = scale_of(largest_of(v, columns)), by = inverse(scale);
    for (int64_t j = 0; j < columns; j++) codes[j] = code_of(v[j] * by);
    if (!of_rows) return scale;
    const float by_root = scale > 0 ? by * sqrtf(scale) : 0;
    float *restrict most = of_rows + columns;
    for (int64_t j = 0; j < columns; j++) of_rows[j] += v[j];
    for (int64_t j = 0; j < columns; j++) most[j] = larger(v[j] * by_root, most[j]);
    return scale;
}

// Adds the sums [columns] of blocks, `stride` apart.
inlined void add_blocks(const float *sums, int64_t blocks, int64_t stride, int64_t columns,
                        float *restrict total) {
    memset(total, 0, (size_t)columns * sizeof(float));
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t j = 0; j < columns; j++) total[j] += sums[block * stride + j];
}

// The largest magnitudes [columns] of blocks, `stride` apart.
inlined void largest_of_blocks(const float *most, int64_t blocks, int64_t stride, int64_t columns,
                               float *restrict largest) {
    memset(largest, 0, (size_t)columns * sizeof(float));
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t j = 0; j < columns; j++)
            largest[j] = larger(most[block * stride + j], largest[j]);
}

// The results of `int8_row` for the rows of blocks, `stride` apart.
inlined void finish_rows(const float *of_rows, int64_t blocks, int64_t stride, int64_t columns,
                         float *total, float *largest) {
    add_blocks(of_rows, blocks, stride, columns, total);
    largest_of_blocks(of_rows + columns, blocks, stride, columns, largest);
}

// f(x) in place of x, for `count` elements; in activation.c.
void apply(int function, int64_t count, float *x);

#endif
