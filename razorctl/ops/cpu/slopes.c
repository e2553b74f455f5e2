// ops.slopes: one bit for each element of the input of a function with two slopes.
#include "common.h"

#define CHUNK 4096 // elements of a task; a multiple of PART
#define PART 512   // elements that are converted at once

// Eight bytes of 0 or 1 as bits, the first as the lowest.
inlined uint8_t gathered(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return (uint8_t)(word * 0x0102040810204080u >> 56);
}

int razorctl_slope_bits(const void *x, int dtype, int64_t n, float low, float high, uint8_t *bits,
                        int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < cdiv(n, CHUNK); chunk++)
        for (int64_t at = chunk * CHUNK; at < least(n, (chunk + 1) * CHUNK); at += PART) {
            const int64_t count = least(PART, n - at);
            float buffer[PART];
            uint8_t inside[PART + 8];
            const float *v = loaded(x, dtype, at, count, buffer);
            for (int64_t j = 0; j < count; j++)
                inside[j] = (v[j] > low) & (v[j] < high || high == INFINITY);
            memset(inside + count, 0, 8);
            for (int64_t j = 0; j < count; j += 8) bits[(at + j) / 8] = gathered(inside + j);
        }
    return 0;
}

// bits and dx are contiguous.
int razorctl_slope_grad(const void *dy, int dtype, int64_t rows, int64_t columns,
                        int64_t row_stride, const uint8_t *bits, float inside, float outside,
                        void *dx, int threads) {
    const numbers each = {1, 2, 4, 8, 16, 32, 64, 128};
    const floats zero = {0};
    const int64_t chunks = cdiv(columns, CHUNK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < rows * chunks; task++) {
        const int64_t r = task / chunks, first = task % chunks * CHUNK;
        for (int64_t at = first; at < least(columns, first + CHUNK); at += PART) {
            const int64_t count = least(PART, columns - at), to = r * columns + at;
            float buffer[PART], made[PART];
            const float *restrict g = loaded(dy, dtype, r * row_stride + at, count, buffer);
            float *restrict d = target(dx, dtype, to, made);
            const uint8_t *b = bits + to / 8;
            const int shift = to % 8; // within a byte, where a row begins
            int64_t j = 0;
            for (; j + 8 <= count; j += 8, b++) {
                const int eight = shift ? (b[0] | b[1] << 8) >> shift : b[0];
                const numbers set = (eight & each) == each;
                floats v;
                memcpy(&v, g + j, sizeof v);
                v = either(set, v * inside, outside == 0 ? zero : v * outside);
                memcpy(d + j, &v, sizeof v);
            }
            for (; j < count; j++) {
                const float flat = outside == 0 ? 0 : g[j] * outside;
                d[j] = bits[(to + j) / 8] >> ((to + j) & 7) & 1 ? g[j] * inside : flat;
            }
            store(dx, dtype, to, count, d);
        }
    }
    return 0;
}
