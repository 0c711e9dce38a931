// Small vectorisable pieces: storage types, lane sums, and an exponential that compiles to arithmetic only.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/ops.h"

// The compiler builds such a function once per instruction set and the loader picks one at startup. ThreadSanitizer's
// code cannot run that early. Tests define it as one of the sets.
#if defined(CLONES)
#define CLONES_ARE_SET
#elif defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace umbra {

constexpr int kLanes = 16;

// Sixteen floats in as many registers as the set needs; passed by reference, since passing by value has a different ABI
// in each set.
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

// Vectors of N lanes. GCC 12 keeps those in memory that are larger than a register.
template <int N>
struct Vectors {
    typedef float Floats __attribute__((vector_size(4 * N)));
    typedef uint32_t Bits __attribute__((vector_size(4 * N)));
    typedef int32_t Ints __attribute__((vector_size(4 * N)));
    typedef uint16_t Halves __attribute__((vector_size(2 * N)));
    typedef int16_t Shorts __attribute__((vector_size(2 * N)));
    typedef int8_t Bytes __attribute__((vector_size(N)));
};
typedef Vectors<4>::Floats Four;
typedef Vectors<8>::Floats Eight;
template <class V>
constexpr int kWidth = sizeof(V) / sizeof(float);

// Defines a function that is internal to its file for vectors `V` of a register of each instruction set; the loader
// picks one.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(CLONES_ARE_SET)
#define BY_WIDTH(SIGNATURE, ...)                    \
    __attribute__((target("avx512f"))) SIGNATURE {  \
        typedef Lanes V;                            \
        __VA_ARGS__                                 \
    }                                               \
    __attribute__((target("avx2,fma"))) SIGNATURE { \
        typedef Eight V;                            \
        __VA_ARGS__                                 \
    }                                               \
    __attribute__((target("default"))) SIGNATURE {  \
        typedef Four V;                             \
        __VA_ARGS__                                 \
    }
#else
#define BY_WIDTH(SIGNATURE, ...) \
    CLONES SIGNATURE {           \
        typedef Four V;          \
        __VA_ARGS__              \
    }
#endif

template <class V>
ALWAYS_INLINE void load(const float* at, V& v) {
    std::memcpy(&v, at, sizeof v);
}
template <class Half, class B>
ALWAYS_INLINE void load_bits(const Half* at, B& v) {
    typename Vectors<kWidth<B>>::Halves h;
    std::memcpy(&h, at, sizeof h);
    v = __builtin_convertvector(h, B);
}
template <class V>
ALWAYS_INLINE void load(const Bf16* at, V& v) {
    typename Vectors<kWidth<V>>::Bits bits;
    load_bits(at, bits);
    v = reinterpret_cast<V>(bits << 16);
}
template <class V>
ALWAYS_INLINE void load(const F16* at, V& v) {  // as half_to_float
    typedef typename Vectors<kWidth<V>>::Bits B;
    B bits;
    load_bits(at, bits);
    const B sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    const B finite = reinterpret_cast<B>(reinterpret_cast<V>(rest << 13) * 5.192296858534828e+33f);
    v = reinterpret_cast<V>(sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : finite));
}
template <class V>
ALWAYS_INLINE void load(const int8_t* at, V& v) {
    typedef Vectors<kWidth<V>> Of;
    typename Of::Bytes bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    // Step by step: GCC converts larger steps element by element.
    const auto ints = __builtin_convertvector(__builtin_convertvector(bytes, typename Of::Shorts), typename Of::Ints);
    v = __builtin_convertvector(ints, V);
}

// Calls f with a value of the type that `type` names.
template <class F>
void with_type(Type type, F&& f) {
    switch (type) {
        case Type::f32: return f(0.0f);
        case Type::bf16: return f(Bf16{});
        case Type::f16: return f(F16{});
        case Type::i8: return;  // caches only: attention.cpp
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

// The sum of x * y, in lanes.
ALWAYS_INLINE float dot(const float* x, const float* y, int64_t width) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += x[i + l] * y[i + l];
    float sum = 0;
    for (; i < width; i++) sum += x[i] * y[i];
    return sum + add_lanes(lanes);
}

// Lowers `least` and raises `most` to the range of x. In lanes: a plain loop would be one chain of comparisons, which
// the compiler may not reorder (signed zeros).
ALWAYS_INLINE void widen_range(const float* x, int64_t count, float& least, float& most) {
    float low[kLanes], high[kLanes];
    for (int l = 0; l < kLanes; l++) low[l] = least, high[l] = most;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int l = 0; l < kLanes; l++) {
            low[l] = x[i + l] < low[l] ? x[i + l] : low[l];
            high[l] = x[i + l] > high[l] ? x[i + l] : high[l];
        }
    for (; i < count; i++) {
        low[0] = x[i] < low[0] ? x[i] : low[0];
        high[0] = x[i] > high[0] ? x[i] : high[0];
    }
    for (int half = kLanes / 2; half; half /= 2)
        for (int l = 0; l < half; l++) {
            low[l] = low[l + half] < low[l] ? low[l + half] : low[l];
            high[l] = high[l + half] > high[l] ? high[l + half] : high[l];
        }
    least = low[0], most = high[0];
}

// Rounds |x| < 2^22 to the nearest integer, ties to even: adding 1.5 * 2^23 moves it into the low bits.
ALWAYS_INLINE int32_t nearest(float x) {
    const float shifted = x + 12582912.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    return bits - 0x4b400000;
}

// a if `which` is true, else b, as arithmetic: GCC turns ?: before a long computation into two computations and a branch,
// and a loop with a branch is not vectorised for AVX2.
ALWAYS_INLINE float chosen(bool which, float a, float b) {
    uint32_t bits_a, bits_b;
    std::memcpy(&bits_a, &a, 4);
    std::memcpy(&bits_b, &b, 4);
    const uint32_t mask = -static_cast<uint32_t>(which), bits = (bits_a & mask) | (bits_b & ~mask);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// e^x to 2 units in the last place for x in [-87, 88], clamped outside: 2^n times a polynomial on [-ln2/2, ln2/2].
inline float fast_exp(float x) {
    x = chosen(x < -87.0f, -87.0f, x);
    x = chosen(x > 88.0f, 88.0f, x);
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
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    const uint32_t power = (bits - 0x4b400000 + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}

}  // namespace umbra
