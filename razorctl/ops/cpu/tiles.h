// Shared by kernels of few-bit copies: the ends and the scale of a tile.
#ifndef RAZORCTL_TILES_H
#define RAZORCTL_TILES_H

#include "common.h"

#define FURTHEST 4000.0f // codes: the largest distance of a zero point from its codes

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

#endif
