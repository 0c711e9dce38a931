// AVX-512 with VNNI. Weights of a 32-column block are unpacked once into eight vectors and meet up to eight activation
// rows, whose sums stay in registers: 8 unpacked + 8 sums + scale, mask and temporaries fit the 32 registers.
// Software prefetch runs 4 KB ahead, past the page the hardware prefetcher stops at; that of pairs of blocks, a pair ahead.

#include <immintrin.h>

#include "kernels/delta.h"
#include "kernels/passes.h"
#include "kernels/records.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))
#define INLINE TARGET inline __attribute__((always_inline))
#include "kernels/x86/unpack.h"

namespace umbra {
namespace {

struct Vector {
    using Floats = __m512;
    using Ints = __m512i;

    static INLINE Ints none() { return _mm512_setzero_si512(); }
    static INLINE Floats nothing() { return _mm512_setzero_ps(); }
    static INLINE Ints all(int32_t v) { return _mm512_set1_epi32(v); }
    static INLINE Floats all(float v) { return _mm512_set1_ps(v); }
    static INLINE Ints unsigned_bytes(const uint8_t* at) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static INLINE Ints bytes(const uint8_t* at) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    }
    static INLINE Floats halves(const uint8_t* at) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    static INLINE Floats e4m3(const uint8_t* at) {  // e4m3 floats, as 2^-8 of their values
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        const __m256i halves =
            _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
        return _mm512_cvtph_ps(halves);
    }
    static INLINE Floats floats(const uint8_t* at) { return _mm512_loadu_ps(reinterpret_cast<const float*>(at)); }
    static INLINE Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
    static INLINE Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }
    static INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static INLINE Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
    static INLINE Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
    static INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    static INLINE Ints larger(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
    template <int By>
    static INLINE Ints shift_left(Ints v) {
        return _mm512_slli_epi32(v, By);
    }
    template <int By>
    static INLINE Ints shift_right(Ints v) {
        return _mm512_srai_epi32(v, By);
    }
};

}  // namespace
}  // namespace umbra

#include "kernels/x86/scales.h"

namespace umbra {
namespace {

constexpr int kAhead = 4096;
constexpr int kMost = 8;        // activation rows of one pass
constexpr int kMostOfPair = 4;  // of one with two row blocks
// Two row blocks at once are faster than one after the other where passes are full, or activation rows many.
constexpr int kMostUnpaired = 12;

INLINE void prefetch(const uint8_t* at, int lines) {
    for (int i = 0; i < lines; i++) _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + 64 * i), _MM_HINT_T0);
}

template <Format F, bool Zeros, int M>
TARGET void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kBytes = kTraits<F>.block_bytes();
    const uint8_t* plane = w.quants + block * w.quant_stride();
    RowScales<F, Zeros, 0> scales(w, block);
    const int per_group = w.group / kBlock;
    __m512 sums[M];
    for (int t = 0; t < M; t++) sums[t] = _mm512_setzero_ps();
    int left = 0;
    const char* base[M];  // one register each; all advance by the same offset
    for (int t = 0; t < M; t++) base[t] = reinterpret_cast<const char*>(rows[t]);
    const size_t end = w.k / kBlock * sizeof(Block);
    for (size_t offset = 0; offset < end; offset += sizeof(Block), plane += kBytes) {
        prefetch(plane, kBytes / 64);
        if (left == 0) {
            left = per_group;
            scales.enter();
            _mm_prefetch(reinterpret_cast<const char*>(scales.at) + 2048, _MM_HINT_T0);
        }
        scales.next();
        left--;
        __m512i v[8];
        unpack<F>(plane, v);
#pragma GCC unroll 8
        for (int t = 0; t < M; t++) {
            const Block& x = *reinterpret_cast<const Block*>(base[t] + offset);
            // Two chains of additions, so that none waits for the one before.
            __m512i first, second;
            scales.start(x, first, second);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                first = _mm512_dpbusd_epi32(first, v[i], _mm512_set1_epi32(four(x, i)));
                second = _mm512_dpbusd_epi32(second, v[4 + i], _mm512_set1_epi32(four(x, 4 + i)));
            }
            if (!kTraits<F>.sixteens()) first = _mm512_add_epi32(first, second);
            sums[t] = scales.add(first, second, x, sums[t]);
        }
    }
    for (int t = 0; t < M; t++) _mm512_storeu_ps(y[t], scales.result(sums[t]));
}

// Two row blocks at once: an activation is loaded for both, and two loads a cycle no longer bound two products a cycle.
// Each step fetches `Lines` cache lines from `ahead` on, into L2: a pair does not fit L1, which also has too few misses in
// flight for memory's speed (see bf16.h).
template <Format F, bool Zeros, int M, int Lines>
TARGET void quantised_pair(const Matrix& w, int block, const Block* const* rows, float* const* y,
                           const uint8_t* ahead) {
    constexpr int kBytes = kTraits<F>.block_bytes();
    constexpr bool kHalves = kTraits<F>.sixteens();  // sums of 16 columns
    const uint8_t* plane[2] = {w.quants + block * w.quant_stride(), w.quants + (block + 1) * w.quant_stride()};
    RowScales<F, Zeros, 0> scales[2] = {{w, block}, {w, block + 1}};
    const int per_group = w.group / kBlock;
    __m512 sums[M][2];
    for (int t = 0; t < M; t++) sums[t][0] = sums[t][1] = _mm512_setzero_ps();
    int left = 0;
    const size_t end = w.k / kBlock * sizeof(Block);
    for (size_t offset = 0; offset < end; offset += sizeof(Block)) {
#pragma GCC unroll 24
        for (int i = 0; i < Lines; i++, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        __m512i v[2][8];
#pragma GCC unroll 2
        for (int b = 0; b < 2; b++) {
            if (left == 0) {
                scales[b].enter();
                _mm_prefetch(reinterpret_cast<const char*>(scales[b].at + 4 * w.scale_count()), _MM_HINT_T1);
            }
            scales[b].next();
            unpack<F>(plane[b], v[b]);
            plane[b] += kBytes;
        }
        left = (left == 0 ? per_group : left) - 1;
#pragma GCC unroll 4
        for (int t = 0; t < M; t++) {
            const Block& x = *reinterpret_cast<const Block*>(reinterpret_cast<const char*>(rows[t]) + offset);
            __m512i first[2], second[2];
#pragma GCC unroll 2
            for (int b = 0; b < 2; b++) scales[b].start(x, first[b], second[b]);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                __m512i four_of_x = _mm512_set1_epi32(four(x, i));
                asm("" : "+v"(four_of_x));  // one load, not an operand in memory of each
#pragma GCC unroll 2
                for (int b = 0; b < 2; b++) {
                    __m512i& dot = kHalves && i >= 4 ? second[b] : first[b];
                    dot = _mm512_dpbusd_epi32(dot, v[b][i], four_of_x);
                }
            }
#pragma GCC unroll 2
            for (int b = 0; b < 2; b++) sums[t][b] = scales[b].add(first[b], second[b], x, sums[t][b]);
        }
    }
    for (int t = 0; t < M; t++)
        for (int b = 0; b < 2; b++) _mm512_storeu_ps(y[t] + b * kRows, scales[b].result(sums[t][b]));
}

INLINE __m512 load16(const float* at) { return _mm512_loadu_ps(at); }
INLINE __m512 load16(const Bf16* at) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m512 load16(const F16* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

template <class T, int M>
TARGET void float_pass(const Matrix& w, int block, const float* const* x, float* const* y) {
    const T* plane = reinterpret_cast<const T*>(w.quants + block * w.quant_stride());
    __m512 even[M], odd[M];
    for (int t = 0; t < M; t++) even[t] = odd[t] = _mm512_setzero_ps();
    int c = 0;
    for (; c + 1 < w.k; c += 2, plane += 2 * kRows) {
        _mm_prefetch(reinterpret_cast<const char*>(plane) + kAhead, _MM_HINT_T0);
        const __m512 first = load16(plane), second = load16(plane + kRows);
#pragma GCC unroll 8
        for (int t = 0; t < M; t++) {
            even[t] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[t][c]), even[t]);
            odd[t] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[t][c + 1]), odd[t]);
        }
    }
    if (c < w.k)
        for (int t = 0; t < M; t++) even[t] = _mm512_fmadd_ps(load16(plane), _mm512_set1_ps(x[t][c]), even[t]);
    for (int t = 0; t < M; t++) _mm512_storeu_ps(y[t], _mm512_add_ps(even[t], odd[t]));
}

// The sixteen e4m3 floats of each of two columns, as floats of 2^-8 of their values.
INLINE void widen_f8(const uint8_t* at, __m512& first, __m512& second) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<short>(0xbf80)));
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

template <int M>
TARGET void f8_pass(const Matrix& w, int block, const float* const* x, float* const* y) {
    const uint8_t* plane = w.quants + block * w.quant_stride();
    const float* scales = w.float_scales(block);
    __m512 sums[M];
    for (int t = 0; t < M; t++) sums[t] = _mm512_setzero_ps();
    for (int c = 0; c < w.k; scales += kRows) {
        __m512 even[M], odd[M];
        for (int t = 0; t < M; t++) even[t] = odd[t] = _mm512_setzero_ps();
        for (const int end = c + w.group; c < end; c += 2, plane += 2 * kRows) {
            _mm_prefetch(reinterpret_cast<const char*>(plane) + kAhead, _MM_HINT_T0);
            __m512 first, second;
            widen_f8(plane, first, second);
#pragma GCC unroll 8
            for (int t = 0; t < M; t++) {
                even[t] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[t][c]), even[t]);
                odd[t] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[t][c + 1]), odd[t]);
            }
        }
        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(kF8Unit));
        for (int t = 0; t < M; t++) sums[t] = _mm512_fmadd_ps(_mm512_add_ps(even[t], odd[t]), scale, sums[t]);
    }
    for (int t = 0; t < M; t++) _mm512_storeu_ps(y[t], sums[t]);
}

void product_f8(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                size_t stride) {
    for_passes<kMost>(
        index, count, y, stride, [&](size_t row) { return rows.x + row * w.k; },
        [&](auto m, const float* const* x, float* const* out) { f8_pass<m()>(w, block, x, out); });
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<F, kMost>(w, rows, index, count, y, stride,
                                   [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                       quantised_pass<F, zeros(), m()>(w, block, operands, out);
                                   });
}

// The passes over the activation rows share the lines of the next pair, so that memory is read all the time and not only in
// the first pass; those beyond a fourth reach into the pairs behind it.
template <Format F>
void several_quantised(const Matrix& w, int block, int blocks, const Rows& rows, const int32_t* index, int count,
                       float* y, size_t stride) {
    int b = 0;
    const auto pairs = [&](auto lines) {
        for (; b + 1 < blocks; b += 2) {
            const uint8_t* ahead = w.quants + (block + b + 2) * w.quant_stride();
            for_quantised_passes<F, kMostOfPair>(
                w, rows, index, count, y + b * kRows, stride,
                [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                    quantised_pair<F, zeros(), m(), lines()>(w, block + b, operands, out, ahead);
                    ahead += w.k / kBlock * lines() * 64;
                });
        }
    };
    constexpr int kLines = kTraits<F>.block_bytes() / 32;  // of a pair, for 32 columns
    if (count == kMostOfPair && kTraits<F>.block_bytes() == 512)
        ;  // reading bounds these: a quarter slower in pairs
    else if (count == kMostOfPair)
        pairs(std::integral_constant<int, kLines>{});
    else if (count == 2 * kMostOfPair)
        pairs(std::integral_constant<int, kLines / 2>{});
    else if (count % kMostOfPair == 0 || count > kMostUnpaired)
        pairs(std::integral_constant<int, kLines / 4>{});
    for (; b < blocks; b++) product_quantised<F>(w, block + b, rows, index, count, y + b * kRows, stride);
}

template <class T>
void product_float(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                   size_t stride) {
    for_passes<kMost>(
        index, count, y, stride, [&](size_t row) { return rows.x + row * w.k; },
        [&](auto m, const float* const* x, float* const* out) { float_pass<T, m()>(w, block, x, out); });
}

TARGET void quantise(const float* x, int count, Block* to) {
    for (Block* block = to; block < to + count; block++, x += kBlock) {
        const __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
        const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
        const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse));
        const __m512i c = _mm512_cvtps_epi32(_mm512_mul_ps(second, inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(block->q), _mm512_cvtepi32_epi8(a));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(block->q + 16), _mm512_cvtepi32_epi8(c));
        block->scale = most / 127.0f;
        // Of NaN and infinite activations the sum may be any number.
        const uint32_t first_sum = _mm512_reduce_add_epi32(a), second_sum = _mm512_reduce_add_epi32(c);
        block->first = static_cast<int32_t>(-8u * first_sum);
        block->start = static_cast<int32_t>(-8u * (first_sum + second_sum));
    }
}

TARGET void delta(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    run_slab<Lanes>(op, sequence, head, column);
}

}  // namespace

const Kernels& kernels_avx512() {
    static const Kernels kernels = [] {
        Kernels own{"avx512_vnni", quantise};
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.records())
                own.put(F, product_of_records<product_quantised<kExpanded>>);
            else if constexpr (kTraits<F>.expanded())
                own.put(F, product_quantised<F>);
            else if constexpr (kTraits<F>.quantised())
                own.put(F, product_quantised<F>, several_quantised<F>);
            else if constexpr (kTraits<F>.storage == Storage::e4m3)
                own.put(F, product_f8);
            else
                own.put(F, product_float<Stored<F>>);
        });
        own.delta = delta;
        own.slots = &slots_avx512;
        return own;
    }();
    return kernels;
}

}  // namespace umbra
