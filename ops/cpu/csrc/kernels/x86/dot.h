// Shared by avx2.cpp and avx_vnni.cpp: products of quantised weights in 256-bit vectors. A file includes this once, after
// defining TARGET, and VNNI: whether the set has VPDPBUSD, which multiplies unsigned by signed bytes and adds four
// neighbours into 32 bits. Everything here is internal to that file, so code compiled for one set is never linked into
// the other.
//
// The sixteen rows of a block are two halves of eight, taken one after the other through the same 64-byte vectors. AVX2
// itself has maddubs, which adds only two neighbours, into 16 bits and saturating, so:
//   q4: quants 0 .. 15 times |q| <= 127, two products: at most 3,810; eight such sums fit 16 bits (30,480).
//   mx4: bytes 0 .. 24 times |q| <= 127, two products: at most 6,096; four such sums fit 16 bits (24,384).
//   q5k: at most 7,874; four fit (31,496). q6k: at most 16,002; two fit (32,004).
//   q8, w8a8, iq4: bytes minus 128 are signed; |w| <= 128 times q with w's sign, two products: at most 32,512, fits once.
#pragma once

#include <immintrin.h>

#include "kernels/passes.h"

#define INLINE TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kAhead = 4096;
constexpr int kMost = 4;  // activation rows of one pass

// Without VPDPBUSD the bytes of these are values with a sign.
constexpr bool with_signs(Format f) { return !VNNI && (whole_bytes(f) || f == Format::iq4); }
// The products whose sums fit 16 bits.
constexpr int fitting(Format f) {
    return with_signs(f) ? 1 : f == Format::q6k ? 2 : f == Format::mx4 || f == Format::q5k ? 4 : 8;
}

INLINE __m256i load32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

// Columns 4i .. 4i+3 of eight rows of a block as v[i]; `half` is 0 or 32 bytes into each 64-byte vector.
template <Format F>
INLINE void unpack(const uint8_t* plane, int half, __m256i (&v)[8]) {
    constexpr int kBits = high_bits(F);
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < (nibbles(F) ? 4 : 8); i++) {
        v[i] = load32(plane + 64 * i + half);
        if (!nibbles(F)) continue;
        v[4 + i] = _mm256_and_si256(_mm256_srli_epi16(v[i], 4), low);
        v[i] = _mm256_and_si256(v[i], low);
    }
    for (int i = 0; i < 8; i++) {
        if (F == Format::mx4 || F == Format::iq4) {
            const uint8_t* levels = F == Format::mx4 ? kMx4Levels : kIq4Levels;
            const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels));
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

// The scales of eight rows, and what products need with them, from the first column to the last.
template <Format F, bool Zeros>
struct Scales {
    static constexpr bool kTwo = bytes_of(F) == 2;  // factors

    const uint8_t* at;
    const uint8_t* zeros;
    int half;            // of sixteen rows
    __m256 of_group[2];  // of nested scales
    __m256 factor[2];
    __m256i zero;

    INLINE Scales(const Matrix& w, int block, int half)
        : at(reinterpret_cast<const uint8_t*>(w.scales + block * w.scale_count())),
          zeros(Zeros ? w.zeros + block * w.scale_count() + half * 8 : nullptr), half(half),
          zero(_mm256_setzero_si256()) {
        of_group[0] = of_group[1] = factor[0] = factor[1] = _mm256_setzero_ps();
    }

    INLINE __m256i bytes() {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + 8 * half));
        at += kRows;
        return lowered(F) || F == Format::mx4 ? _mm256_cvtepu8_epi32(eight) : _mm256_cvtepi8_epi32(eight);
    }
    INLINE __m256 halves() {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 16 * half));
        at += 2 * kRows;
        return _mm256_cvtph_ps(eight);
    }

    INLINE __m256 floats() {
        const __m256 eight = _mm256_loadu_ps(reinterpret_cast<const float*>(at) + 8 * half);
        at += 4 * kRows;
        return eight;
    }

    // Where a group begins.
    INLINE void enter() {
        if (F == Format::mx4) {  // mx4_scale
            const __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(bytes(), 23), _mm256_set1_epi32(1 << 22));
            factor[0] = _mm256_castsi256_ps(bits);
        } else if (nested(F)) {
            of_group[0] = halves();
            if (lowered(F)) of_group[1] = _mm256_mul_ps(halves(), _mm256_set1_ps(0.125f));  // of Block::start
        } else {
            factor[0] = F == Format::w8a8 ? floats() : halves();
        }
        if (Zeros) {
            zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros)));
            if (with_signs(F)) zero = _mm256_sub_epi32(zero, _mm256_set1_epi32(128));
            zeros += kRows;
        }
    }
    // At each block.
    INLINE void next() {
        if (!nested(F)) return;
        factor[0] = _mm256_mul_ps(of_group[0], _mm256_cvtepi32_ps(bytes()));
        if (kTwo) factor[1] = _mm256_mul_ps(of_group[lowered(F)], _mm256_cvtepi32_ps(bytes()));
    }

    // What sums of products start at; in q6k those of the first 16 columns.
    INLINE __m256i start(const Block& x) const {
        const __m256i all = _mm256_set1_epi32(x.start);
        if (Zeros) return _mm256_srai_epi32(_mm256_mullo_epi32(zero, all), 3);
        if (F == Format::mx4) return _mm256_add_epi32(all, _mm256_srai_epi32(all, 1));  // 12 = 8 + 4
        if (F == Format::q6k) return _mm256_slli_epi32(_mm256_set1_epi32(x.first), 2);
        if (lowered(F) || with_signs(F)) return _mm256_setzero_si256();
        return F == Format::q4 ? all : _mm256_slli_epi32(all, 4);
    }
    // Adds the products of a block.
    INLINE __m256 add(const __m256i (&v)[8], const Block& x, __m256 to) const {
        const __m256 scale = _mm256_set1_ps(x.scale);
        if (!kTwo) {
            const __m256 sum = _mm256_cvtepi32_ps(dot<F, 0, 8>(v, x, start(x)));
            return _mm256_fmadd_ps(_mm256_mul_ps(factor[0], scale), sum, to);
        }
        __m256i first, second;
        if (lowered(F)) {
            first = dot<F, 0, 8>(v, x, start(x));
            second = _mm256_set1_epi32(x.start);
        } else {
            first = dot<F, 0, 4>(v, x, start(x));
            second = _mm256_sub_epi32(_mm256_slli_epi32(_mm256_set1_epi32(x.start), 2), start(x));
            second = dot<F, 4, 8>(v, x, second);
        }
        const __m256 scaled = _mm256_mul_ps(factor[0], _mm256_cvtepi32_ps(first));
        return _mm256_fmadd_ps(_mm256_fmadd_ps(factor[1], _mm256_cvtepi32_ps(second), scaled), scale, to);
    }
};

template <Format F, bool Zeros, int M>
TARGET void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kBytes = block_bytes_of(F);
    const int per_group = w.group / kBlock, blocks = w.k / kBlock;
    for (int half = 0; half < 2; half++) {
        const uint8_t* plane = w.quants + block * w.quant_stride();
        Scales<F, Zeros> scales(w, block, half);
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
            for (int t = 0; t < M; t++) sums[t] = scales.add(v, rows[t][b], sums[t]);
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
