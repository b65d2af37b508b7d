// Root mean square normalisation (Zhang and Sennrich, 2019).
#include <cmath>

#include "simd.h"

// y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; x and y float32 [num_rows, width].
EXPORT void rms_norm(const float* x, const float* weight, float* y, int64_t num_rows, int64_t width, float eps) {
    for (int64_t row = 0; row < num_rows; row++, x += width, y += width) {
        Vec total = {};
        int64_t i = 0;
        for (; i + WIDTH <= width; i += WIDTH) total += load(x + i) * load(x + i);
        float squares = sum(total);
        for (; i < width; i++) squares += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
        for (i = 0; i + WIDTH <= width; i += WIDTH) store(y + i, load(x + i) * scale * load(weight + i));
        for (; i < width; i++) y[i] = x[i] * scale * weight[i];
    }
}
