// ops.norm_again: the normalized sum of an activation, which a copy stands for, and another one.
#include "tiles.h"

#define WIDTH 128 // columns of a task, which has whole tiles
#define BITS 8    // of the codes that it makes

// The ends of a column; `largest` is its largest magnitude by the bits, above infinity for NaN.
struct ends {
    float low[WIDTH], high[WIDTH];
    uint32_t largest[WIDTH];
};

// Adds a row to the ends of its columns.
inlined void widen(struct ends *e, const float *restrict z, int64_t count) {
    for (int64_t j = 0; j < count; j++) {
        uint32_t magnitude = bits_of(z[j]) & 0x7FFFFFFF;
        e->low[j] = lower(z[j], e->low[j]);
        e->high[j] = higher(z[j], e->high[j]);
        e->largest[j] = magnitude > e->largest[j] ? magnitude : e->largest[j];
    }
}

// Sets the zero points and scales of a tile; a code is value * by + plus, truncated.
static void scales_of(const struct ends *e, int64_t count, float limit, int16_t *zero_point,
                      uint16_t *scale, float *by, float *plus) {
    for (int64_t j = 0; j < count; j++) {
        const int nan = e->largest[j] > 0x7F800000;
        const float low = nan ? 0 : higher(lower(e->low[j], limit), -limit);
        const float high = nan ? 0 : higher(lower(e->high[j], limit), -limit);
        scale_of_tile(low, high, BITS, 0.5f, zero_point + j, scale + j, by + j, plus + j);
    }
}

// The columns of a share of rows `start` to `end`, one tile: values into z [rows, WIDTH].
static void values_of_tile(const struct copy *copy, struct share s, int64_t start, int64_t end,
                           const void *f, int dtype, int64_t row_stride,
                           const float *restrict gamma, const float *mean, const float *rstd,
                           const float *sum_mean, const float *sum_rstd, float *z,
                           struct ends *ends) {
    float offset[WIDTH], scale[WIDTH], buffer[WIDTH];
    uint8_t codes[WIDTH];
    affine(copy, s, start / copy->tile_rows, offset, scale);
    for (int64_t row = start; row < end; row++, z += WIDTH) {
        codes_at(copy->packed, copy->rows, copy->columns, copy->bits, row, s.first, s.length, codes);
        const float *restrict g = loaded(f, dtype, row * row_stride + s.first, s.length, buffer);
        const float deviation = rstd ? 1.0f / rstd[row] : 1, by = sum_rstd[row];
        const float away = (mean ? mean[row] : 0) - (sum_mean ? sum_mean[row] : 0);
        if (gamma)
            for (int64_t j = 0; j < s.length; j++) {
                float x = (offset[j] + scale[j] * (float)codes[j]) * deviation;
                z[j] = (x + away + gamma[s.first + j] * g[j]) * by;
            }
        else
            for (int64_t j = 0; j < s.length; j++) {
                float x = (offset[j] + scale[j] * (float)codes[j]) * deviation;
                z[j] = (x + away + g[j]) * by;
            }
        widen(ends, z, s.length);
    }
}

// gamma, mean, rstd, sum_mean: may be missing.
int razorctl_norm_again(const struct copy *copy, const void *f, int dtype, int64_t row_stride,
                        const float *gamma, const float *mean, const float *rstd,
                        const float *sum_mean, const float *sum_rstd, float limit, uint8_t *codes,
                        int16_t *zero_point, uint16_t *scale, int threads) {
    const int64_t columns = copy->columns, shares = cdiv(columns, WIDTH);
    const int64_t each = least(copy->tile_rows, copy->rows), tiles = cdiv(copy->rows, each);
    const float top = (float)(1 << BITS) - 0.5f;
    int missing = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : missing)
    for (int64_t task = 0; task < tiles * shares; task++) {
        const int64_t tile = task / shares, start = tile * each;
        const int64_t end = least(copy->rows, start + each);
        const struct share s = share_of(columns, 1, WIDTH, task % shares);
        float *z = malloc((size_t)(each * WIDTH) * sizeof(float));
        if (!z) {
            missing = 1;
            continue;
        }
        float by[WIDTH], plus[WIDTH];
        struct ends ends;
        for (int j = 0; j < WIDTH; j++)
            ends.low[j] = INFINITY, ends.high[j] = -INFINITY, ends.largest[j] = 0;
        values_of_tile(copy, s, start, end, f, dtype, row_stride, gamma, mean, rstd, sum_mean,
                       sum_rstd, z, &ends);
        const int64_t at = tile * columns + s.first;
        scales_of(&ends, s.length, limit, zero_point + at, scale + at, by, plus);
        for (int64_t row = start; row < end; row++) {
            const float *restrict v = z + (row - start) * WIDTH;
            uint8_t *restrict to = codes + row * columns + s.first;
            for (int64_t j = 0; j < s.length; j++)
                to[j] = (uint8_t)(int)lower(higher(v[j] * by[j] + plus[j], 0), top);
        }
        free(z);
    }
    return missing;
}
