// Shared by avx2.cpp and avx_vnni.cpp: products of quantised weights in 256-bit vectors. A file includes this once, after
// defining TARGET, and VNNI: whether the set has VPDPBUSD, which multiplies unsigned by signed bytes and adds four
// neighbours into 32 bits. Everything here is internal to that file, so code compiled for one set is never linked into
// the other.
//
// The sixteen rows of a block are two halves of eight, taken one after the other through the same 64-byte vectors. AVX2
// itself has maddubs, which adds only two neighbours, into 16 bits and saturating, so:
//   q4: quants 0 .. 15 times |q| <= 127, two products: at most 3,810; eight such sums fit 16 bits (30,480).
//   mxfp4, nvfp4: bytes 0 .. 24 times |q| <= 127, two products: at most 6,096; four such sums fit 16 bits (24,384).
//   expanded: bytes 0 .. 127, at most 32,258, fits once. q5_k: at most 7,874; four fit (31,496). q6_k: at most 16,002; two fit (32,004).
//   q8, w8a8, iq4: bytes minus 128 are signed; |w| <= 128 times q with w's sign, two products: at most 32,512, fits once.
#pragma once

#include <immintrin.h>

#include "kernels/passes.h"
#include "kernels/records.h"

#define INLINE TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

struct Vector {
    using Floats = __m256;
    using Ints = __m256i;

    static INLINE Ints none() { return _mm256_setzero_si256(); }
    static INLINE Floats nothing() { return _mm256_setzero_ps(); }
    static INLINE Ints all(int32_t v) { return _mm256_set1_epi32(v); }
    static INLINE Floats all(float v) { return _mm256_set1_ps(v); }
    static INLINE Ints unsigned_bytes(const uint8_t* at) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    }
    static INLINE Ints bytes(const uint8_t* at) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    }
    static INLINE Floats halves(const uint8_t* at) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static INLINE Floats e4m3(const uint8_t* at) {  // e4m3 floats, as 2^-8 of their values
        const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80))));
    }
    static INLINE Floats floats(const uint8_t* at) { return _mm256_loadu_ps(reinterpret_cast<const float*>(at)); }
    static INLINE Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
    static INLINE Floats as_floats(Ints v) { return _mm256_castsi256_ps(v); }
    static INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
    static INLINE Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
    static INLINE Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
    static INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
    static INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
    static INLINE Ints larger(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
    template <int By>
    static INLINE Ints shift_left(Ints v) {
        return _mm256_slli_epi32(v, By);
    }
    template <int By>
    static INLINE Ints shift_right(Ints v) {
        return _mm256_srai_epi32(v, By);
    }
};

}  // namespace
}  // namespace umbra

#include "kernels/x86/scales.h"

namespace umbra {
namespace {

constexpr int kAhead = 4096;
constexpr int kMost = 4;  // activation rows of one pass

constexpr int kMostProduct = 2 * 127;  // of a byte of 1, of two neighbours

// Without VPDPBUSD, bytes whose products do not fit 16 bits become values with a sign: less by 128.
constexpr bool with_signs(Format f) { return !VNNI && traits_of(f).most() * kMostProduct > INT16_MAX; }
constexpr int less(Format f) { return with_signs(f) ? 128 : 0; }
// The products whose sums fit 16 bits.
constexpr int fitting(Format f) {
    int count = 1;
    while (count < 8 && 2 * count * traits_of(f).most() * kMostProduct <= INT16_MAX) count *= 2;
    return count;
}

INLINE __m256i load32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Columns 4i .. 4i+3 of eight rows of a block as v[i]; `half` is 0 or 32 bytes into each 64-byte vector.
template <Format F>
INLINE void unpack(const uint8_t* plane, int half, __m256i (&v)[8]) {
    constexpr FormatTraits kOf = kTraits<F>;
    constexpr int kBits = kOf.high_bits();
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < (kOf.nibbles() ? 4 : 8); i++) {
        v[i] = load32(plane + 64 * i + half);
        if (!kOf.nibbles()) continue;
        v[4 + i] = _mm256_and_si256(_mm256_srli_epi16(v[i], 4), low);
        v[i] = _mm256_and_si256(v[i], low);
    }
    for (int i = 0; i < 8; i++) {
        if (kOf.coded()) {
            const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kOf.codes));
            v[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v[i]);
        }
        if (kBits) {
            const int at = i * kBits % 8;
            __m256i high = load32(plane + 256 + 64 * (i * kBits / 8) + half);
            high = at < 4 ? _mm256_slli_epi16(high, 4 - at) : _mm256_srli_epi16(high, at - 4);
            v[i] = _mm256_or_si256(v[i], _mm256_and_si256(high, _mm256_set1_epi8(kBits == 1 ? 16 : 48)));
        }
        if (with_signs(F)) v[i] = _mm256_xor_si256(v[i], _mm256_set1_epi8(-128));
    }
}

// start + the sum over columns 4 First .. 4 End - 1 of a block of v * q for eight rows.
template <Format F, int First, int End>
INLINE __m256i dot(const __m256i (&v)[8], const Block& x, __m256i start) {
#if VNNI
    for (int i = First; i < End; i++) start = _mm256_dpbusd_avx_epi32(start, v[i], _mm256_set1_epi32(four(x, i)));
#else
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs = _mm256_setzero_si256();
    for (int i = First; i < End; i++) {
        __m256i q = _mm256_set1_epi32(four(x, i)), w = v[i];
        if (with_signs(F)) q = _mm256_sign_epi8(q, w), w = _mm256_abs_epi8(w);
        const __m256i products = _mm256_maddubs_epi16(w, q);
        pairs = i % fitting(F) ? _mm256_add_epi16(pairs, products) : products;
        if ((i + 1) % fitting(F) == 0) start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones));
    }
#endif
    return start;
}

// Adds the products of a block to sums of eight rows.
template <Format F, bool Zeros>
INLINE __m256 add(const RowScales<F, Zeros, less(F)>& scales, const __m256i (&v)[8], const Block& x, __m256 to) {
    __m256i first, second;
    scales.start(x, first, second);
    if (kTraits<F>.sixteens()) {
        first = dot<F, 0, 4>(v, x, first);
        second = dot<F, 4, 8>(v, x, second);
    } else {
        first = dot<F, 0, 8>(v, x, first);
    }
    return scales.add(first, second, x, to);
}

template <Format F, bool Zeros, int M>
TARGET void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kBytes = kTraits<F>.block_bytes();
    const int per_group = w.group / kBlock, blocks = w.k / kBlock;
    for (int half = 0; half < 2; half++) {
        const uint8_t* plane = w.quants + block * w.quant_stride();
        RowScales<F, Zeros, less(F)> scales(w, block, half * 8);
        __m256 sums[M];
        for (int t = 0; t < M; t++) sums[t] = _mm256_setzero_ps();
        int left = 0;
        for (int b = 0; b < blocks; b++, plane += kBytes) {
            if (half == 0)
                for (int i = 0; i < kBytes; i += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(plane + kAhead + i), _MM_HINT_T0);
            if (left == 0) {
                left = per_group;
                scales.enter();
            }
            scales.next();
            left--;
            __m256i v[8];
            unpack<F>(plane, half * 32, v);
            for (int t = 0; t < M; t++) sums[t] = add<F, Zeros>(scales, v, rows[t][b], sums[t]);
        }
        for (int t = 0; t < M; t++) _mm256_storeu_ps(y[t] + half * 8, scales.result(sums[t]));
    }
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<F, kMost>(w, rows, index, count, y, stride,
                                   [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                       quantised_pass<F, zeros(), m()>(w, block, operands, out);
                                   });
}

}  // namespace
}  // namespace umbra
