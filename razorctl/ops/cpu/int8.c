// ops.int8, ops.int8_operand and ops.linear_again: int8 copies for GEMMs.
#include "common.h"

#define STRETCH 64 // columns of a task that has all rows

// All heads of `count` tensors [batch, heads, tokens, width], side by side, are a row.
// Sums are computed by blocks of rows, so that they do not depend on the number of threads.
static int int8_parts(const void *const *parts, int64_t count, int dtype, int64_t batch_stride,
                      int64_t head_stride, int64_t token_stride, int64_t batch, int64_t heads,
                      int64_t tokens, int64_t width, int8_t *codes, float *scale, float *total,
                      float *largest, int threads) {
    const int64_t rows = batch * tokens, columns = count * heads * width, blocks = cdiv(rows, ROWS);
    float *of_rows = calloc((size_t)(2 * blocks * columns), sizeof(float));
    float *buffers = malloc((size_t)(blocks * columns) * sizeof(float));
    const int missing = !of_rows || !buffers;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (missing ? 0 : blocks); block++) {
        float *x = buffers + block * columns;
        for (int64_t row = block * ROWS; row < least(rows, (block + 1) * ROWS); row++) {
            const int64_t from = row / tokens * batch_stride + row % tokens * token_stride;
            const float *v = width < columns ? x : loaded(parts[0], dtype, from, width, x);
            for (int64_t i = 0; width < columns && i < count * heads; i++) {
                float *to = x + i * width;
                const float *head = loaded(parts[i / heads], dtype,
                                           from + i % heads * head_stride, width, to);
                if (head != to) memcpy(to, head, (size_t)width * sizeof(float));
            }
            scale[row] =
                int8_row(v, columns, codes + row * columns, of_rows + 2 * block * columns);
        }
    }
    if (!missing) finish_rows(of_rows, blocks, 2 * columns, columns, total, largest);
    free(of_rows), free(buffers);
    return missing;
}

int razorctl_int8_rows(const void *x, int dtype, int64_t row_stride, int64_t rows, int64_t columns,
                       int8_t *codes, float *scale, float *total, float *largest, int threads) {
    return int8_parts(&x, 1, dtype, 0, 0, row_stride, 1, 1, rows, columns, codes, scale, total,
                      largest, threads);
}

int razorctl_int8_heads(const void *q, const void *k, const void *v, int dtype,
                        int64_t batch_stride, int64_t head_stride, int64_t token_stride,
                        int64_t batch, int64_t heads, int64_t tokens, int64_t width, int8_t *codes,
                        float *scale, float *total, float *largest, int threads) {
    const void *parts[] = {q, k, v};
    return int8_parts(parts, 3, dtype, batch_stride, head_stride, token_stride, batch, heads,
                      tokens, width, codes, scale, total, largest, threads);
}

// factor: of each row, NULL for 1. largest: magnitudes of the columns, NULL if not known. Both
// passes go along rows, as these lie in memory.
int razorctl_int8_columns(const void *x, int dtype, int64_t row_stride, const float *factor,
                          const float *largest, int64_t rows, int64_t columns, int8_t *codes,
                          float *scale, int threads) {
    const int64_t blocks = cdiv(rows, ROWS), of_blocks = largest ? 0 : blocks;
    float *most = calloc((size_t)(of_blocks * columns + 1), sizeof(float));
    float *buffers = malloc((size_t)((blocks + 1) * columns + 1) * sizeof(float));
    float *restrict by = buffers ? buffers + blocks * columns : NULL;
    const int missing = !most || !buffers;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (missing ? 0 : of_blocks); block++)
        for (int64_t row = block * ROWS; row < least(rows, (block + 1) * ROWS); row++) {
            const float *restrict v =
                loaded(x, dtype, row * row_stride, columns, buffers + block * columns);
            const float by_row = factor ? factor[row] : 1;
            float *restrict of_block = most + block * columns;
            for (int64_t j = 0; j < columns; j++) of_block[j] = larger(v[j] * by_row, of_block[j]);
        }
    if (!missing && !largest) largest_of_blocks(most, blocks, columns, columns, scale);
    for (int64_t j = 0; j < (missing ? 0 : columns); j++) {
        scale[j] = scale_of(bits_of(largest ? largest[j] : scale[j]));
        by[j] = inverse(scale[j]);
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (missing ? 0 : blocks); block++)
        for (int64_t row = block * ROWS; row < least(rows, (block + 1) * ROWS); row++) {
            const float *restrict v =
                loaded(x, dtype, row * row_stride, columns, buffers + block * columns);
            const float by_row = factor ? factor[row] : 1;
            int8_t *restrict to = codes + row * columns;
            for (int64_t j = 0; j < columns; j++) to[j] = code_of(v[j] * by_row * by[j]);
        }
    free(most), free(buffers);
    return missing;
}

// NaN counts as 0.
inlined float greatest(const float *v, int64_t count) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = v[i] > most ? v[i] : most;
    return most;
}

// The middle of the range of values of `count` columns, and half its width; with a function 0, and
// the largest magnitude. lowest: where the function is least.
static void ranges_of(const struct copy *c, int function, float lowest, int64_t from, int64_t count,
                      float *restrict center, float *restrict reach) {
    const float last = (float)((1 << c->bits) - 1);
    float low[STRETCH], high[STRETCH], most[STRETCH] = {0}, x[3 * STRETCH];
    for (int j = 0; j < STRETCH; j++) low[j] = INFINITY, high[j] = -INFINITY;
    for (int64_t tile = 0; tile < cdiv(c->rows, c->tile_rows); tile++) {
        const int64_t at = tile * c->columns + from;
        for (int64_t j = 0; j < count; j++) {
            float first = -c->zero_point[at + j] * (1.0f / PARTS) * c->scale[at + j];
            first += c->bias ? c->bias[from + j] : 0;
            float other = first + last * c->scale[at + j];
            float a = lower(first, other), b = higher(first, other);
            low[j] = lower(a, low[j]), high[j] = higher(b, high[j]);
            x[j] = a, x[count + j] = lower(higher(lowest, a), b), x[2 * count + j] = b;
        }
        if (function == IDENTITY) continue;
        apply(function, 3 * count, x);
        for (int64_t j = 0; j < count; j++) {
            float ends = higher(fabsf(x[j]), fabsf(x[2 * count + j]));
            most[j] = higher(most[j], higher(ends, fabsf(x[count + j])));
        }
    }
    for (int64_t j = 0; j < count; j++) {
        center[j] = function == IDENTITY ? low[j] / 2 + high[j] / 2 : 0;
        reach[j] = function == IDENTITY ? high[j] / 2 - low[j] / 2 : most[j];
    }
}

// The codes of a stretch of a row of x * relative, and of f(x) * factor * relative.
static void operand_of(int function, int64_t count, const uint8_t *restrict codes,
                       const float *restrict offset, const float *restrict spacing,
                       const float *restrict factor, float relative, int8_t *restrict to) {
    float x[CODES];
    if (function == IDENTITY) {
        for (int64_t j = 0; j < count; j++)
            to[j] = code_of((offset[j] + spacing[j] * (float)codes[j]) * relative);
        return;
    }
    values_of(codes, offset, spacing, count, FLOAT32, x);
    apply(function, count, x);
    for (int64_t j = 0; j < count; j++) to[j] = code_of(x[j] * factor[j] * relative);
}

int razorctl_int8_operand(const struct copy *copy, int function, float lowest,
                          const float *row_scale, int8_t *operand, float *scale, float *center,
                          int threads) {
    const int64_t columns = copy->columns, width = least(WIDEST, columns / STRIPS);
    const int64_t shares = cdiv(columns / STRIPS, width), blocks = cdiv(copy->rows, ROWS);
    const float most = greatest(row_scale, copy->rows), by = inverse(most);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t from = 0; from < columns; from += STRETCH)
        ranges_of(copy, function, lowest, from, least(STRETCH, columns - from), center + from,
                  scale + from);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < blocks * shares; task++) {
        const struct share s = share_of(columns, STRIPS, width, task % shares);
        const int64_t start = task / shares * ROWS;
        float offset[CODES], spacing[CODES], factor[CODES];
        uint8_t codes[CODES];
        for (int64_t k = 0; k < s.stretches; k++)
            for (int64_t j = 0; j < s.length; j++)
                factor[k * s.length + j] = inverse(scale[column(s, k) + j] / LEVELS);
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0) {
                affine(copy, s, row / copy->tile_rows, offset, spacing);
                for (int64_t k = 0; function == IDENTITY && k < s.stretches; k++)
                    for (int64_t j = 0, i = k * s.length; j < s.length; j++, i++) {
                        offset[i] = (offset[i] - center[column(s, k) + j]) * factor[i];
                        spacing[i] *= factor[i];
                    }
            }
            unpack(line_of(copy, row), s, copy->bits, codes);
            for (int64_t k = 0; k < s.stretches; k++) {
                const int64_t i = k * s.length;
                operand_of(function, s.length, codes + i, offset + i, spacing + i, factor + i,
                           row_scale[row] * by, operand + row * columns + column(s, k));
            }
        }
    }
    for (int64_t j = 0; j < columns; j++) scale[j] = scale[j] / LEVELS * most;
    return 0;
}

int razorctl_int8_row_operand(const struct copy *copy, int function, int8_t *operand, float *scale,
                              int threads) {
    const int64_t columns = copy->columns, blocks = cdiv(copy->rows, ROWS);
    const struct share whole = share_of(columns, 1, columns, 0);
    float *memory = malloc((size_t)(blocks * 4 * columns) * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (memory ? blocks : 0); block++) {
        float *offset = memory + block * 4 * columns, *spacing = offset + columns;
        float *x = spacing + columns;
        uint8_t *codes = (uint8_t *)(x + columns);
        const int64_t start = block * ROWS;
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0)
                affine(copy, whole, row / copy->tile_rows, offset, spacing);
            codes_at(copy->packed, copy->rows, columns, copy->bits, row, 0, columns, codes);
            values_of(codes, offset, spacing, columns, FLOAT32, x);
            apply(function, columns, x);
            scale[row] = int8_row(x, columns, operand + row * columns, NULL);
        }
    }
    free(memory);
    return !memory;
}
