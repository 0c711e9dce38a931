// Shared by avx2.cpp and avx_vnni.cpp: products of quantised weights in 256-bit vectors. A file includes this once, after
// defining TARGET, and VNNI: whether the set has VPDPBUSD, which multiplies unsigned by signed bytes and adds four
// neighbours into 32 bits. Everything here is internal to that file, so code compiled for one set is never linked into
// the other.
//
// The sixteen rows of a block are two halves of eight, taken one after the other through the same 64-byte vectors. AVX2
// itself has maddubs, which adds only two neighbours, into 16 bits and saturating, so:
//   q4: quants 0 .. 15 times |q| <= 127, two products: at most 3,810; eight such sums fit 16 bits (30,480).
//   mx4: bytes 0 .. 24 times |q| <= 127, two products: at most 6,096; four such sums fit 16 bits (24,384).
//   q8: bytes minus 128 are signed; |w| <= 128 times q with w's sign, two products: at most 32,512, fits once.
#pragma once

#include <immintrin.h>

#include "kernels/passes.h"

#define INLINE TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kAhead = 4096;
constexpr int kMost = 4;  // activation rows of one pass

// Columns 4i .. 4i+3 of eight rows of a block as v[i]; `half` is 0 or 32 bytes into each 64-byte vector.
template <Format F>
INLINE void unpack(const uint8_t* plane, int half, __m256i (&v)[8]) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kMx4Levels)));
    const auto level = [&](__m256i nibbles) TARGET { return F == Format::mx4 ? _mm256_shuffle_epi8(table, nibbles) : nibbles; };
    for (int i = 0; i < (nibbles(F) ? 4 : 8); i++) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + 64 * i + half));
        if (nibbles(F)) {
            v[i] = level(_mm256_and_si256(bytes, low));
            v[4 + i] = level(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
        } else {  // without VPDPBUSD the value, as a signed byte
            v[i] = VNNI ? bytes : _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
        }
    }
}

// start + the sum over a block of v * q for eight rows.
template <Format F>
INLINE __m256i dot(const __m256i (&v)[8], const Block& x, __m256i start) {
#if VNNI
    for (int i = 0; i < 8; i++) start = _mm256_dpbusd_avx_epi32(start, v[i], _mm256_set1_epi32(four(x, i)));
    return start;
#else
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i pairs = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        const __m256i q = _mm256_set1_epi32(four(x, i));
        if (nibbles(F)) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(v[i], q));
            if (F == Format::mx4 && i == 3) {
                start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones));
                pairs = _mm256_setzero_si256();
            }
        } else {
            pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(v[i]), _mm256_sign_epi8(q, v[i]));
            start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones));
        }
    }
    return nibbles(F) ? _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones)) : start;
#endif
}

// The scales of eight rows.
template <Format F>
INLINE __m256 scales_at(const uint16_t* at) {
    if (F != Format::mx4) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 22)));  // mx4_scale
}

template <Format F, bool Zeros, int M>
TARGET void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kBytes = nibbles(F) ? 256 : 512;
    constexpr bool kSigned = F == Format::q8 && !VNNI;  // 128 is taken off already
    const int per_group = w.group / kBlock, blocks = w.k / kBlock;
    for (int half = 0; half < 2; half++) {
        const uint8_t* plane = w.quants + block * w.quant_stride();
        const uint16_t* scales = w.scales + block * w.scale_count() + half * (F == Format::mx4 ? 4 : 8);
        const uint8_t* zeros = Zeros ? w.zeros + block * w.scale_count() + half * 8 : nullptr;
        __m256 sums[M], scale = _mm256_setzero_ps();
        __m256i zero = _mm256_setzero_si256();
        for (int t = 0; t < M; t++) sums[t] = _mm256_setzero_ps();
        int left = 0;
        for (int b = 0; b < blocks; b++, plane += kBytes) {
            if (half == 0)
                for (int i = 0; i < kBytes; i += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(plane + kAhead + i), _MM_HINT_T0);
            if (left == 0) {
                left = per_group;
                scale = scales_at<F>(scales);
                scales += F == Format::mx4 ? kRows / 2 : kRows;
                if (Zeros) {
                    zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros)));
                    if (kSigned) zero = _mm256_sub_epi32(zero, _mm256_set1_epi32(128));
                    zeros += kRows;
                }
            }
            left--;
            __m256i v[8];
            unpack<F>(plane, half * 32, v);
            for (int t = 0; t < M; t++) {
                const Block& x = rows[t][b];
                __m256i start = _mm256_set1_epi32(x.start);
                if (Zeros)
                    start = _mm256_srai_epi32(_mm256_mullo_epi32(zero, start), 3);
                else if (F == Format::mx4)
                    start = _mm256_add_epi32(start, _mm256_srai_epi32(start, 1));  // the zero point is 12 = 8 + 4
                else if (F == Format::q8)
                    start = kSigned ? _mm256_setzero_si256() : _mm256_slli_epi32(start, 4);
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale));
                sums[t] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot<F>(v, x, start)), sums[t]);
            }
        }
        for (int t = 0; t < M; t++) {
            if (F == Format::mx4) sums[t] = _mm256_mul_ps(sums[t], _mm256_set1_ps(0.5f));
            _mm256_storeu_ps(y[t] + half * 8, sums[t]);
        }
    }
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<kMost>(w, rows, index, count, y, stride,
                                [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                    quantised_pass<F, zeros(), m()>(w, block, operands, out);
                                });
}

}  // namespace
}  // namespace umbra
