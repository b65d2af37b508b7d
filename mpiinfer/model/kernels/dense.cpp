// Products with weights that are held as numbers of 4 or 2 bytes, in panels [ceil(N / 32)][K][32].
#include "panels.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 14;  // 28 sums, 2 weights, 1 activation in 32 registers
#else
constexpr int MOST_ROWS = 6;  // 12, 2 and 1 in 16
#endif

struct Floats {
    typedef float Element;
    static Vec widen(const float* p) { return load(p); }
};
struct Halves {
    typedef uint16_t Element;
    static Vec widen(const uint16_t* p) { return load_halves(p); }
};
struct UpperHalves {
    typedef uint16_t Element;
    static Vec widen(const uint16_t* p) { return load_upper_halves(p); }
};

template <class Format>
struct Product {
    typedef typename Format::Element Element;
    const float* x;
    const Element* panels;
    float* y;
    int64_t depth, num_outputs;

    template <int R>
    void run(int64_t panel, int64_t row) const {
        const Element* weights = panels + panel * depth * PANEL;
        for (int64_t column = 0; column < PANEL; column += COLUMNS) {
            const int64_t output = panel * PANEL + column;
            if (output >= num_outputs) break;
            const float* inputs = x + row * depth;
            Vec low[R] = {}, high[R] = {};
            const Element* w = weights + column;
            for (int64_t k = 0; k < depth; k++, w += PANEL) {
                const Vec w_low = Format::widen(w), w_high = Format::widen(w + WIDTH);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const Vec input = splat(inputs[r * depth + k]);
                    low[r] += input * w_low;
                    high[r] += input * w_high;
                }
            }
            for (int r = 0; r < R; r++)
                store_columns(y + (row + r) * num_outputs + output, low[r], high[r], num_outputs - output);
        }
    }
};

template <class Format>
void multiply(const float* x, const void* panels, float* y, int64_t num_rows, int64_t depth, int64_t num_outputs,
              int64_t num_threads) {
    const int64_t num_panels = ceil_div(num_outputs, PANEL);
    const Product<Format> product{x, static_cast<const typename Format::Element*>(panels), y, depth, num_outputs};
    for_each_panel<MOST_ROWS>(product, num_panels, num_rows, num_threads);
}

}  // namespace

// y[t][n] = sum over k of x[t][k] w[n][k]; x float32 [num_rows, depth], y float32 [num_rows, num_outputs].
EXPORT void linear_fp32(const float* x, const void* panels, float* y, int64_t num_rows, int64_t depth,
                        int64_t num_outputs, int64_t num_threads) {
    multiply<Floats>(x, panels, y, num_rows, depth, num_outputs, num_threads);
}

EXPORT void linear_fp16(const float* x, const void* panels, float* y, int64_t num_rows, int64_t depth,
                        int64_t num_outputs, int64_t num_threads) {
    multiply<Halves>(x, panels, y, num_rows, depth, num_outputs, num_threads);
}

EXPORT void linear_bf16(const float* x, const void* panels, float* y, int64_t num_rows, int64_t depth,
                        int64_t num_outputs, int64_t num_threads) {
    multiply<UpperHalves>(x, panels, y, num_rows, depth, num_outputs, num_threads);
}
