// ops.quantize: few-bit copies with a zero point and a scale for each tile, and their values.
#include "common.h"
#include "tiles.h"

#define IN_CACHE 131072  // elements of a tile that stay in a core's L2 cache
#define TASKS 4          // tasks of a thread, so that threads end together

struct source {
    const void *x;
    const float *mean, *rstd;
    int64_t row_stride, rows, columns, tile_rows;
    int dtype;
};

// A stretch of a row as floats, normalized if the source is.
inlined const float *row_of(const struct source *x, int64_t row, int64_t from, int64_t count,
                            float *buffer) {
    const float *v = loaded(x->x, x->dtype, row * x->row_stride + from, count, buffer);
    if (!x->rstd) return v;
    float mean = x->mean ? x->mean[row] : 0, rstd = x->rstd[row];
    for (int64_t j = 0; j < count; j++) buffer[j] = (v[j] - mean) * rstd;
    return buffer;
}

struct range {
    float low[CODES], high[CODES];
};

// The least and the greatest value of each column of a tile; 0 for a column with a NaN.
static void ends_of(const struct source *x, struct share s, int64_t start, int64_t end, float limit,
                    struct range *r) {
    float buffer[CODES];
    uint32_t largest[CODES];
    for (int64_t j = 0; j < s.stretches * s.length; j++) {
        r->low[j] = INFINITY, r->high[j] = -INFINITY, largest[j] = 0;
    }
    for (int64_t row = start; row < end; row++)
        for (int64_t k = 0; k < s.stretches; k++) {
            const float *restrict v = row_of(x, row, column(s, k), s.length, buffer);
            float *restrict low = r->low + k * s.length, *restrict high = r->high + k * s.length;
            uint32_t *restrict top = largest + k * s.length;
            for (int64_t j = 0; j < s.length; j++) {
                uint32_t magnitude = bits_of(v[j]) & 0x7FFFFFFF;
                low[j] = lower(v[j], low[j]);
                high[j] = higher(v[j], high[j]);
                top[j] = magnitude > top[j] ? magnitude : top[j];
            }
        }
    for (int64_t j = 0; j < s.stretches * s.length; j++) {
        int nan = largest[j] > 0x7F800000;
        r->low[j] = nan ? 0 : higher(lower(r->low[j], limit), -limit);
        r->high[j] = nan ? 0 : higher(lower(r->high[j], limit), -limit);
    }
}

// Limits the ends to `reach` standard deviations around the mean.
static void limit_ends(const struct source *x, struct share s, int64_t start, int64_t end,
                       float reach, struct range *r) {
    float buffer[CODES], mean[CODES] = {0}, square[CODES] = {0};
    float share = 1.0f / (float)(end - start);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t row = start; row < end; row++)
            for (int64_t k = 0; k < s.stretches; k++) {
                const float *restrict v = row_of(x, row, column(s, k), s.length, buffer);
                float *restrict m = mean + k * s.length, *restrict q = square + k * s.length;
                for (int64_t j = 0; j < s.length; j++) {
                    if (pass) q[j] += (v[j] - m[j]) * (v[j] - m[j]);
                    else m[j] += v[j];
                }
            }
        for (int64_t j = 0; !pass && j < s.stretches * s.length; j++) mean[j] *= share;
    }
    for (int64_t j = 0; j < s.stretches * s.length; j++)
        clip(mean[j], reach * sqrtf(square[j] * share), r->low + j, r->high + j);
}

// Zero point and scale of a tile's columns; a code is value * inverse + shift.
static void scales_of(const struct range *r, struct share s, int bits, float noise,
                      int16_t *zero_point, uint16_t *scale, float *inverse, float *shift) {
    for (int64_t k = 0; k < s.stretches; k++)
        for (int64_t j = 0, i = k * s.length; j < s.length; j++, i++) {
            const int64_t to = column(s, k) + j;
            scale_of_tile(r->low[i], r->high[i], bits, noise, zero_point + to, scale + to,
                          inverse + i, shift + i);
        }
}

// ops.random: Murmur3's finalizer for 32 bits.
inlined uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

static void codes_of(const struct source *x, struct share s, int64_t row, int bits,
                     const float *inverse, const float *shift, const int64_t *seed, uint8_t *codes) {
    const float top = (float)(1 << bits) - 0.5f;
    float buffer[CODES];
    for (int64_t k = 0; k < s.stretches; k++) {
        const float *restrict v = row_of(x, row, column(s, k), s.length, buffer);
        const float *restrict by = inverse + k * s.length, *restrict plus = shift + k * s.length;
        uint8_t *restrict to = codes + k * s.length;
        if (!seed) {
            for (int64_t j = 0; j < s.length; j++)
                to[j] = (uint8_t)(int)lower(higher(v[j] * by[j] + plus[j], 0), top);
            continue;
        }
        uint32_t key = mixed((uint32_t)*seed);
        uint32_t position = (uint32_t)(row * x->columns + column(s, k));
        for (int64_t j = 0; j < s.length; j++) {
            uint32_t drawn = mixed(mixed(position + (uint32_t)j) ^ key) >> 8;
            float t = v[j] * by[j] + plus[j] + (float)(int32_t)drawn * 0x1p-24f;
            to[j] = (uint8_t)(int)lower(higher(t, 0), top);
        }
    }
}

// The columns of each of `strips` strips for a task: whole tiles fit in cache, and there are enough
// tasks for all threads.
static int64_t width_for(int64_t strip, int64_t strips, int64_t tiles, int64_t tile_rows,
                         int threads) {
    int64_t width = least(CODES / strips, strip);
    while (width > 16 && (width * strips * tile_rows > IN_CACHE ||
                          tiles * cdiv(strip, width) < TASKS * threads))
        width = (width / 2 + 15) / 16 * 16;
    return width;
}

// line: memory for codes that are packed as one line, up to a multiple of GROUP; NULL if each row
// is packed by itself.
int razorctl_quantize(const void *x, int dtype, int64_t row_stride, const float *mean,
                      const float *rstd, int64_t rows, int64_t columns, int64_t tile_rows, int bits,
                      float reach, float limit, const int64_t *seed, uint8_t *line, uint8_t *packed,
                      int16_t *zero_point, uint16_t *scale, int threads) {
    const struct source from = {x, mean, rstd, row_stride, rows, columns, tile_rows, dtype};
    const int64_t strips = line ? 1 : STRIPS, strip = columns / strips;
    const int64_t tiles = cdiv(rows, tile_rows);
    const int64_t width = width_for(strip, strips, tiles, tile_rows, threads);
    const int64_t shares = cdiv(strip, width);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < tiles * shares; task++) {
        const struct share s = share_of(columns, strips, width, task % shares);
        const int64_t tile = task / shares, start = tile * tile_rows;
        const int64_t end = least(rows, start + tile_rows);
        struct range range;
        float inverse[CODES], shift[CODES];
        uint8_t codes[CODES];
        ends_of(&from, s, start, end, limit, &range);
        if (reach > 0) limit_ends(&from, s, start, end, reach, &range);
        scales_of(&range, s, bits, seed ? 0 : 0.5f, zero_point + tile * columns,
                  scale + tile * columns, inverse, shift);
        for (int64_t row = start; row < end; row++) {
            uint8_t *to = line ? line + row * columns + s.first : codes;
            codes_of(&from, s, row, bits, inverse, shift, seed, to);
            if (!line) pack(codes, s.width, s, bits, packed + row * strip * bits);
        }
    }
    if (line && line != packed) pack_line(line, rows * columns, bits, packed, threads);
    return 0;
}

// The values of a copy, or of a function of them.
int razorctl_dequantize(const struct copy *copy, int function, void *values, int dtype,
                         int threads) {
    const int64_t columns = copy->columns, width = least(CODES, columns);
    const int64_t shares = cdiv(columns, width), blocks = cdiv(copy->rows, ROWS);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < blocks * shares; task++) {
        const struct share s = share_of(columns, 1, width, task % shares);
        const int64_t start = task / shares * ROWS;
        float offset[CODES], scale[CODES], buffer[CODES];
        uint8_t codes[CODES];
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0)
                affine(copy, s, row / copy->tile_rows, offset, scale);
            const int64_t at = row * columns + s.first;
            codes_at(copy->packed, copy->rows, columns, copy->bits, row, s.first, s.length, codes);
            float *to = target(values, dtype, at, buffer);
            values_of(codes, offset, scale, s.length, dtype, to);
            apply(function, s.length, to);
            store(values, dtype, at, s.length, to);
        }
    }
    return 0;
}
