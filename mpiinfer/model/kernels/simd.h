// One vector type of the widest registers that the compiler was told of. Kernels are written once against it and
// compiled once for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * sizeof(float))));
typedef float VecU __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }
static inline Vec splat(float x) { return x - Vec{}; }

// Lanes are added in a fixed tree, so that a sum does not depend on the caller.
static inline float sum(Vec v) {
    float lanes[WIDTH];
    store(lanes, v);
    for (int width = WIDTH / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
