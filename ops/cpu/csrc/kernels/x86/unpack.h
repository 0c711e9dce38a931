// Shared by avx512.cpp and amx.cpp: quantised weights in 512-bit vectors. A file includes this once, after defining TARGET
// and INLINE.
#pragma once

#include <immintrin.h>

#include "kernels/matrix.h"

namespace umbra {
namespace {

// Columns 4i .. 4i+3 of a block as v[i], four bytes for each of 16 rows.
template <Format F>
INLINE void unpack(const uint8_t* plane, __m512i (&v)[8]) {
    constexpr FormatTraits kOf = kTraits<F>;
    constexpr int kVectors = kOf.nibbles() ? 4 : 8, kBits = kOf.high_bits();
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
        v[i] = _mm512_load_si512(plane + 64 * i);
        if (!kOf.nibbles()) continue;
        v[4 + i] = _mm512_and_si512(_mm512_srli_epi16(v[i], 4), low);
        v[i] = _mm512_and_si512(v[i], low);
        if (!kOf.coded()) continue;
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kOf.codes)));
        v[i] = _mm512_shuffle_epi8(table, v[i]);
        v[4 + i] = _mm512_shuffle_epi8(table, v[4 + i]);
    }
    if (!kBits) return;
    const __m512i mask = _mm512_set1_epi8(kBits == 1 ? 16 : 48);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i high = _mm512_load_si512(plane + 256 + 64 * (i * kBits / 8));
        const int at = i * kBits % 8;
        high = at < 4 ? _mm512_slli_epi16(high, 4 - at) : _mm512_srli_epi16(high, at - 4);
        v[i] = _mm512_ternarylogic_epi32(v[i], high, mask, 0xf8);  // v | high & mask
    }
}

}  // namespace
}  // namespace umbra
