// What the products have in common: weights lie in panels of 32 outputs, and rows of activations are taken in groups
// that fill the registers. The order in which an output's terms are added is the same for every number of rows and of
// threads, so a row's result does not depend on its neighbours.
#pragma once

#include "simd.h"

constexpr int PANEL = 32;           // outputs of a panel
constexpr int COLUMNS = 2 * WIDTH;  // outputs that are computed at once

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls work.run<R>(panel, first_row) for all panels and all rows, R rows at a time, at most MOST. All rows of a panel
// come one after another, while it is in the cache.
template <int R, class Work>
static inline void run_group(const Work& work, int64_t panel, int64_t row, int64_t num_rows) {
    if constexpr (R > 0) {
        if (num_rows == R)
            work.template run<R>(panel, row);
        else
            run_group<R - 1>(work, panel, row, num_rows);
    }
}

template <int MOST, class Work>
static void for_each_panel(const Work& work, int64_t num_panels, int64_t num_rows, int64_t num_threads) {
    const int64_t groups = ceil_div(num_rows, MOST);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t panel = 0; panel < num_panels; panel++)
        for (int64_t group = 0; group < groups; group++) {
            const int64_t first = num_rows * group / groups, stop = num_rows * (group + 1) / groups;
            run_group<MOST>(work, panel, first, stop - first);
        }
}

// Writes the first `count` of COLUMNS outputs.
static inline void store_columns(float* y, Vec low, Vec high, int64_t count) {
    if (count >= COLUMNS) {
        store(y, low);
        store(y + WIDTH, high);
        return;
    }
    float values[COLUMNS];
    store(values, low);
    store(values + WIDTH, high);
    for (int64_t i = 0; i < count; i++) y[i] = values[i];
}
