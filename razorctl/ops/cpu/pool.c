// ops.pool: maxima of windows, and their places in the windows.
#include "common.h"

#define PLACES 256 // of a window, at most

struct pool {
    int64_t height, width;         // of the input
    int64_t rows, columns;         // of the output
    int64_t kernel[2], stride[2], padding[2], dilation[2];
};

// The least k from 0 on with start + k * step >= 0.
inlined int64_t first_inside(int64_t start, int64_t step) {
    return start < 0 ? cdiv(-start, step) : 0;
}

inlined floats strided(const float *v, int64_t stride) {
    floats x, other;
    memcpy(&x, v, sizeof x);
    if (stride == 1) return x;
    if (stride == 2) {
        memcpy(&other, v + LANES, sizeof other);
        return SHUFFLED(numbers, x, other, 0, 2, 4, 6, 8, 10, 12, 14);
    }
    for (int j = 0; j < LANES; j++) x[j] = v[j * stride];
    return x;
}

// Updates the maxima of LANES windows by a row of them, of `count` columns, `apart`.
inlined void row_of_maxima(const float *v, int64_t stride, int64_t count, int64_t apart,
                           int32_t place, float *best, int32_t *places) {
    floats most;
    numbers at;
    memcpy(&most, best, sizeof most), memcpy(&at, places, sizeof at);
    for (int64_t l = 0; l < count; l++, place++) {
        const floats x = strided(v + l * apart, stride);
        const numbers more = (x > most) | (x != x);
        most = either(more, x, most);
        at = (place & more) | (at & ~more);
    }
    memcpy(best, &most, sizeof most), memcpy(places, &at, sizeof at);
}

// The memory of a task: a row of the input padded with -INFINITY, maxima of a row, their places,
// and the column in each window of its first pixel inside the image.
struct work {
    float *line, *best;
    int32_t *places, *first;
};

// Row `row` of the output of one plane.
static void maxima(const struct pool *p, const void *x, int dtype, int64_t plane, int64_t row,
                   const struct work *in) {
    const int64_t top = row * p->stride[0] - p->padding[0], stride = p->stride[1];
    const int64_t from = first_inside(top, p->dilation[0]);
    for (int64_t j = 0; j < p->columns; j++) {
        in->best[j] = -INFINITY;
        in->places[j] = (int32_t)(from * p->kernel[1]) + in->first[j];
    }
    for (int64_t k = from; k < p->kernel[0]; k++) {
        const int64_t at = top + k * p->dilation[0];
        if (at >= p->height) break;
        float *padded = in->line + p->padding[1];
        const float *v = loaded(x, dtype, (plane * p->height + at) * p->width, p->width, padded);
        if (v != padded) memcpy(padded, v, (size_t)p->width * sizeof(float));
        const int32_t place = (int32_t)(k * p->kernel[1]);
        const int64_t count = p->kernel[1], apart = p->dilation[1];
        for (int64_t j = 0; j < p->columns; j += LANES) {
            float *best = in->best + j;
            int32_t *places = in->places + j;
            v = in->line + j * stride;
            if (stride == 1) row_of_maxima(v, 1, count, apart, place, best, places);
            else if (stride == 2) row_of_maxima(v, 2, count, apart, place, best, places);
            else row_of_maxima(v, stride, count, apart, place, best, places);
        }
    }
}

// The maxima and the places of one plane.
static void one_plane(const struct pool *p, const void *x, int dtype, int64_t plane,
                      const struct work *in, void *y, uint8_t *places) {
    for (int64_t row = 0; row < p->rows; row++) {
        const int64_t at = (plane * p->rows + row) * p->columns;
        maxima(p, x, dtype, plane, row, in);
        if (dtype == FLOAT32)
            memcpy((float *)y + at, in->best, (size_t)p->columns * sizeof(float));
        else store(y, dtype, at, p->columns, in->best);
        for (int64_t j = 0; j < p->columns; j++)
            places[row * p->columns + j] = (uint8_t)in->places[j];
    }
}

// line: as in quantize.c.
int razorctl_max_pool(const void *x, int dtype, int64_t planes, const struct pool *p, int bits,
                      void *y, uint8_t *line, uint8_t *packed, int threads) {
    const int64_t outputs = p->rows * p->columns, strip = outputs / STRIPS;
    const int64_t lanes = cdiv(p->columns, LANES) * LANES;
    const int64_t reach = lanes * p->stride[1] + p->kernel[1] * p->dilation[1];
    const int64_t width = reach + p->padding[1] + p->width;
    const struct share whole = {strip, 0, strip, 1, outputs};
    const int64_t group = cdiv(planes, 4 * threads);
    int missing = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : missing)
    for (int64_t start = 0; start < planes; start += group) {
        float *memory = malloc((size_t)(width + 3 * lanes) * sizeof(float) + (size_t)outputs);
        missing |= !memory;
        if (!memory) continue;
        const struct work in = {memory, memory + width, (int32_t *)(memory + width + lanes),
                                (int32_t *)(memory + width + 2 * lanes)};
        for (int64_t j = 0; j < width + lanes; j++) memory[j] = -INFINITY;
        memset(in.places, 0, (size_t)lanes * sizeof(int32_t));
        for (int64_t j = 0; j < p->columns; j++)
            in.first[j] = (int32_t)first_inside(j * p->stride[1] - p->padding[1], p->dilation[1]);
        for (int64_t plane = start; plane < least(planes, start + group); plane++) {
            uint8_t *places = line ? line + plane * outputs : (uint8_t *)(in.first + lanes);
            one_plane(p, x, dtype, plane, &in, y, places);
            if (!line) pack(places, strip, whole, bits, packed + plane * strip * bits);
        }
        free(memory);
    }
    if (line && line != packed) pack_line(line, planes * outputs, bits, packed, threads);
    return missing;
}

// Adds gradients to the pixels at the places of a row of windows, rounded as in stock PyTorch.
inlined void spread(const struct pool *p, const void *dy, int dtype, int64_t at, int64_t row,
                    const uint8_t *places, const int64_t *places_at, void *dx, int64_t plane) {
    const int64_t top = row * p->stride[0] - p->padding[0];
    const int64_t start = (plane * p->height + top) * p->width - p->padding[1];
    for (int64_t j = 0; j < p->columns; j++) {
        const int64_t to = start + j * p->stride[1] + places_at[places[j]];
        if (dtype == FLOAT32) ((float *)dx)[to] += ((const float *)dy)[at + j];
        else {
            uint16_t *d = (uint16_t *)dx + to;
            *d = narrowed(widened(*d) + widened(((const uint16_t *)dy)[at + j]));
        }
    }
}

int razorctl_max_pool_grad(const uint8_t *packed, int bits, int64_t planes, const struct pool *p,
                           const void *dy, int dtype, void *dx, int threads) {
    const int64_t outputs = p->rows * p->columns;
    const size_t size = (size_t)(p->height * p->width) * (dtype == FLOAT32 ? 4 : 2);
    int64_t at[PLACES];
    for (int64_t k = 0; k < p->kernel[0] * p->kernel[1]; k++)
        at[k] = k / p->kernel[1] * p->dilation[0] * p->width + k % p->kernel[1] * p->dilation[1];
    int missing = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : missing)
    for (int64_t plane = 0; plane < planes; plane++) {
        uint8_t *codes = malloc((size_t)outputs);
        missing |= !codes;
        if (!codes) continue;
        memset((char *)dx + (size_t)plane * size, 0, size);
        codes_at(packed, planes, outputs, bits, plane, 0, outputs, codes);
        for (int64_t row = 0; row < p->rows; row++)
            spread(p, dy, dtype, plane * outputs + row * p->columns, row, codes + row * p->columns,
                   at, dx, plane);
        free(codes);
    }
    return missing;
}
