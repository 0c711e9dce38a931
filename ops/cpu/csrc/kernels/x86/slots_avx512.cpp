// Products of experts in slots, with AVX-512 and VNNI.

#include <immintrin.h>

#include <cstdint>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))
#define SHORT TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kBytes = 64, kPass = 2;  // rows at a time
constexpr bool kSigned = false, kSignedBytes = false;
constexpr float kNibbleUnit = 1;
typedef uint8_t Loaded __attribute__((vector_size(kBytes)));
typedef float Given __attribute__((vector_size(kBytes)));
typedef int32_t Sums __attribute__((vector_size(kBytes)));
typedef uint32_t Number __attribute__((vector_size(kBytes)));

SHORT void levels_of(const Loaded& t, Loaded& even, Loaded& odd) {
    const __m512i all = _mm512_xor_si512(reinterpret_cast<__m512i>(t), _mm512_set1_epi8(-120)),
                  low = _mm512_set1_epi8(15);
    even = reinterpret_cast<Loaded>(_mm512_and_si512(all, low));
    odd = reinterpret_cast<Loaded>(_mm512_and_si512(_mm512_srli_epi16(all, 4), low));
}
template <bool Whole>
SHORT void dot(Sums& to, const Loaded& levels, const Loaded& x) {
    to = reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(to), reinterpret_cast<__m512i>(levels),
                                                    reinterpret_cast<__m512i>(x)));
}
template <class At>
SHORT void load_lanes(At&& at, Loaded& v) {
    const auto four = [&](int i) TARGET { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at(i))); };
    __m512i all = _mm512_castsi128_si512(four(0));
    all = _mm512_inserti32x4(all, four(1), 1);
    all = _mm512_inserti32x4(all, four(2), 2);
    v = reinterpret_cast<Loaded>(_mm512_inserti32x4(all, four(3), 3));
}
SHORT void from_halves(const Number& v, Given& to) {
    to = reinterpret_cast<Given>(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v))));
}

}  // namespace
}  // namespace umbra

#include "kernels/slot_products.h"

namespace umbra {
const SlotKernels slots_avx512{nibbles, levels, floats, planes};
}
