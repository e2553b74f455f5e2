// ops.pool: maxima of windows, and the places where they are.
#include "common.h"

struct pool {
    int64_t height, width;         // of the input
    int64_t rows, columns;         // of the output
    int64_t kernel[2], stride[2], padding[2], dilation[2];
};

// The least k from 0 on with start + k * step >= 0.
inlined int64_t first_inside(int64_t start, int64_t step) {
    return start < 0 ? parts(-start, step) : 0;
}

// The maxima so far of a row of windows, and one more of their columns.
inlined void row_of_maxima(const float *restrict v, int64_t stride, int64_t count, uint8_t place,
                           float *restrict best, uint8_t *restrict places) {
    for (int64_t j = 0; j < count; j++) {
        const float x = v[j * stride];
        const int more = (x > best[j]) | (x != x);
        best[j] = more ? x : best[j];
        places[j] = more ? place : places[j];
    }
}

// Row `row` of the output of one plane; line: memory for a row of the input.
static void maxima(const struct pool *p, const void *x, int dtype, int64_t plane, int64_t row,
                   float *line, float *best, uint8_t *places) {
    const int64_t top = row * p->stride[0] - p->padding[0];
    const int64_t from = first_inside(top, p->dilation[0]);
    for (int64_t j = 0; j < p->columns; j++) {
        const int64_t left = j * p->stride[1] - p->padding[1];
        best[j] = -INFINITY;
        places[j] = (uint8_t)(from * p->kernel[1] + first_inside(left, p->dilation[1]));
    }
    for (int64_t k = from; k < p->kernel[0]; k++) {
        const int64_t at = top + k * p->dilation[0];
        if (at >= p->height) break;
        const float *v = loaded(x, dtype, (plane * p->height + at) * p->width, p->width, line);
        for (int64_t l = 0; l < p->kernel[1]; l++) {
            const int64_t left = l * p->dilation[1] - p->padding[1], stride = p->stride[1];
            const int64_t first = first_inside(left, stride);
            const int64_t count = least(p->columns, parts(p->width - left, stride)) - first;
            const uint8_t place = (uint8_t)(k * p->kernel[1] + l);
            const float *start = v + left + first * stride;
            if (stride == 1) row_of_maxima(start, 1, count, place, best + first, places + first);
            else if (stride == 2)
                row_of_maxima(start, 2, count, place, best + first, places + first);
            else row_of_maxima(start, stride, count, place, best + first, places + first);
        }
    }
}

// line: as in quantize.c.
int razorctl_max_pool(const void *x, int dtype, int64_t planes, const struct pool *p, int bits,
                      void *y, uint8_t *line, uint8_t *packed, int threads) {
    const int64_t outputs = p->rows * p->columns, strip = outputs / STRIPS;
    const struct share whole = {strip, 0, strip, 1, outputs};
    int missing = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(| : missing)
    for (int64_t plane = 0; plane < planes; plane++) {
        const size_t floats = (size_t)(p->width + p->columns);
        float *memory = malloc(floats * sizeof(float) + (size_t)(line ? 0 : outputs));
        missing |= !memory;
        if (!memory) continue;
        float *best = memory + p->width;
        uint8_t *places = line ? line + plane * outputs : (uint8_t *)(memory + floats);
        for (int64_t row = 0; row < p->rows; row++) {
            const int64_t at = plane * outputs + row * p->columns;
            float *to = target(y, dtype, at, best);
            maxima(p, x, dtype, plane, row, memory, to, places + row * p->columns);
            store(y, dtype, at, p->columns, to);
        }
        if (!line) pack(places, strip, whole, bits, packed + plane * strip * bits);
        free(memory);
    }
    if (line && line != packed) pack_line(line, planes * outputs, bits, packed, threads);
    return missing;
}

// Adds gradients to the pixels at the places of a row of windows, rounding as stock does.
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
    int64_t at[256];
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
