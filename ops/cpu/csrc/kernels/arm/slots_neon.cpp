// Products of experts in slots, with NEON and SDOT. Nibbles are multiplied in the upper halves of their bytes.

#include <arm_neon.h>

#include <cstdint>

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define SHORT TARGET inline __attribute__((always_inline))

namespace umbra {
namespace {

constexpr int kBytes = 16, kPass = 2;  // rows at a time
constexpr bool kSigned = true, kSignedBytes = true;
constexpr float kNibbleUnit = 1.0f / 16;
typedef uint8_t Loaded __attribute__((vector_size(kBytes)));
typedef float Given __attribute__((vector_size(kBytes)));
typedef int32_t Sums __attribute__((vector_size(kBytes)));
typedef uint32_t Number __attribute__((vector_size(kBytes)));

SHORT void levels_of(const Loaded& t, Loaded& even, Loaded& odd) {
    even = t << 4;
    odd = t & static_cast<uint8_t>(0xf0);
}
template <bool Whole>
SHORT void dot(Sums& to, const Loaded& levels, const Loaded& x) {
    to = reinterpret_cast<Sums>(vdotq_s32(reinterpret_cast<int32x4_t>(to), reinterpret_cast<int8x16_t>(levels),
                                          reinterpret_cast<int8x16_t>(x)));
}
template <class At>
SHORT void load_lanes(At&& at, Loaded& v) {
    v = reinterpret_cast<Loaded>(vld1q_u8(at(0)));
}
SHORT void from_halves(const Number& v, Given& to) {
    to = reinterpret_cast<Given>(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(reinterpret_cast<uint32x4_t>(v)))));
}

}  // namespace
}  // namespace umbra

#include "kernels/slot_products.h"

namespace umbra {
const SlotKernels slots_neon{nibbles, levels, floats, planes};
}
