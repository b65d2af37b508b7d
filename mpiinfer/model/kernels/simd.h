// Vectors of the widest registers that the compiler was told of. Kernels are written once against them and compiled
// once for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

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
typedef int32_t Int __attribute__((vector_size(WIDTH * sizeof(int32_t))));
typedef int32_t IntU __attribute__((vector_size(WIDTH * sizeof(int32_t)), aligned(1), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const VecU*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<VecU*>(p) = v; }
static inline Vec splat(float x) { return x - Vec{}; }
static inline Int load_ints(const void* p) { return *static_cast<const IntU*>(p); }
static inline Int splat_int(int32_t x) { return x - Int{}; }
static inline Vec to_floats(Int v) { return __builtin_convertvector(v, Vec); }

static inline Vec largest(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x <= 0 within 2 units in the last place; e^0 is 1. Coefficients: the Taylor series, which is enough on
// [-ln 2 / 2, ln 2 / 2] with 7 terms.
static inline Vec exp_negative(Vec x) {
    x = largest(x, splat(-87.0f));
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Vec n = (x * 1.44269504f + magic) - magic;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    Vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Int exponent = (__builtin_convertvector(n, Int) + 127) << 23;
    Vec power;
    std::memcpy(&power, &exponent, sizeof power);
    return p * power;
}

// Lanes are added in a fixed tree, so that a sum does not depend on the caller.
static inline float sum(Vec v) {
    float lanes[WIDTH];
    store(lanes, v);
    for (int width = WIDTH / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// An IEEE half precision number: its bits, widened exactly.
static inline float from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits = (magnitude << 13) + 0x38000000u;  // exponents have another bias
    if (magnitude >= 0x7c00) bits += 0x38000000u;     // infinite or no number
    float value;
    if (magnitude < 0x400) {  // below the normal numbers
        value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline Vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    Vec v;
    for (int i = 0; i < WIDTH; i++) v[i] = from_half(p[i]);
    return v;
#endif
}

// bfloat16 is the upper half of a float.
static inline Vec load_upper_halves(const uint16_t* p) {
    typedef uint16_t Halves __attribute__((vector_size(WIDTH * sizeof(uint16_t)), aligned(2), may_alias));
    const Int bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Int) << 16;
    Vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}
