// What the kernels of few-bit copies share: the scales of a tile, and codes that are turned round.
#ifndef RAZORCTL_TILES_H
#define RAZORCTL_TILES_H

#include "common.h"

#define FURTHEST 4000.0f // codes: the largest distance of a zero point from its codes
#define TILE_ROWS 256    // rows of a tile of images, at most
#define APART 320        // codes of a channel from those of the next, in different sets of a cache

// Draws the ends of a tile in to `far` on either side of the mean.
inlined void clip(float mean, float far, float *low, float *high) {
    if (isfinite(mean - far)) *low = higher(*low, mean - far);
    if (isfinite(mean + far)) *high = lower(*high, mean + far);
}

// Zero point and scale for a tile's ends; a code is value * by + plus, without its fraction.
inlined void scale_of_tile(float low, float high, int bits, float noise, int16_t *zero_point,
                           uint16_t *scale, float *by, float *plus) {
    const float levels = (float)((1 << bits) - 1);
    const float step = higher(high / levels - low / levels, higher(high, -low) / FURTHEST);
    const uint16_t narrow = narrowed(step * (1 + 0x1p-8f));
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

// Exchanges the elements of `word` and `other` that `by` bits lie between.
inlined void exchange(uint64_t *word, uint64_t *other, int by, uint64_t mask) {
    const uint64_t changed = (*word >> by ^ *other) & mask;
    *other ^= changed;
    *word ^= changed << by;
}

// Bytes [rows, columns], rows `apart` from each other, as [columns, rows], `to_apart` from each
// other. Rows and columns up to multiples of 8 may be read.
inlined void turn(const uint8_t *from, int64_t apart, int64_t rows, int64_t columns, uint8_t *to,
                  int64_t to_apart) {
    for (int64_t i = 0; i < rows; i += 8)
        for (int64_t j = 0; j < columns; j += 8) {
            uint64_t w[8];
            for (int k = 0; k < 8; k++) memcpy(w + k, from + (i + k) * apart + j, 8);
            for (int k = 0; k < 4; k++) exchange(w + k, w + k + 4, 32, 0x00000000FFFFFFFFu);
            for (int k = 0; k < 8; k += k % 4 == 1 ? 3 : 1)
                exchange(w + k, w + k + 2, 16, 0x0000FFFF0000FFFFu);
            for (int k = 0; k < 8; k += 2) exchange(w + k, w + k + 1, 8, 0x00FF00FF00FF00FFu);
            uint8_t *at = to + j * to_apart + i;
            if (rows - i >= 8 && columns - j >= 8)
                for (int k = 0; k < 8; k++) memcpy(at + k * to_apart, w + k, 8);
            else
                for (int k = 0; k < least(8, columns - j); k++)
                    memcpy(at + k * to_apart, w + k, (size_t)least(8, rows - i));
        }
}

// Codes of the rows of one tile, `start` to `end`, for a stretch of columns: [columns], APART
// from each other.
inlined void turned_codes(const struct copy *c, struct share s, int64_t start, int64_t end,
                          uint8_t *codes) {
    uint8_t rows[8 * (CODES / STRIPS)];
    const int64_t whole = s.length == c->columns && c->columns % GROUP;
    for (int64_t row = start; row < end; row += 8) {
        const int64_t some = least(8, end - row);
        for (int64_t i = 0; i < (whole ? 1 : some); i++)
            codes_at(c, row + i, s.first, whole ? some * s.length : s.length, rows + i * s.length);
        turn(rows, s.length, some, s.length, codes + (row - start), APART);
    }
}

#endif
