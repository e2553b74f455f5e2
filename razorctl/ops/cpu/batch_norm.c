// ops.batch_norm: gradients from a copy of the normalized input, for images with channels first.
#include "common.h"
#include "tiles.h"

// The rows of a tile for some channels. Channels are read and written by stretches of pixels.
struct part {
    const struct copy *copy;
    int64_t pixels, start, end;
    struct share s;
    float offset[CHANNELS], scale[CHANNELS];
    uint8_t codes[CHANNELS * APART];
};

static void part_of(struct part *p, const struct copy *copy, int64_t pixels, int64_t task) {
    const int64_t width = least(CHANNELS, copy->columns), shares = cdiv(copy->columns, width);
    const int64_t tile = task / shares;
    p->copy = copy, p->pixels = pixels;
    p->start = tile * copy->tile_rows, p->end = least(copy->rows, p->start + copy->tile_rows);
    p->s = share_of(copy->columns, 1, width, task % shares);
    affine(copy, p->s, tile, p->offset, p->scale);
    turned_codes(copy, p->s, p->start, p->end, p->codes);
}

// The position of the pixels of channel i of a part from `row` on, and how many are contiguous.
inlined int64_t stretch(const struct part *p, int64_t i, int64_t row, int64_t *count) {
    const int64_t pixel = row % p->pixels;
    *count = least(p->end - row, p->pixels - pixel);
    return (row / p->pixels * p->copy->columns + p->s.first + i) * p->pixels + pixel;
}

static void add(const struct part *p, const void *dy, int dtype, float *sum, float *product) {
    float from[TILE_ROWS], x_hat[TILE_ROWS];
    for (int64_t i = 0; i < p->s.length; i++) {
        float total = 0, with_x = 0;
        for (int64_t row = p->start, count; row < p->end; row += count) {
            const int64_t at = stretch(p, i, row, &count);
            const float *g = loaded(dy, dtype, at, count, from);
            values_of_one(p->codes + i * APART + (row - p->start), p->offset[i], p->scale[i], count,
                          FLOAT32, x_hat);
#pragma omp simd reduction(+ : total, with_x)
            for (int64_t j = 0; j < count; j++) total += g[j], with_x += g[j] * x_hat[j];
        }
        sum[p->s.first + i] = total, product[p->s.first + i] = with_x;
    }
}

static void subtract(const struct part *p, const void *dy, int dtype, const float *by,
                     const float *dw, const float *db, void *dx) {
    float from[TILE_ROWS], x_hat[TILE_ROWS], to[TILE_ROWS];
    const float share = 1.0f / (float)p->copy->rows;
    for (int64_t i = 0; i < p->s.length; i++) {
        const float mean = db[p->s.first + i] * share, slope = dw[p->s.first + i] * share;
        for (int64_t row = p->start, count; row < p->end; row += count) {
            const int64_t at = stretch(p, i, row, &count);
            const float *restrict g = loaded(dy, dtype, at, count, from);
            float *restrict d = target(dx, dtype, at, to);
            values_of_one(p->codes + i * APART + (row - p->start), p->offset[i], p->scale[i], count,
                          FLOAT32, x_hat);
            for (int64_t j = 0; j < count; j++)
                d[j] = (g[j] - mean - x_hat[j] * slope) * by[p->s.first + i];
            store(dx, dtype, at, count, d);
        }
    }
}

// sums: memory for two numbers for each tile of each channel.
int razorctl_batch_norm_grad(const struct copy *copy, const void *dy, int dtype, int64_t pixels,
                             const float *by, float *sums, void *dx, float *dw, float *db,
                             int threads) {
    const int64_t channels = copy->columns, tiles = cdiv(copy->rows, copy->tile_rows);
    const int64_t tasks = tiles * cdiv(channels, least(CHANNELS, channels));
    float *products = sums + tiles * channels;
#pragma omp parallel num_threads(threads)
    {
        struct part p;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            part_of(&p, copy, pixels, task);
            const int64_t at = p.start / copy->tile_rows * channels;
            add(&p, dy, dtype, sums + at, products + at);
        }
#pragma omp single
        {
            add_blocks(sums, tiles, channels, channels, db);
            add_blocks(products, tiles, channels, channels, dw);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            part_of(&p, copy, pixels, task);
            subtract(&p, dy, dtype, by, dw, db, dx);
        }
    }
    return 0;
}
