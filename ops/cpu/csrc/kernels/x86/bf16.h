// Products of attention in bfloat16, shared by avx512_bf16.cpp and amx.cpp: over caches of bfloat16, and of int8, which
// is exact in bfloat16. Queries and weights are rounded to bfloat16; a dot instruction multiplies and adds two of them in
// each lane. Everything here is internal to the file that includes it.
#pragma once

#include <immintrin.h>

#include "kernels/attention.h"
#include "kernels/passes.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")))
#define INLINE TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kMost = 8;  // rows of one pass: 16 sums of 16 lanes

INLINE __m512bh as_bf16(__m512i v) { return reinterpret_cast<__m512bh>(v); }

INLINE __m512bh load_pairs(const Bf16* at) { return as_bf16(_mm512_loadu_si512(at)); }
INLINE __m512bh load_pairs(const int8_t* at) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + kLanes)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

template <int R, class S>
TARGET void pass(bool fresh, const Bf16* a, int64_t a_stride, const Run<S>* runs, int count, int64_t shift,
                 int64_t step, int64_t second, float* c, int64_t c_stride, const Ahead& ahead) {
    const uint8_t *first = ahead.first, *other = ahead.second;
    __m512 left[R], right[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        left[r] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * c_stride);
        right[r] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * c_stride + kLanes);
    }
    for (const Run<S>* run = runs; run < runs + count; run++) {
        const S* at = run->at + shift;
        for (int64_t s = 0; s < run->steps; s++, at += step, a += 2, first += ahead.stride, other += ahead.stride) {
            // Into L2: a Zen 4 core has 24 L1 misses in flight at most, 13 GB/s at its memory's latency of 110 ns.
            _mm_prefetch(first, _MM_HINT_T1);
            _mm_prefetch(other, _MM_HINT_T1);
            const __m512bh low = load_pairs(at), high = load_pairs(at + second);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t two;
                std::memcpy(&two, a + r * a_stride, sizeof two);
                const __m512bh pair = as_bf16(_mm512_set1_epi32(two));
                left[r] = _mm512_dpbf16_ps(left[r], pair, low);
                right[r] = _mm512_dpbf16_ps(right[r], pair, high);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(c + r * c_stride, left[r]);
        _mm512_storeu_ps(c + r * c_stride + kLanes, right[r]);
    }
}

// Lane 4r + k = the sum of lanes of v[4r + k].
INLINE __m512 lane_sums(const __m512 (&v)[16]) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_unpacklo_ps(b[i], b[i + 2]), _mm512_unpackhi_ps(b[i], b[i + 2]));
    const __m512 sums = _mm512_add_ps(_mm512_unpacklo_ps(c[0], c[1]), _mm512_unpackhi_ps(c[0], c[1]));
    return _mm512_shuffle_f32x4(sums, sums, 0xd8);  // fours 0, 8, 4, 12
}

// Scores (R, 4) of queries with the keys keys[0 .. 3]: lanes are neighbouring columns, and are added at the end.
template <int R>
TARGET void score_pass(const Bf16* q, int64_t deep, const Bf16* const* keys, const uint8_t* ahead, int64_t lines,
                       float* scores) {
    __m512 sums[16];
    const Bf16* const at[4] = {keys[0], keys[1], keys[2], keys[3]};
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
    const auto step = [&](int64_t d, __mmask32 some) __attribute__((always_inline)) TARGET {
        __m512bh of[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) of[k] = as_bf16(_mm512_maskz_loadu_epi16(some, at[k] + d));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512bh row = as_bf16(_mm512_maskz_loadu_epi16(some, q + r * deep + d));
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) sums[4 * r + k] = _mm512_dpbf16_ps(sums[4 * r + k], row, of[k]);
        }
    };
    int64_t d = 0;
    for (; d + 2 * kLanes <= deep; d += 2 * kLanes) {
        step(d, ~0u);
        _mm_prefetch(ahead + std::min(d / (2 * kLanes), lines) * 64, _MM_HINT_T1);
    }
    if (d < deep) step(d, (1u << (deep - d)) - 1);
    const __m512 all = lane_sums(sums);
    _mm_storeu_ps(scores, _mm512_castps512_ps128(all));
    if constexpr (R > 1) _mm_storeu_ps(scores + kKeys, _mm512_extractf32x4_ps(all, 1));
    if constexpr (R > 2) _mm_storeu_ps(scores + 2 * kKeys, _mm512_extractf32x4_ps(all, 2));
    if constexpr (R > 3) _mm_storeu_ps(scores + 3 * kKeys, _mm512_extractf32x4_ps(all, 3));
}

// Element i of a first vector, element i of a second one.
alignas(64) constexpr uint16_t kInPairs[2 * kLanes] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
constexpr int kMostAdded = 10;  // rows of one pass: 20 sums of 16 lanes

// sums (R, `columns`) += weights (R, kKeys) times the columns of latents from `column` on, two of these at a time.
template <int R>
TARGET void add_pass(const Bf16* weights, const LatentRows<Bf16>& of, int64_t column, int64_t columns, int64_t ahead,
                     float* sums, int64_t wide) {
    const __m512i low = _mm512_load_si512(kInPairs), high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
    const __mmask32 some = columns < kColumns ? (1u << columns) - 1 : ~0u;
    __m512 left[R], right[R];
#pragma GCC unroll 10
    for (int r = 0; r < R; r++) {
        left[r] = _mm512_loadu_ps(sums + r * wide);
        right[r] = _mm512_loadu_ps(sums + r * wide + kLanes);
    }
    for (int64_t key = 0; key < of.count; key += 2) {
        const __m512i first = _mm512_maskz_loadu_epi16(some, of.at[key] + column);
        const __m512i second = _mm512_maskz_loadu_epi16(some, of.at[key + 1] + column);
        _mm_prefetch(of.next[kKeys / 2 + key / 2] + ahead, _MM_HINT_T1);
        const __m512bh here = as_bf16(_mm512_permutex2var_epi16(first, low, second));
        const __m512bh there = as_bf16(_mm512_permutex2var_epi16(first, high, second));
#pragma GCC unroll 10
        for (int r = 0; r < R; r++) {
            int32_t two;
            std::memcpy(&two, weights + r * kKeys + key, sizeof two);
            const __m512bh pair = as_bf16(_mm512_set1_epi32(two));
            left[r] = _mm512_dpbf16_ps(left[r], pair, here);
            right[r] = _mm512_dpbf16_ps(right[r], pair, there);
        }
    }
#pragma GCC unroll 10
    for (int r = 0; r < R; r++) {
        _mm512_storeu_ps(sums + r * wide, left[r]);
        _mm512_storeu_ps(sums + r * wide + kLanes, right[r]);
    }
}

// e^x to 2^-15, 0 below -139: 2^n times a polynomial of the rest, |rest| <= 1/2.
INLINE __m512 exponential(__m512 x) {
    const __m512 t = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-200.0f));
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    for (const float next : {9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147182e-1f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(next));
    return _mm512_scalef_ps(p, n);
}

struct Bf16Dot {
    using Operand = Bf16;
    static constexpr int kDepth = 2, kKeysAtOnce = 2;
    template <class T>
    static constexpr bool takes() {
        return true;
    }

    TARGET static void operand(const float* x, float factor, int64_t count, Bf16* to) {
        for (int64_t i = 0; i < count; i += kLanes) {
            const __mmask16 some = _cvtu32_mask16((1u << std::min<int64_t>(kLanes, count - i)) - 1);
            const __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), _mm512_set1_ps(factor));
            _mm256_mask_storeu_epi16(to + i, some, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
        }
    }

    TARGET static void copy(const Bf16* from, int64_t pairs, int64_t columns, int64_t from_columns, Bf16* to,
                            int64_t to_columns) {
        for (int64_t i = 0; i < pairs; i++)
            std::memcpy(to + 2 * i * to_columns, from + 2 * i * from_columns, 2 * columns * sizeof(Bf16));
    }

    TARGET static void copy(const int8_t* from, int64_t pairs, int64_t columns, int64_t from_columns, Bf16* to,
                            int64_t to_columns) {
        for (int64_t i = 0; i < pairs; i++, from += 2 * from_columns, to += 2 * to_columns)
            for (int64_t j = 0; j < 2 * columns; j += kLanes) {
                const __mmask16 some = _cvtu32_mask16((1u << std::min<int64_t>(kLanes, 2 * columns - j)) - 1);
                const __m512i wide = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(some, from + j));
                const __m256i bits = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(wide)));
                _mm256_mask_storeu_epi16(to + j, some, bits);
            }
    }

    template <class T>
    static void widen(const T* from, int64_t count, Bf16* to) {
        copy(from, 1, count / 2, 0, to, 0);
    }
    TARGET static void values(const Bf16* from, int64_t pairs, int64_t columns, int64_t stride, Bf16* to,
                              int64_t to_columns) {
        const __m512i low = _mm512_load_si512(kInPairs), high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes));
        for (int64_t i = 0; i < pairs; i++, from += 2 * stride, to += 2 * to_columns)
            for (int64_t j = 0; j < columns; j += 2 * kLanes) {
                const __mmask32 some = columns - j < 2 * kLanes ? (1u << (columns - j)) - 1 : ~0u;
                const __m512i first = _mm512_maskz_loadu_epi16(some, from + j);
                const __m512i second = _mm512_maskz_loadu_epi16(some, from + stride + j);
                _mm512_mask_storeu_epi32(to + 2 * j, some & 0xffff, _mm512_permutex2var_epi16(first, low, second));
                if (some >> kLanes)
                    _mm512_mask_storeu_epi32(to + 2 * j + 2 * kLanes, some >> kLanes,
                                             _mm512_permutex2var_epi16(first, high, second));
            }
    }
    static constexpr bool kByRows = true;

    static void score(int64_t rows, const Bf16* q, int64_t deep, const LatentRows<Bf16>& of, float* scores) {
        const int64_t tasks = kKeys / 4 * ((rows + 3) / 4);  // each prefetches at most one row of the first half
        int64_t task = 0, ahead = -1;
        for (int64_t key = 0; key < kKeys; key += 4)
            for (int64_t r = 0; r < rows; r += 4, task++) {
                const int64_t next = task * (kKeys / 2) / tasks;
                const uint8_t* from = reinterpret_cast<const uint8_t*>(q);
                if (next != ahead) from = of.next[ahead = next];
                if (key >= of.count) continue;
                with_count<4>(static_cast<int>(std::min<int64_t>(4, rows - r)), [&](auto m) {
                    score_pass<m()>(q + r * deep, deep, of.at + key, from, of.lines, scores + r * kKeys + key);
                });
            }
    }

    static void add(int64_t rows, const Bf16* weights, const LatentRows<Bf16>& of, int64_t width, float* sums,
                    int64_t wide) {
        const int64_t passes = (rows + kMostAdded - 1) / kMostAdded, each = (rows + passes - 1) / passes;
        for (int64_t j = 0; j < width; j += kColumns)
            for (int64_t r = 0, line = j / kColumns; r < rows; r += each, line += width / kColumns)
                with_count<kMostAdded>(static_cast<int>(std::min(each, rows - r)), [&](auto m) {
                    add_pass<m()>(weights + r * kKeys, of, j, std::min<int64_t>(kColumns, width - j),
                                  line < of.lines ? line * 64 : 0, sums + r * wide + j, wide);
                });
    }

    template <class S>
    static void product(bool fresh, int64_t rows, const Bf16* a, int64_t a_stride, const Run<S>* runs, int count,
                        int64_t shift, int64_t step, int64_t second, float* c, int64_t c_stride, const Ahead& ahead) {
        for (int64_t r = 0; r < rows; r += kMost)
            with_count<kMost>(static_cast<int>(std::min<int64_t>(kMost, rows - r)), [&](auto m) {
                pass<m()>(fresh, a + r * a_stride, a_stride, runs, count, shift, step, second, c + r * c_stride,
                          c_stride, ahead);
            });
    }

    // The lanes of vector i that lie between two numbers of keys.
    static __mmask16 lanes(int64_t first, int64_t end, int i) {
        const auto below = [&](int64_t key) { return (1u << std::clamp<int64_t>(key - i * kLanes, 0, kLanes)) - 1; };
        return static_cast<__mmask16>(below(end) & ~below(first));
    }

    TARGET static void soften(const Softened<Bf16>& of) {
        constexpr int kVectors = kKeys / kLanes;
        const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        for (int64_t r = 0; r < of.rows; r++) {
            const int64_t skipped = of.skipped[r], seen = of.seen[r];
            Bf16* to = of.weights + r * kKeys;
            __m512 x[kVectors], largest = nothing, sum = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i++) {
                const __mmask16 some = lanes(skipped, seen, i);
                x[i] = _mm512_loadu_ps(of.scores + r * kKeys + i * kLanes);
                if (of.key_scales) x[i] = _mm512_mul_ps(x[i], _mm512_loadu_ps(of.key_scales + i * kLanes));
                x[i] = _mm512_mask_mov_ps(nothing, some, x[i]);
                largest = _mm512_max_ps(largest, x[i]);
            }
            const float most = _mm512_reduce_max_ps(largest);
            if (most > of.most[r] + kSlack) {
                const float factor = std::exp(of.most[r] - most);
                scale_to(of.sums + r * of.wide, factor, of.sums + r * of.wide, of.wide);
                of.total[r] *= factor;
                of.most[r] = most;
            }
            const __m512 bound = _mm512_set1_ps(seen ? of.most[r] : 0);  // nothing less nothing is no number
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; i++) {
                __m512 p = exponential(_mm512_sub_ps(x[i], bound));
                sum = _mm512_add_ps(sum, p);
                if (of.value_scales) {
                    const __mmask16 some = lanes(skipped, seen, i);
                    p = _mm512_maskz_mul_ps(some, p, _mm512_loadu_ps(of.value_scales + i * kLanes));
                }
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * kLanes),
                                    reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(p)));
            }
            of.total[r] += _mm512_reduce_add_ps(sum);
        }
    }
};

}  // namespace
}  // namespace umbra
