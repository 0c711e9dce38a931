// AVX2: the sixteen rows of a block are two halves of eight, taken one after the other through the same 64-byte
// vectors. maddubs multiplies unsigned by signed bytes and adds neighbours into 16 bits, saturating, so:
//   q4: quants 0 .. 15 times |q| <= 127, two products: at most 3,810; eight such sums fit 16 bits (30,480).
//   q8: bytes minus 128 are signed; |w| <= 128 times q with w's sign, two products: at most 32,512, fits once.

#include <immintrin.h>

#include "kernels/passes.h"

#define TARGET __attribute__((target("avx2,f16c,fma")))
#define INLINE TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kAhead = 4096;
constexpr int kMost = 4;  // activation rows of one pass

INLINE __m256i broadcast(int32_t v) { return _mm256_set1_epi32(v); }

// Sum over a block of quant * q for eight rows; `half` is 0 or 32 bytes into each vector.
template <Format F>
INLINE __m256i block_dot(const uint8_t* plane, int half, const Block& x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (F == Format::q4) {
        const __m256i low = _mm256_set1_epi8(15);
        __m256i pairs = _mm256_setzero_si256();
        for (int i = 0; i < 4; i++) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + 64 * i + half));
            const __m256i first = _mm256_and_si256(bytes, low);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(first, broadcast(four(x, i))));
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(second, broadcast(four(x, 4 + i))));
        }
        return _mm256_madd_epi16(pairs, ones);
    }
    const __m256i flip = _mm256_set1_epi8(-128);
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + 64 * i + half));
        const __m256i w = _mm256_xor_si256(bytes, flip);  // value, as a signed byte
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(broadcast(four(x, i)), w));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return sum;
}

template <Format F, int M>
TARGET void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kBytes = F == Format::q4 ? 256 : 512;
    // The q8 dot above already has the zero point 128 taken off.
    constexpr int kZero = F == Format::q4 ? 8 : 0;
    const int blocks = w.k / kBlock;
    for (int half = 0; half < 2; half++) {
        const uint8_t* plane = w.quants + block * w.quant_stride();
        __m256 sums[M];
        for (int t = 0; t < M; t++) sums[t] = _mm256_setzero_ps();
        for (int b = 0; b < blocks; b++, plane += kBytes) {
            if (half == 0)
                for (int i = 0; i < kBytes; i += 64)
                    _mm_prefetch(reinterpret_cast<const char*>(plane + kAhead + i), _MM_HINT_T0);
            const size_t group = block * w.scale_count() + static_cast<size_t>(b * kBlock / w.group) * kRows + half * 8;
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.scales + group)));
            __m256i zero = _mm256_set1_epi32(kZero);
            if (w.zeros) {
                zero = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w.zeros + group)));
                if (F == Format::q8) zero = _mm256_sub_epi32(zero, _mm256_set1_epi32(128));
            }
            for (int t = 0; t < M; t++) {
                const __m256i offset = _mm256_mullo_epi32(zero, _mm256_set1_epi32(rows[t][b].sum()));
                const __m256i dot = _mm256_sub_epi32(block_dot<F>(plane, half * 32, rows[t][b]), offset);
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(rows[t][b].scale));
                sums[t] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(dot), sums[t]);
            }
        }
        for (int t = 0; t < M; t++) _mm256_storeu_ps(y[t] + half * 8, sums[t]);
    }
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<kMost>(w, rows, index, count, y, stride,
                                [&](auto, auto m, const Block* const* operands, float* const* out) {
                                    quantised_pass<F, m()>(w, block, operands, out);
                                });
}

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
        const float* scales = w.f8_scales(block);
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

}  // namespace

const Kernels& kernels_avx2() {
    static const Kernels kernels{"avx2",
                                 {product_float<float>, product_float<Bf16>, product_float<F16>,
                                  product_quantised<Format::q8>, product_quantised<Format::q4>, product_f8},
                                 kernels_generic().quantise};
    return kernels;
}

}  // namespace umbra
