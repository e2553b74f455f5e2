// Shared by kernels of few-bit copies: the scales of a tile, and the transposition of codes.
#ifndef RAZORCTL_TILES_H
#define RAZORCTL_TILES_H

#include "common.h"

#define FURTHEST 4000.0f // codes: the largest distance of a zero point from its codes
#define TILE_ROWS 256    // most rows of a tile of images
#define CHANNELS 256     // most channels of a task
#define SIDE 16          // of a square of codes that is transposed at once
#define APART 320        // from the codes of a channel to the next, in different sets of a cache

// Limits the ends of a tile to `far` on either side of the mean.
inlined void clip(float mean, float far, float *low, float *high) {
    if (isfinite(mean - far)) *low = higher(*low, mean - far);
    if (isfinite(mean + far)) *high = lower(*high, mean + far);
}

// Zero point and scale for a tile's ends; a code is value * by + plus, truncated.
inlined void scale_of_tile(float low, float high, int bits, float noise, int16_t *zero_point,
                           uint16_t *scale, float *by, float *plus) {
    const float levels = (float)((1 << bits) - 1);
    const float spacing = higher(high / levels - low / levels, higher(high, -low) / FURTHEST);
    const uint16_t narrow = narrowed(spacing * (1 + 0x1p-8f));
    const float one = inverse(widened(narrow)), zero = rintf(-low * one * PARTS);
    *scale = narrow;
    *zero_point = (int16_t)zero;
    *by = one;
    *plus = zero / PARTS + noise;
}

// The codes of values of one tile.
inlined void codes_of_values(const float *restrict v, int64_t count, int bits, float by, float plus,
                             uint8_t *restrict codes) {
    const float top = (float)(1 << bits) - 0.5f;
    for (int64_t j = 0; j < count; j++)
        codes[j] = (uint8_t)(int)lower(higher(v[j] * by + plus, 0), top);
}

// The values of codes of one tile, rounded to dtype.
inlined void values_of_one(const uint8_t *restrict codes, float offset, float scale, int64_t count,
                           int dtype, float *restrict to) {
    for (int64_t j = 0; j < count; j++) to[j] = offset + scale * (float)codes[j];
    for (int64_t j = 0; dtype == BFLOAT16 && j < count; j++) to[j] = widened(narrowed(to[j]));
}

typedef uint8_t bytes __attribute__((vector_size(16)));

// Bytes of two vectors interleaved, of their first or of their second halves.
inlined bytes firsts(bytes a, bytes b) {
    return SHUFFLED(bytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inlined bytes seconds(bytes a, bytes b) {
    return SHUFFLED(bytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Four times, this transposes a square of bytes.
inlined void interleave(const bytes *a, bytes *b) {
#pragma GCC unroll 8
    for (int k = 0; k < SIDE / 2; k++) {
        b[2 * k] = firsts(a[k], a[k + SIDE / 2]);
        b[2 * k + 1] = seconds(a[k], a[k + SIDE / 2]);
    }
}

// Bytes [rows, columns], rows `apart` from each other, as [columns, rows], `to_apart` from each
// other. Rows and columns up to multiples of SIDE may be read.
inlined void turn(const uint8_t *from, int64_t apart, int64_t rows, int64_t columns, uint8_t *to,
                  int64_t to_apart) {
    for (int64_t i = 0; i < rows; i += SIDE)
        for (int64_t j = 0; j < columns; j += SIDE) {
            bytes a[SIDE], b[SIDE];
            uint8_t *at = to + j * to_apart + i;
#pragma GCC unroll 16
            for (int k = 0; k < SIDE; k++) memcpy(a + k, from + (i + k) * apart + j, SIDE);
            interleave(a, b), interleave(b, a), interleave(a, b), interleave(b, a);
            if (rows - i >= SIDE && columns - j >= SIDE)
#pragma GCC unroll 16
                for (int k = 0; k < SIDE; k++) memcpy(at + k * to_apart, a + k, SIDE);
            else
                for (int k = 0; k < least(SIDE, columns - j); k++)
                    memcpy(at + k * to_apart, a + k, (size_t)least(SIDE, rows - i));
        }
}

// Codes of the rows of one tile, `start` to `end`, for a stretch of columns: [columns], APART
// from each other.
inlined void turned_codes(const struct copy *c, struct share s, int64_t start, int64_t end,
                          uint8_t *codes) {
    uint8_t rows[SIDE * (CHANNELS + 1)];
    const int64_t whole = s.length == c->columns && c->columns % GROUP;
    for (int64_t row = start; row < end; row += SIDE) {
        const int64_t some = least(SIDE, end - row);
        for (int64_t i = 0; i < (whole ? 1 : some); i++)
            codes_at(c->packed, c->rows, c->columns, c->bits, row + i, s.first,
                     whole ? some * s.length : s.length, rows + i * s.length);
        turn(rows, s.length, some, s.length, codes + (row - start), APART);
    }
}

#endif
