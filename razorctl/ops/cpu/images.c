// ops.images: few-bit copies of images [batch, channels, pixels], as rows [pixels, channels].
//
// A task has the rows of a tile for some channels. It reads and writes the pixels of a channel as
// they are, and transposes codes in cache.
#include "common.h"
#include "tiles.h"

struct images {
    const void *x;
    const float *mean, *rstd; // of each channel, for all images or for each image
    int64_t apart;            // from the statistics of one image to the next
    int64_t channels, pixels;
    int dtype;
};

// Writes rows `start` to `end` of a channel to `to`, normalized if the images are.
static void pixels_of(const struct images *x, int64_t channel, int64_t start, int64_t end,
                      float *to) {
    for (int64_t row = start; row < end;) {
        const int64_t image = row / x->pixels, pixel = row % x->pixels;
        const int64_t count = least(end - row, x->pixels - pixel);
        const int64_t at = (image * x->channels + channel) * x->pixels + pixel;
        const float *from = loaded(x->x, x->dtype, at, count, to);
        const float mean = x->rstd ? x->mean[image * x->apart + channel] : 0;
        const float rstd = x->rstd ? x->rstd[image * x->apart + channel] : 1;
        if (x->rstd)
            for (int64_t j = 0; j < count; j++) to[j] = (from[j] - mean) * rstd;
        else if (from != to) memcpy(to, from, (size_t)count * sizeof(float));
        row += count, to += count;
    }
}

// The least and the greatest value of a tile, limited to `reach` standard deviations if that is
// above 0; 0 if a value is NaN.
static void ends_of(const float *v, int64_t count, float reach, float limit, float *low,
                    float *high) {
    float bottom = INFINITY, top = -INFINITY, sum = 0, squares = 0;
#pragma omp simd reduction(min : bottom) reduction(max : top)
    for (int64_t j = 0; j < count; j++) {
        bottom = v[j] < bottom ? v[j] : bottom;
        top = v[j] > top ? v[j] : top;
    }
    const int nan = largest_of(v, count) > 0x7F800000;
    *low = nan ? 0 : higher(lower(bottom, limit), -limit);
    *high = nan ? 0 : higher(lower(top, limit), -limit);
    if (!(reach > 0)) return;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) sum += v[j];
    const float mean = sum / (float)count;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < count; j++) squares += (v[j] - mean) * (v[j] - mean);
    clip(mean, reach * sqrtf(squares / (float)count), low, high);
}

// Channel i of a share, in the order of `unpack` and `pack`.
inlined int64_t channel_of(struct share s, int64_t i) {
    return column(s, i / s.length) + i % s.length;
}

int razorctl_quantize_images(const void *x, int dtype, int64_t batch, int64_t channels,
                             int64_t pixels, const float *mean, const float *rstd, int64_t apart,
                             int64_t tile_rows, int bits, float reach, float limit, uint8_t *line,
                             uint8_t *packed, int16_t *zero_point, uint16_t *scale, int threads) {
    const struct images from = {x, mean, rstd, apart, channels, pixels, dtype};
    const int64_t rows = batch * pixels, tiles = cdiv(rows, tile_rows);
    const int64_t strips = line ? 1 : STRIPS, strip = channels / strips;
    const int64_t width = least(CHANNELS / strips, strip), shares = cdiv(strip, width);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < tiles * shares; task++) {
        const struct share s = share_of(channels, strips, width, task % shares);
        const int64_t tile = task / shares, start = tile * tile_rows;
        const int64_t end = least(rows, start + tile_rows), count = s.stretches * s.length;
        float values[TILE_ROWS];
        uint8_t codes[CHANNELS * APART], turned[SIDE * CHANNELS];
        for (int64_t i = 0; i < count; i++) {
            const int64_t channel = channel_of(s, i), at = tile * channels + channel;
            float low, high, by, plus;
            pixels_of(&from, channel, start, end, values);
            ends_of(values, end - start, reach, limit, &low, &high);
            scale_of_tile(low, high, bits, 0.5f, zero_point + at, scale + at, &by, &plus);
            codes_of_values(values, end - start, bits, by, plus, codes + i * APART);
        }
        for (int64_t row = start; row < end; row += SIDE) {
            const int64_t some = least(SIDE, end - row);
            const uint8_t *part = codes + (row - start);
            if (line) {
                turn(part, APART, count, some, line + row * channels + s.first, channels);
                continue;
            }
            turn(part, APART, count, some, turned, CHANNELS);
            for (int64_t i = 0; i < some; i++)
                pack(turned + i * CHANNELS, s.width, s, bits, packed + (row + i) * strip * bits);
        }
    }
    if (line && line != packed) pack_line(line, rows * channels, bits, packed, threads);
    return 0;
}

// The values of a copy, or of a function of them.
int razorctl_dequantize_images(const struct copy *copy, int function, int64_t pixels, void *values,
                               int dtype, int threads) {
    const int64_t channels = copy->columns, width = least(CHANNELS, channels);
    const int64_t shares = cdiv(channels, width), tiles = cdiv(copy->rows, copy->tile_rows);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < tiles * shares; task++) {
        const struct share s = share_of(channels, 1, width, task % shares);
        const int64_t tile = task / shares, start = tile * copy->tile_rows;
        const int64_t end = least(copy->rows, start + copy->tile_rows);
        float offset[CHANNELS], scale[CHANNELS], buffer[TILE_ROWS];
        uint8_t codes[CHANNELS * APART];
        affine(copy, s, tile, offset, scale);
        turned_codes(copy, s, start, end, codes);
        for (int64_t i = 0; i < s.length; i++) {
            for (int64_t row = start; row < end;) {
                const int64_t pixel = row % pixels, count = least(end - row, pixels - pixel);
                const int64_t at = (row / pixels * channels + s.first + i) * pixels + pixel;
                float *to = target(values, dtype, at, buffer);
                values_of_one(codes + i * APART + (row - start), offset[i], scale[i], count,
                              dtype, to);
                apply(function, count, to);
                store(values, dtype, at, count, to);
                row += count;
            }
        }
    }
    return 0;
}
