// AVX-512 with BF16: matrices of bfloat16, and attention, are multiplied in bfloat16; other matrices as in avx512.cpp.
//
// A dot instruction multiplies two columns of sixteen rows by two activations, which are rounded to bfloat16: the error of
// a product sum is at most 2^-9 of sum |x * w|. Neighbouring columns (matrix.h) become pairs of a lane by one permutation,
// which up to eight activation rows share, and an activation is loaded once for two row blocks.

#include "kernels/expanded.h"
#include "kernels/x86/bf16.h"

namespace umbra {
namespace {

constexpr int kChunk = 512;   // columns whose activations are rounded at a time: 8 KB for eight rows
constexpr int kAhead = 4096;  // bytes that are prefetched ahead

// Rounds columns c .. c + count - 1 of each row; an odd number is followed by a zero.
template <int M>
TARGET void round_rows(const float* const* x, int c, int count, Bf16 (*to)[kChunk]) {
    const auto store = [](__m512 low, __m512 high, Bf16* at) TARGET {
        _mm512_storeu_si512(at, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    };
    const int whole = count / (2 * kLanes) * 2 * kLanes, left = count - whole;
    const auto mask = [&](int from) { return static_cast<__mmask16>((1u << std::clamp(left - from, 0, kLanes)) - 1); };
    for (int t = 0; t < M; t++) {
        for (int i = 0; i < whole; i += 2 * kLanes)
            store(_mm512_loadu_ps(x[t] + c + i), _mm512_loadu_ps(x[t] + c + i + kLanes), to[t] + i);
        if (left)
            store(_mm512_maskz_loadu_ps(mask(0), x[t] + c + whole),
                  _mm512_maskz_loadu_ps(mask(kLanes), x[t] + c + whole + kLanes), to[t] + whole);
    }
}

// M activation rows by B neighbouring row blocks.
template <int M, int B>
TARGET void bf16_pass(const Matrix& w, int block, const float* const* x, float* const* y) {
    alignas(64) Bf16 rounded[M][kChunk];
    // Lane r of a pair of columns: row r of the first, row r of the second.
    alignas(64) static constexpr uint16_t kPairs[2 * kLanes] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                                21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                                11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i pairs = _mm512_load_si512(kPairs);
    const Bf16* plane[B];
    __m512 sums[M][B];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) plane[b] = reinterpret_cast<const Bf16*>(w.quants + (block + b) * w.quant_stride());
#pragma GCC unroll 8
    for (int t = 0; t < M; t++)
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) sums[t][b] = _mm512_setzero_ps();
    const auto add = [&](int i, bool both) __attribute__((always_inline)) TARGET {
        __m512bh columns[B];
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) {
            const __m512i raw =
                both ? _mm512_loadu_si512(plane[b]) : _mm512_maskz_loadu_epi16(0xffff, plane[b]);  // the last column
            columns[b] = as_bf16(_mm512_permutexvar_epi16(pairs, raw));
            plane[b] += 2 * kRows;
            _mm_prefetch(reinterpret_cast<const char*>(plane[b]) + kAhead, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int t = 0; t < M; t++) {
            int32_t two;
            std::memcpy(&two, rounded[t] + i, sizeof two);
            const __m512bh activations = as_bf16(_mm512_set1_epi32(two));
#pragma GCC unroll 2
            for (int b = 0; b < B; b++) sums[t][b] = _mm512_dpbf16_ps(sums[t][b], activations, columns[b]);
        }
    };
    for (int c = 0; c < w.k; c += kChunk) {
        const int count = std::min(kChunk, w.k - c);
        round_rows<M>(x, c, count, rounded);
        int i = 0;
        for (; i + 1 < count; i += 2) add(i, true);
        if (i < count) add(i, false);
    }
#pragma GCC unroll 8
    for (int t = 0; t < M; t++)
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) _mm512_storeu_ps(y[t] + b * kRows, sums[t][b]);
}

void several_bf16(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count, float* y,
                  size_t stride) {
    const auto row = [&](size_t number) { return rows.x + number * w.k; };
    int b = 0;
    for (; b + 1 < blocks; b += 2)
        for_passes<kMost>(
            index, count, y + b * kRows, stride, row,
            [&](auto m, const float* const* x, float* const* out) { bf16_pass<m(), 2>(w, block + b, x, out); });
    if (b < blocks)
        for_passes<kMost>(
            index, count, y + b * kRows, stride, row,
            [&](auto m, const float* const* x, float* const* out) { bf16_pass<m(), 1>(w, block + b, x, out); });
}

void product_bf16(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                  size_t stride) {
    several_bf16(w, block, 1, rows, index, count, y, stride);
}

}  // namespace

const Kernels& kernels_avx512_bf16() {
    static const Kernels kernels = [] {
        Kernels own = kernels_avx512();
        own.name = "avx512_bf16";
        each_format([&](auto format) {
            if (kTraits<decltype(format)::value>.storage == Storage::bf16) own.put(format, product_bf16, several_bf16);
        });
        own.attend[static_cast<int>(Type::bf16)] = attend<Bf16Dot, Bf16>;
        own.attend[static_cast<int>(Type::i8)] = attend<Bf16Dot, int8_t>;
        own.latents[static_cast<int>(Type::bf16)] = attend<Bf16Dot, Bf16, true>;
        own.latents[static_cast<int>(Type::i8)] = attend<Bf16Dot, int8_t, true>;
        own.expanded[static_cast<int>(Type::bf16)] = &Expanded<Bf16Dot, Bf16>::kSteps;
        own.expanded[static_cast<int>(Type::i8)] = &Expanded<Bf16Dot, int8_t>::kSteps;
        return own;
    }();
    return kernels;
}

}  // namespace umbra
