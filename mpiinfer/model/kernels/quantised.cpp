// Products with weights in blocks of 32 along the depth: w = d q + m, q of 4 or 8 bits without sign, d and m in half
// precision; m is stored, or a multiple of d (m = -offset d).
//
// Activations are rounded to 8 bits, each row's block of 32 by itself with its own scale, so that the products are
// sums of integers and a row depends on nothing but itself.
//
// A panel is a list of records, one for each block: q as [8 groups of 4 along the depth][32 outputs][4], of 4 bits with
// group g in the low and group g + 4 in the high half of a byte; d [32]; m [32] where it is stored.
#include <cmath>
#include <vector>

#include "panels.h"

namespace {

constexpr int BLOCK = 32;
constexpr int GROUPS = BLOCK / 4;
#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;  // 12 sums of integers, 12 of floats, 4 weights
#else
constexpr int MOST_ROWS = 2;
#endif

// Adds to each lane the products of its 4 bytes: u without sign (below 16 where Bits is 4), x with.
template <int Bits>
inline Int add_products(Int total, Int u, Int x) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Int>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(total), reinterpret_cast<__m512i>(u),
                                                     reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
    // Sums of two products fit 16 bits only where u has 4: larger ones are taken in halves.
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i weights = reinterpret_cast<__m256i>(u), inputs = reinterpret_cast<__m256i>(x);
    const __m256i low = _mm256_maddubs_epi16(Bits == 4 ? weights : _mm256_and_si256(weights, nibble), inputs);
    total += reinterpret_cast<Int>(_mm256_madd_epi16(low, ones));
    if (Bits == 8) {
        const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(weights, 4), nibble), inputs);
        total += reinterpret_cast<Int>(_mm256_slli_epi32(_mm256_madd_epi16(high, ones), 4));
    }
    return total;
#else
    for (int shift = 0; shift < 32; shift += 8) total += ((u >> shift) & 255) * ((x << (24 - shift)) >> 24);
    return total;
#endif
}

// Rows of activations in blocks. Before the first one stand `lead` zeros.
struct Rows {
    int64_t num_blocks;
    std::vector<int8_t> values;     // [num_rows][num_blocks][32]
    std::vector<float> scales;      // [num_rows][num_blocks]
    std::vector<int32_t> sums;      // of a block's values
    std::vector<float> scaled_sums;  // sum * scale

    void take(const float* x, int64_t num_rows, int64_t depth, int64_t lead, int64_t num_threads) {
        num_blocks = ceil_div(lead + depth, BLOCK);
        values.resize(num_rows * num_blocks * BLOCK);
        scales.resize(num_rows * num_blocks);
        sums.resize(num_rows * num_blocks);
        scaled_sums.resize(num_rows * num_blocks);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t block = 0; block < num_blocks; block++) {
                const int64_t start = block * BLOCK - lead;
                if (start >= 0 && start + BLOCK <= depth) {
                    round_block(x + row * depth + start, row * num_blocks + block);
                } else {
                    float padded[BLOCK] = {};
                    for (int i = 0; i < BLOCK; i++)
                        if (start + i >= 0 && start + i < depth) padded[i] = x[row * depth + start + i];
                    round_block(padded, row * num_blocks + block);
                }
            }
    }

    void round_block(const float* x, int64_t index) {
        float largest = 0.0f;
        for (int i = 0; i < BLOCK; i++) largest = std::fmax(largest, std::fabs(x[i]));
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int8_t* rounded = values.data() + index * BLOCK;
        int32_t total = 0;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t value = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
            rounded[i] = static_cast<int8_t>(value);
            total += value;
        }
        scales[index] = largest / 127.0f;
        sums[index] = total;
        scaled_sums[index] = scales[index] * static_cast<float>(total);
    }
};

template <int Bits, bool HasMinimum>
struct Product {
    static constexpr int64_t QUANT_BYTES = BLOCK * PANEL * Bits / 8;
    static constexpr int64_t RECORD_BYTES = QUANT_BYTES + 2 * PANEL * (HasMinimum ? 2 : 1);

    const Rows& rows;
    const uint8_t* panels;
    float* y;
    int64_t num_outputs;
    int32_t offset;

    template <int R>
    void run(int64_t panel, int64_t row) const {
        for (int64_t column = 0; column < PANEL; column += COLUMNS) {
            const int64_t output = panel * PANEL + column;
            if (output >= num_outputs) break;
            Vec low[R] = {}, high[R] = {};
            for (int64_t block = 0; block < rows.num_blocks; block++)
                add_block<R>(panels + (panel * rows.num_blocks + block) * RECORD_BYTES, column,
                             row * rows.num_blocks + block, low, high);
            for (int r = 0; r < R; r++)
                store_columns(y + (row + r) * num_outputs + output, low[r], high[r], num_outputs - output);
        }
    }

    template <int R>
    void add_block(const uint8_t* record, int64_t column, int64_t index, Vec* low, Vec* high) const {
        Int whole_low[R], whole_high[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            whole_low[r] = whole_high[r] = splat_int(HasMinimum ? 0 : -offset * rows.sums[index + r * rows.num_blocks]);
        const uint8_t* quants = record + 4 * column;
        const int8_t* inputs = rows.values.data() + index * BLOCK;
        const Int nibble = splat_int(0x0f0f0f0f);
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS * Bits / 8; group++, quants += 4 * PANEL) {
            Int q_low = load_ints(quants), q_high = load_ints(quants + 4 * WIDTH);
            if (Bits == 4) {
                add_group<R>(((q_low >> 4) & nibble), ((q_high >> 4) & nibble), inputs + 4 * (group + GROUPS / 2),
                             whole_low, whole_high);
                q_low &= nibble;
                q_high &= nibble;
            }
            add_group<R>(q_low, q_high, inputs + 4 * group, whole_low, whole_high);
        }
        const uint16_t* scales = reinterpret_cast<const uint16_t*>(record + QUANT_BYTES) + column;
        const Vec d_low = load_halves(scales), d_high = load_halves(scales + WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec scale = splat(rows.scales[index + r * rows.num_blocks]);
            low[r] += to_floats(whole_low[r]) * d_low * scale;
            high[r] += to_floats(whole_high[r]) * d_high * scale;
        }
        if (HasMinimum) {
            const Vec m_low = load_halves(scales + PANEL), m_high = load_halves(scales + PANEL + WIDTH);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Vec total = splat(rows.scaled_sums[index + r * rows.num_blocks]);
                low[r] += m_low * total;
                high[r] += m_high * total;
            }
        }
    }

    template <int R>
    void add_group(Int q_low, Int q_high, const int8_t* inputs, Int* whole_low, Int* whole_high) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t four;
            std::memcpy(&four, inputs + r * rows.num_blocks * BLOCK, 4);
            const Int x = splat_int(four);
            whole_low[r] = add_products<Bits>(whole_low[r], q_low, x);
            whole_high[r] = add_products<Bits>(whole_high[r], q_high, x);
        }
    }
};

template <int Bits>
void multiply(const float* x, const uint8_t* panels, float* y, int64_t num_rows, int64_t depth, int64_t lead,
              int64_t num_outputs, int64_t offset, int64_t num_threads) {
    thread_local Rows rows;
    rows.take(x, num_rows, depth, lead, num_threads);
    const int64_t num_panels = ceil_div(num_outputs, PANEL);
    if (offset < 0)
        for_each_panel<MOST_ROWS>(Product<Bits, true>{rows, panels, y, num_outputs, 0}, num_panels, num_rows, num_threads);
    else
        for_each_panel<MOST_ROWS>(Product<Bits, false>{rows, panels, y, num_outputs, static_cast<int32_t>(offset)},
                                  num_panels, num_rows, num_threads);
}

}  // namespace

// y[t][n] = sum over k of x[t][k] w[n][k], x and y float32; the panels' first `lead` weights of each output are zeros
// beyond x. offset: m / -d where m is not stored, else -1.
EXPORT void linear_int4(const float* x, const uint8_t* panels, float* y, int64_t num_rows, int64_t depth, int64_t lead,
                        int64_t num_outputs, int64_t offset, int64_t num_threads) {
    multiply<4>(x, panels, y, num_rows, depth, lead, num_outputs, offset, num_threads);
}

EXPORT void linear_int8(const float* x, const uint8_t* panels, float* y, int64_t num_rows, int64_t depth, int64_t lead,
                        int64_t num_outputs, int64_t offset, int64_t num_threads) {
    multiply<8>(x, panels, y, num_rows, depth, lead, num_outputs, offset, num_threads);
}
