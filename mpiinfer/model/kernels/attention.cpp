// Attention over keys and values in blocks, and what comes before it: head norms, rotation, and their way into the cache.
//
// A layer's keys lie as [block][key/value head][head_dim][block_tokens], its values as [block][head][block_tokens]
// [head_dim]; block_tokens is a multiple of 16. Softmax is taken online (Milakov and Gimelshein, 2018) over tiles of 64
// positions that begin at multiples of 64, each row in the same order: a row's result depends neither on how its
// sequence was cut into steps nor on what else is in the step.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace {

constexpr int TILE = 64;           // positions
constexpr int MOST_QUERIES = 48;   // rows (a token and a head) that share a tile's keys while they are in the cache
constexpr int VECTORS = TILE / WIDTH;
#if defined(__AVX512F__)
constexpr int ROWS = 6, WIDE = 4;  // rows and vectors whose sums are in registers at once
#else
constexpr int ROWS = 2, WIDE = 4;
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float largest_lane(Vec v) {
    float best = v[0];
    for (int i = 1; i < WIDTH; i++) best = std::max(best, static_cast<float>(v[i]));
    return best;
}

struct Shape {
    int64_t num_queries, num_kv, before, group, head_dim, block_tokens, window;
    float scale;
};

// Some tokens of a sequence and the query heads of one key/value head: `num_rows` rows, the heads of a token together.
struct Item {
    int64_t segment, kv, first_token, num_tokens, first_head, num_heads;
};

struct Segment {
    int32_t first, start, num_tokens, table;
};

class Worker {
  public:
    Worker(const Shape& shape, const float* keys, const float* values)
        : shape(shape), keys(keys), values(values), padded_dim(ceil_div(shape.head_dim, WIDE * WIDTH) * WIDE * WIDTH) {
        outputs.resize(MOST_QUERIES * padded_dim);
        scores.resize(MOST_QUERIES * TILE);
    }

    void attend(const Item& item, const Segment& segment, const int32_t* table, const float* q, int64_t q_stride, float* mixed) {
        const int64_t num_rows = item.num_tokens * item.num_heads, start = segment.start + item.first_token;
        const int64_t stop = start + item.num_tokens;
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t position = start + row / item.num_heads;
            low[row] = shape.window ? std::max<int64_t>(0, position - shape.window + 1) : 0;
            high[row] = position + 1;
            best[row] = NOTHING;
            total[row] = 0.0f;
            queries[row] = q + (segment.first + item.first_token + row / item.num_heads) * q_stride +
                           (item.first_head + row % item.num_heads) * shape.head_dim;
        }
        std::fill(outputs.begin(), outputs.begin() + num_rows * padded_dim, 0.0f);
        for (int64_t tile = low[0] / TILE * TILE; tile < stop; tile += TILE) {
            const int64_t from = std::max(tile, low[0]), to = std::min(tile + TILE, stop);
            score(item.kv, table, num_rows, tile, to);
            for (int64_t row = 0; row < num_rows; row++) weigh(row, tile);
            mix(item.kv, table, num_rows, tile, from, to);
        }
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t token = segment.first + item.first_token + row / item.num_heads;
            const int64_t head = item.first_head + row % item.num_heads;
            float* out = mixed + (token * shape.num_queries + head) * shape.head_dim;
            const float inverse = 1.0f / total[row];
            for (int64_t i = 0; i < shape.head_dim; i++) out[i] = outputs[row * padded_dim + i] * inverse;
        }
    }

  private:
    const float* key_of(const int32_t* table, int64_t kv, int64_t position) const {
        const int64_t block = table[position / shape.block_tokens], offset = position % shape.block_tokens;
        return keys + (block * shape.num_kv + kv) * shape.head_dim * shape.block_tokens + offset;
    }

    const float* value_of(const int32_t* table, int64_t kv, int64_t position) const {
        const int64_t block = table[position / shape.block_tokens], offset = position % shape.block_tokens;
        return values + ((block * shape.num_kv + kv) * shape.block_tokens + offset) * shape.head_dim;
    }

    // Products of all rows with the keys from `tile` to `to`, and of what fills their last vector.
    void score(int64_t kv, const int32_t* table, int64_t num_rows, int64_t tile, int64_t to) {
        const int64_t num_vectors = ceil_div(to - tile, WIDTH);
        const float* pointers[VECTORS];
        for (int64_t v = 0; v < num_vectors; v++) pointers[v] = key_of(table, kv, tile + v * WIDTH);
        for (int64_t v = 0; v < num_vectors; v += WIDE)
            for (int64_t row = 0; row < num_rows; row += ROWS)
                score_rows<ROWS>(pointers + v, std::min<int64_t>(WIDE, num_vectors - v), row,
                                 std::min<int64_t>(ROWS, num_rows - row), v);
    }

    template <int R>
    void score_rows(const float* const* pointers, int64_t num_vectors, int64_t row, int64_t num_rows, int64_t vector) {
        if constexpr (R > 0) {
            if (num_rows < R) return score_rows<R - 1>(pointers, num_vectors, row, num_rows, vector);
            switch (num_vectors) {
                case 1: return score_all<R, 1>(pointers, row, vector);
                case 2: return score_all<R, 2>(pointers, row, vector);
                case 3: return score_all<R, 3>(pointers, row, vector);
                default: return score_all<R, 4>(pointers, row, vector);
            }
        }
    }

    template <int R, int V>
    void score_all(const float* const* pointers, int64_t row, int64_t vector) {
        Vec sums[R][V] = {};
        for (int64_t i = 0; i < shape.head_dim; i++) {
            Vec k[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) k[v] = load(pointers[v] + i * shape.block_tokens);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Vec x = splat(queries[row + r][i]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sums[r][v] += x * k[v];
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(scores.data() + (row + r) * TILE + (vector + v) * WIDTH, sums[r][v] * shape.scale);
    }

    // Scores to weights: e^(score - best so far), 0 where the row does not look; `shrink` is for what was summed before.
    void weigh(int64_t row, int64_t tile) {
        float* s = scores.data() + row * TILE;
        const int64_t first = std::max<int64_t>(0, low[row] - tile), stop = std::min<int64_t>(TILE, high[row] - tile);
        if (stop <= first) {
            std::fill(s, s + TILE, 0.0f);
            shrink[row] = 1.0f;
            return;
        }
        for (int64_t i = 0; i < first; i++) s[i] = NOTHING;
        for (int64_t i = stop; i < TILE; i++) s[i] = NOTHING;
        Vec most = load(s);
        for (int v = 1; v < VECTORS; v++) most = largest(most, load(s + v * WIDTH));
        const float now = std::max(best[row], largest_lane(most));
        Vec sums = {};
        for (int v = 0; v < VECTORS; v++) {
            const Vec x = load(s + v * WIDTH);
            const Vec weight = x == splat(NOTHING) ? Vec{} : exp_negative(x - splat(now));
            sums += weight;
            store(s + v * WIDTH, weight);
        }
        shrink[row] = best[row] == NOTHING ? 0.0f : exp_negative(splat(best[row] - now))[0];
        total[row] = total[row] * shrink[row] + sum(sums);
        best[row] = now;
    }

    void mix(int64_t kv, const int32_t* table, int64_t num_rows, int64_t tile, int64_t from, int64_t to) {
        const float* pointers[TILE];
        for (int64_t position = from; position < to; position++) pointers[position - tile] = value_of(table, kv, position);
        for (int64_t column = 0; column < shape.head_dim; column += WIDE * WIDTH) {
            // Full vectors only where the head has them: the rest of a narrow head is not computed.
            const int64_t num_vectors = std::min<int64_t>(WIDE, ceil_div(shape.head_dim - column, WIDTH));
            for (int64_t row = 0; row < num_rows; row += ROWS)
                mix_rows<ROWS>(pointers, num_vectors, row, std::min<int64_t>(ROWS, num_rows - row), column, from - tile, to - tile);
        }
    }

    template <int R>
    void mix_rows(const float* const* pointers, int64_t num_vectors, int64_t row, int64_t num_rows, int64_t column,
                  int64_t from, int64_t to) {
        if constexpr (R > 0) {
            if (num_rows < R) return mix_rows<R - 1>(pointers, num_vectors, row, num_rows, column, from, to);
            switch (num_vectors) {
                case 1: return mix_all<R, 1>(pointers, row, column, from, to);
                case 2: return mix_all<R, 2>(pointers, row, column, from, to);
                case 3: return mix_all<R, 3>(pointers, row, column, from, to);
                default: return mix_all<R, 4>(pointers, row, column, from, to);
            }
        }
    }

    template <int R, int V>
    void mix_all(const float* const* pointers, int64_t row, int64_t column, int64_t from, int64_t to) {
        Vec sums[R][V];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++)
                sums[r][v] = load(outputs.data() + (row + r) * padded_dim + column + v * WIDTH) * shrink[row + r];
        const float* weights = scores.data() + row * TILE;
        for (int64_t i = from; i < to; i++) {
            Vec value[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) value[v] = load(pointers[i] + column + v * WIDTH);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Vec weight = splat(weights[r * TILE + i]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sums[r][v] += weight * value[v];
            }
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(outputs.data() + (row + r) * padded_dim + column + v * WIDTH, sums[r][v]);
    }

    const Shape& shape;
    const float* keys;
    const float* values;
    const int64_t padded_dim;
    std::vector<float> outputs, scores;
    const float* queries[MOST_QUERIES];
    int64_t low[MOST_QUERIES], high[MOST_QUERIES];
    float best[MOST_QUERIES], total[MOST_QUERIES], shrink[MOST_QUERIES];
};

std::vector<Item> items_of(const Shape& shape, const Segment* segments, int64_t num_segments) {
    std::vector<Item> items;
    for (int64_t s = 0; s < num_segments; s++)
        for (int64_t kv = 0; kv < shape.num_kv; kv++) {
            const int64_t first = std::max<int64_t>(0, kv * shape.group - shape.before);
            const int64_t stop = std::min(shape.num_queries, (kv + 1) * shape.group - shape.before);
            for (int64_t head = first; head < stop; head += MOST_QUERIES) {
                const int64_t num_heads = std::min<int64_t>(MOST_QUERIES, stop - head), most = MOST_QUERIES / num_heads;
                for (int64_t token = 0; token < segments[s].num_tokens; token += most)
                    items.push_back({s, kv, token, std::min<int64_t>(most, segments[s].num_tokens - token), head, num_heads});
            }
        }
    return items;
}

inline void normalise(float* x, const float* weight, int64_t width, float eps) {
    Vec total = {};
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) total += load(x + i) * load(x + i);
    float squares = sum(total);
    for (; i < width; i++) squares += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
    for (i = 0; i < width; i++) x[i] = x[i] * scale * weight[i];
}

inline void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

}  // namespace

// heads [num_tokens][num_queries + 2 num_kv][head_dim]: normalises queries and keys by head where weights are given,
// rotates them by cos and sin [num_tokens][head_dim / 2] in place, and stores keys and values in the layer's cache, a
// token in the slot block * block_tokens + offset.
EXPORT void rotate_and_store(float* heads, const float* cos, const float* sin, const int64_t* slots, const float* q_norm,
                             const float* k_norm, float* keys, float* values, int64_t num_tokens, int64_t num_queries,
                             int64_t num_kv, int64_t head_dim, int64_t block_tokens, float eps) {
    const int64_t half = head_dim / 2, width = (num_queries + 2 * num_kv) * head_dim;
    for (int64_t token = 0; token < num_tokens; token++, heads += width) {
        const int64_t block = slots[token] / block_tokens, offset = slots[token] % block_tokens;
        for (int64_t head = 0; head < num_queries + num_kv; head++) {
            float* x = heads + head * head_dim;
            const float* weight = head < num_queries ? q_norm : k_norm;
            if (weight) normalise(x, weight, head_dim, eps);
            rotate_head(x, cos + token * half, sin + token * half, half);
        }
        for (int64_t kv = 0; kv < num_kv; kv++) {
            const float* k = heads + (num_queries + kv) * head_dim;
            const float* v = heads + (num_queries + num_kv + kv) * head_dim;
            float* to = keys + (block * num_kv + kv) * head_dim * block_tokens + offset;
            for (int64_t i = 0; i < head_dim; i++) to[i * block_tokens] = k[i];
            std::memcpy(values + ((block * num_kv + kv) * block_tokens + offset) * head_dim, v, head_dim * sizeof(float));
        }
    }
}

// mixed [num_tokens][num_queries][head_dim]: each segment's tokens attend to all positions of their sequence up to their
// own, at most `window` of them (0: all). q: rows of q_stride floats. segments: (first row, start, tokens, place of its
// table in `tables`). before: query heads of the first group that other shards have.
EXPORT void attend(const float* q, const float* keys, const float* values, float* mixed, const int32_t* segments,
                   const int32_t* tables, int64_t num_segments, int64_t q_stride, int64_t num_queries, int64_t num_kv,
                   int64_t before, int64_t group, int64_t head_dim, int64_t block_tokens, int64_t window, float scale,
                   int64_t num_threads) {
    const Shape shape{num_queries, num_kv, before, group, head_dim, block_tokens, window, scale};
    const Segment* list = reinterpret_cast<const Segment*>(segments);
    const std::vector<Item> items = items_of(shape, list, num_segments);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        Worker worker(shape, keys, values);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); i++) {
            const Segment& segment = list[items[i].segment];
            worker.attend(items[i], segment, tables + segment.table, q, q_stride, mixed);
        }
    }
}
