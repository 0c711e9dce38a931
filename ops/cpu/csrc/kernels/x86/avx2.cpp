// AVX2 with FMA and F16C. Products of quantised weights are in dot.h.

#define TARGET __attribute__((target("avx2,f16c,fma")))
#define VNNI false
#include "kernels/delta.h"
#include "kernels/x86/dot.h"

namespace umbra {
namespace {

INLINE __m256 load8(const float* at) { return _mm256_loadu_ps(at); }
INLINE __m256 load8(const Bf16* at) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE __m256 load8(const F16* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

template <class T>
TARGET void product_float(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                          size_t stride) {
    const T* start = reinterpret_cast<const T*>(w.quants + block * w.quant_stride());
    for (int t = 0; t < count; t++) {
        const float* x = rows.x + static_cast<size_t>(index ? index[t] : t) * w.k;
        const T* plane = start;
        __m256 low = _mm256_setzero_ps(), high = low;
        for (int c = 0; c < w.k; c++, plane += kRows) {
            const __m256 v = _mm256_set1_ps(x[c]);
            low = _mm256_fmadd_ps(load8(plane), v, low);
            high = _mm256_fmadd_ps(load8(plane + 8), v, high);
        }
        _mm256_storeu_ps(y + t * stride, low);
        _mm256_storeu_ps(y + t * stride + 8, high);
    }
}

TARGET void product_f8(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xbf80));
    for (int t = 0; t < count; t++) {
        const float* x = rows.x + static_cast<size_t>(index ? index[t] : t) * w.k;
        const uint8_t* plane = w.quants + block * w.quant_stride();
        const float* scales = w.float_scales(block);
        __m256 low = _mm256_setzero_ps(), high = low;
        for (int c = 0; c < w.k; scales += kRows) {
            __m256 part_low = _mm256_setzero_ps(), part_high = part_low;
            for (const int end = c + w.group; c < end; c++, plane += kRows) {
                const __m256i wide = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(plane)));
                const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), mask);  // f8_to_float
                const __m256 v = _mm256_set1_ps(x[c]);
                part_low = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), v, part_low);
                part_high = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), v, part_high);
            }
            const __m256 unit = _mm256_set1_ps(kF8Unit);
            low = _mm256_fmadd_ps(part_low, _mm256_mul_ps(_mm256_loadu_ps(scales), unit), low);
            high = _mm256_fmadd_ps(part_high, _mm256_mul_ps(_mm256_loadu_ps(scales + 8), unit), high);
        }
        _mm256_storeu_ps(y + t * stride, low);
        _mm256_storeu_ps(y + t * stride + 8, high);
    }
}

TARGET void delta(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    run_slab<Eight>(op, sequence, head, column);
}

}  // namespace

const Kernels& kernels_avx2() {
    static const Kernels kernels = [] {
        Kernels own{"avx2", kernels_generic().quantise};
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.records())
                own.put(F, product_of_records<product_quantised<kExpanded>>);
            else if constexpr (kTraits<F>.quantised())
                own.put(F, product_quantised<F>);
            else if constexpr (kTraits<F>.storage == Storage::e4m3)
                own.put(F, product_f8);
            else
                own.put(F, product_float<Stored<F>>);
        });
        own.delta = delta;
        own.slots = &slots_avx2;
        return own;
    }();
    return kernels;
}

}  // namespace umbra
