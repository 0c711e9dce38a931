// Products of experts in slots, with AVX2, FMA and F16C.
//
// maddubs adds two products in 16 bits, saturating: nibbles 0 .. 15 times |q| <= 127 are at most 3,810; of bytes, |w| <= 128
// times q with w's sign, at most 32,512.

#include <immintrin.h>

#include <cstdint>

#define TARGET __attribute__((target("avx2,f16c,fma")))
#define SHORT TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kBytes = 32, kPass = 1;  // rows at a time
constexpr bool kSigned = false, kSignedBytes = true;
constexpr float kNibbleUnit = 1;
typedef uint8_t Loaded __attribute__((vector_size(kBytes)));
typedef float Given __attribute__((vector_size(kBytes)));
typedef int32_t Sums __attribute__((vector_size(kBytes)));
typedef uint32_t Number __attribute__((vector_size(kBytes)));

SHORT void levels_of(const Loaded& t, Loaded& even, Loaded& odd) {
    const __m256i all = _mm256_xor_si256(reinterpret_cast<__m256i>(t), _mm256_set1_epi8(-120)),
                  low = _mm256_set1_epi8(15);
    even = reinterpret_cast<Loaded>(_mm256_and_si256(all, low));
    odd = reinterpret_cast<Loaded>(_mm256_and_si256(_mm256_srli_epi16(all, 4), low));
}
template <bool Whole>
SHORT void dot(Sums& to, const Loaded& levels, const Loaded& x) {
    __m256i w = reinterpret_cast<__m256i>(levels), q = reinterpret_cast<__m256i>(x),
            sum = reinterpret_cast<__m256i>(to);
    if (Whole) q = _mm256_sign_epi8(q, w), w = _mm256_abs_epi8(w);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, q), _mm256_set1_epi16(1)));
    to = reinterpret_cast<Sums>(sum);
}
template <class At>
SHORT void load_lanes(At&& at, Loaded& v) {
    const auto four = [&](int i) TARGET { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(i))); };
    v = reinterpret_cast<Loaded>(_mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1));
}
SHORT void from_halves(const Number& v, Given& to) {
    const __m256i words = reinterpret_cast<__m256i>(v);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    to = reinterpret_cast<Given>(_mm256_cvtph_ps(halves));
}

}  // namespace
}  // namespace umbra

#include "kernels/slot_products.h"

namespace umbra {
const SlotKernels slots_avx2{nibbles, levels, floats, planes};
}
