// What stands between the products, each in one pass.
#include <cmath>

#include "simd.h"

// x[t] += y[t] where y is given; out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight (Zhang and Sennrich, 2019). All
// float32 [num_rows, width].
EXPORT void add_rms_norm(float* x, const float* y, const float* weight, float* out, int64_t num_rows, int64_t width, float eps) {
    for (int64_t row = 0; row < num_rows; row++, x += width, out += width) {
        Vec total = {};
        int64_t i = 0;
        for (; i + WIDTH <= width; i += WIDTH) {
            Vec v = load(x + i);
            if (y) store(x + i, v += load(y + i));
            total += v * v;
        }
        float squares = sum(total);
        for (; i < width; i++) {
            if (y) x[i] += y[i];
            squares += x[i] * x[i];
        }
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
        for (i = 0; i + WIDTH <= width; i += WIDTH) store(out + i, load(x + i) * scale * load(weight + i));
        for (; i < width; i++) out[i] = x[i] * scale * weight[i];
        if (y) y += width;
    }
}

// out[t] = silu(x[t][0 : width]) * x[t][width : 2 width]; silu(g) = g / (1 + e^-g). x float32 [num_rows, 2 width].
EXPORT void silu_multiply(const float* x, float* out, int64_t num_rows, int64_t width) {
    for (int64_t row = 0; row < num_rows; row++, x += 2 * width, out += width) {
        int64_t i = 0;
        for (; i + WIDTH <= width; i += WIDTH) {
            const Vec gate = load(x + i), e = exp_negative(gate < 0.0f ? gate : -gate);
            store(out + i, gate * (gate < 0.0f ? e : splat(1.0f)) / (e + 1.0f) * load(x + width + i));
        }
        for (; i < width; i++) {
            const float gate = x[i];
            const Vec e = exp_negative(splat(gate < 0.0f ? gate : -gate));
            out[i] = gate * (gate < 0.0f ? e[0] : 1.0f) / (e[0] + 1.0f) * x[width + i];
        }
    }
}
