// Small vectorisable pieces: storage types, lane sums, and an exponential that compiles to arithmetic only.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops.h"

// The compiler makes one version of such a function for each set and the loader picks, once; ThreadSanitizer's code
// cannot run that early.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace umbra {

constexpr int kLanes = 16;


// Call f with a value of the type that `type` names.
template <class F>
void with_type(Type type, F&& f) {
    switch (type) {
        case Type::f32: return f(0.0f);
        case Type::bf16: return f(Bf16{});
        case Type::f16: return f(F16{});
    }
}

template <class T>
inline T narrow(float v);
template <>
inline float narrow<float>(float v) {
    return v;
}
template <>
inline Bf16 narrow<Bf16>(float v) {  // to nearest even; NaN stays NaN
    uint32_t u;
    std::memcpy(&u, &v, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(u >> 16 | 0x40)};
    return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <>
inline F16 narrow<F16>(float v) {
    return {float_to_half(v)};
}

inline float add_lanes(const float* lanes) {
    float sum = 0;
    for (int l = 0; l < kLanes; l++) sum += lanes[l];
    return sum;
}

// e^x to 2 units in the last place for x in [-87, 88], clamped outside: 2^n times a polynomial on [-ln2/2, ln2/2].
inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer part falls into the low bits
    const float n = shifted - 12582912.0f;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const int32_t power = (bits - 0x4b400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}

}  // namespace umbra
