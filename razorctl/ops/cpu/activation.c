// The functions of ops.activation and ops.gated, and their derivatives.
#include "common.h"

// e^x for x <= 88, to 2e-7 of it; Cephes' polynomial.
inlined float exponential(float x) {
    x = higher(x, -87.0f);
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of((uint32_t)((int32_t)n + 127) << 23);
}

#define FURTHEST_X 13.0f // beyond, the functions' derivatives are 0 or 1 in single precision
#define ROOT_2_BY_PI 0.7978845608f

inlined float clamped(float x) { return lower(higher(x, -FURTHEST_X), FURTHEST_X); }

// The normal distribution function, to 1e-7, by Abramowitz and Stegun 7.1.26; e = exp(-x * x / 2).
inlined float normal(float x, float e) {
    float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * fabsf(x));
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    float tail = 0.5f * p * t * e;
    return x > 0 ? 1.0f - tail : tail;
}

inlined float sigmoid(float x) { return 1.0f / (1.0f + exponential(lower(-x, 87.0f))); }

// The derivative of x sigmoid(u), where u is a function of x with derivative `slope`.
inlined float sigmoid_slope(float x, float u, float slope) {
    float e = exponential(lower(-u, 87.0f)), s = 1.0f / (1.0f + e);
    return s + x * slope * (e * s * s); // e s is 1 - s without its rounding
}

// Twice the argument of the tanh in gelu-tanh.
inlined float twice(float x) { return 2 * ROOT_2_BY_PI * (x + 0.044715f * x * x * x); }

inlined float value_of(int function, float x) {
    float c = clamped(x);
    switch (function) {
    case GELU: return x * normal(c, exponential(-0.5f * c * c));
    case GELU_TANH: return x * sigmoid(twice(c));
    case SILU: return x * sigmoid(x);
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    case HARDSWISH: return x * lower(higher(x + 3, 0), 6) * (1.0f / 6);
    case RELU: return higher(x, 0);
    case RELU6: return lower(higher(x, 0), 6);
    case LEAKY_RELU: return x > 0 ? x : 0.01f * x;
    default: return x;
    }
}

inlined float slope_of(int function, float x) {
    float c = clamped(x), far = lower(higher(x, -80.0f), 80.0f);
    switch (function) {
    case GELU: {
        float e = exponential(-0.5f * c * c);
        return normal(c, e) + 0.5f * ROOT_2_BY_PI * c * e;
    }
    case GELU_TANH:
        return sigmoid_slope(c, twice(c), 2 * ROOT_2_BY_PI * (1 + 3 * 0.044715f * c * c));
    case SILU: return sigmoid_slope(far, far, 1);
    case QUICK_GELU: return sigmoid_slope(far, 1.702f * far, 1.702f);
    case HARDSWISH: return x < -3 ? 0 : x < 3 ? x * (1.0f / 3) + 0.5f : 1;
    case RELU: return x > 0;
    case RELU6: return x > 0 && x < 6;
    case LEAKY_RELU: return x > 0 ? 1 : 0.01f;
    default: return 1;
    }
}

// Makes `loop` of each function a loop of its own, whose `which` is a constant.
#define FOR_FUNCTION(function, loop)                                                               \
    switch (function) {                                                                            \
    case GELU: { enum { which = GELU }; loop } break;                                              \
    case GELU_TANH: { enum { which = GELU_TANH }; loop } break;                                    \
    case SILU: { enum { which = SILU }; loop } break;                                              \
    case QUICK_GELU: { enum { which = QUICK_GELU }; loop } break;                                  \
    case HARDSWISH: { enum { which = HARDSWISH }; loop } break;                                    \
    case RELU: { enum { which = RELU }; loop } break;                                              \
    case RELU6: { enum { which = RELU6 }; loop } break;                                            \
    case LEAKY_RELU: { enum { which = LEAKY_RELU }; loop } break;                                  \
    }

void apply(int function, int64_t count, float *x) {
    FOR_FUNCTION(function, for (int64_t j = 0; j < count; j++) x[j] = value_of(which, x[j]);)
}

static void slopes(int function, int64_t count, const float *restrict x, const float *restrict dy,
                   float *restrict dx) {
    FOR_FUNCTION(function,
                 for (int64_t j = 0; j < count; j++) dx[j] = dy[j] * slope_of(which, x[j]);)
}

// ops.activation: f'(x) dy for the x that the copy stands for.
int razorctl_activation_grad(const struct copy *copy, int function, const void *dy,
                              int64_t row_stride, void *dx, int dtype, int threads) {
    const int64_t columns = copy->columns, width = least(WIDEST, columns / STRIPS);
    const int64_t shares = cdiv(columns / STRIPS, width), blocks = cdiv(copy->rows, ROWS);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < blocks * shares; task++) {
        const struct share s = share_of(columns, STRIPS, width, task % shares);
        const int64_t start = task / shares * ROWS;
        float offset[CODES], scale[CODES], x[CODES], from[CODES], to[CODES];
        uint8_t codes[CODES];
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0)
                affine(copy, s, row / copy->tile_rows, offset, scale);
            unpack(line_of(copy, row), s, copy->bits, codes);
            for (int64_t k = 0; k < s.stretches; k++) {
                const int64_t at = row * columns + column(s, k), i = k * s.length;
                const float *g =
                    loaded(dy, dtype, row * row_stride + column(s, k), s.length, from);
                float *d = target(dx, dtype, at, to);
                values_of(codes + i, offset + i, scale + i, s.length, dtype, x);
                slopes(function, s.length, x, g, d);
                store(dx, dtype, at, s.length, d);
            }
        }
    }
    return 0;
}

// ops.activation: ops.int8_rows of f'(x) dy, in the dtype of dy.
int razorctl_activation_grad_int8(const struct copy *copy, int function, const void *dy,
                                  int64_t row_stride, int dtype, int8_t *codes, float *scale,
                                  float *total, float *largest, int threads) {
    const int64_t columns = copy->columns, blocks = cdiv(copy->rows, ROWS);
    const struct share whole = share_of(columns, STRIPS, columns / STRIPS, 0);
    float *of_rows = calloc((size_t)(2 * blocks * columns), sizeof(float));
    float *memory = malloc((size_t)(blocks * 6 * columns) * sizeof(float));
    const int missing = !of_rows || !memory;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t block = 0; block < (missing ? 0 : blocks); block++) {
        float *offset = memory + block * 6 * columns, *spacing = offset + columns;
        float *x = spacing + columns, *from = x + columns, *dx = from + columns;
        uint8_t *numbers = (uint8_t *)(dx + columns);
        const int64_t start = block * ROWS;
        for (int64_t row = start; row < least(copy->rows, start + ROWS); row++) {
            if (row == start || row % copy->tile_rows == 0)
                affine(copy, whole, row / copy->tile_rows, offset, spacing);
            unpack(line_of(copy, row), whole, copy->bits, numbers);
            values_of(numbers, offset, spacing, columns, dtype, x);
            slopes(function, columns, x, loaded(dy, dtype, row * row_stride, columns, from), dx);
            for (int64_t j = 0; dtype == BFLOAT16 && j < columns; j++)
                dx[j] = widened(narrowed(dx[j]));
            scale[row] =
                int8_row(dx, columns, codes + row * columns, of_rows + 2 * block * columns);
        }
    }
    if (!missing) finish_rows(of_rows, blocks, 2 * columns, columns, total, largest);
    free(of_rows), free(memory);
    return missing;
}

// f'(gate) up dy and f(gate) dy for a stretch of a row.
static void gradients_of(int function, int64_t count, const float *restrict dy,
                         const float *restrict gate, const float *restrict up,
                         float *restrict dgate, float *restrict dup) {
    FOR_FUNCTION(function, for (int64_t j = 0; j < count; j++) {
        dgate[j] = dy[j] * up[j] * slope_of(which, gate[j]);
        dup[j] = dy[j] * value_of(which, gate[j]);
    })
}

// ops.gated: the gradients of gate and up of f(gate) up.
int razorctl_gated_grad(const float *dy, const float *gate, const float *up, int64_t dy_stride,
                        int64_t gate_stride, int64_t up_stride, int64_t rows, int64_t columns,
                        int function, float *dgate, float *dup, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        gradients_of(function, columns, dy + row * dy_stride, gate + row * gate_stride,
                     up + row * up_stride, dgate + row * columns, dup + row * columns);
    return 0;
}
