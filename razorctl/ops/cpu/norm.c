// ops.norm: the gradients of LayerNorm and RMSNorm from a copy of the normalized input.
#include "common.h"

// The memory of a task, [columns] each.
struct work {
    float *offset, *scale, *normal, *dy, *residual;
    uint8_t *codes;
};

#define WORK 6 // most floats of `struct work` for a column

inlined struct work work_in(float *memory, int64_t columns) {
    return (struct work){memory,
                         memory + columns,
                         memory + 2 * columns,
                         memory + 3 * columns,
                         memory + 4 * columns,
                         (uint8_t *)(memory + 5 * columns)};
}

// Computes dx of a row, and adds its terms to the sums dw and db.
static void one_row(const struct work *in, int64_t columns, const float *restrict weight,
                    float rstd, int centers, const float *restrict dy,
                    const float *restrict residual, float *restrict dx, float *restrict dw,
                    float *restrict db) {
    const uint8_t *restrict codes = in->codes;
    const float *restrict offset = in->offset, *restrict scale = in->scale;
    float *restrict normal = in->normal, sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
    for (int64_t j = 0; j < columns; j++) {
        float x = offset[j] + scale[j] * (float)codes[j], g = dy[j] * weight[j];
        normal[j] = x;
        sum += g;
        product += g * x;
        dw[j] += dy[j] * x;
        db[j] += dy[j];
    }
    const float mean = centers ? sum / (float)columns : 0, along = product / (float)columns;
    for (int64_t j = 0; j < columns; j++)
        dx[j] = rstd * (dy[j] * weight[j] - mean - normal[j] * along);
    for (int64_t j = 0; residual && j < columns; j++) dx[j] += residual[j];
}

// weight: ones if the norm has none. residual: added to dx; may be missing. codes, scale, total,
// largest: ops.int8_rows of dx; may be missing.
int razorctl_norm_grad(const struct copy *copy, const void *dy, int dtype, int64_t row_stride,
                       const float *weight, const float *rstd, int centers, const void *residual,
                       int residual_dtype, int64_t residual_stride, float *dx, float *dw, float *db,
                       int8_t *codes, float *scale, float *total, float *largest,
                       int threads) {
    const int64_t columns = copy->columns, blocks = cdiv(copy->rows, ROWS);
    const struct share whole = share_of(columns, STRIPS, columns / STRIPS, 0);
    float *sums = calloc((size_t)(4 * blocks * columns), sizeof(float));
    float *memory = malloc((size_t)(blocks * WORK * columns) * sizeof(float));
    const int missing = !sums || !memory;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (missing ? 0 : blocks); block++) {
        const struct work in = work_in(memory + block * WORK * columns, columns);
        float *partial = sums + 4 * block * columns;
        const int64_t start = block * ROWS;
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0)
                affine(copy, whole, row / copy->tile_rows, in.offset, in.scale);
            unpack(line_of(copy, row), whole, copy->bits, in.codes);
            const float *g = loaded(dy, dtype, row * row_stride, columns, in.dy);
            const float *plus = residual ? loaded(residual, residual_dtype, row * residual_stride,
                                                  columns, in.residual)
                                         : NULL;
            float *to = dx + row * columns;
            one_row(&in, columns, weight, rstd[row], centers, g, plus, to, partial, partial + columns);
            if (codes)
                scale[row] = int8_row(to, columns, codes + row * columns, partial + 2 * columns);
        }
    }
    if (!missing) {
        add_blocks(sums, blocks, 4 * columns, columns, dw);
        add_blocks(sums + columns, blocks, 4 * columns, columns, db);
        if (codes) finish_rows(sums + 2 * columns, blocks, 4 * columns, columns, total, largest);
    }
    free(sums), free(memory);
    return missing;
}
