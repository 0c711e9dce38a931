// Shared by both ARM sets: reading quantised weights row block by row block. A file includes this once, after defining
// TARGET. Everything here is internal to that file, so code compiled for one set is never linked into the other.
//
// Both sets store quantised weights as signed bytes (Order in matrix.h), which SDOT and SMMLA multiply as they are. A
// nibble goes to the upper half of its byte, so sums of q4 are 16 times too large, and SCVTF, which divides by a power
// of two at no cost, puts that right. Those of q8 it halves, and results are doubled: in LLVM's models of the Neoverse
// cores, SCVTF without a division takes a vector unit for twice as long.
//
// Sixteen sums of floats stay in registers. Sums are arrays whose every index is a compile-time constant (`repeat`):
// with loops GCC 12 keeps them in memory. An activation row gets the same float operations in the same order, however
// many share its pass and whichever set it is.
#pragma once

// GCC 12 would move loads and constants up until the sums no longer fit the registers.
#pragma GCC optimize("no-schedule-insns", "no-tree-pre")

#include <arm_neon.h>

#include <utility>

#include "kernels/passes.h"
#include "kernels/records.h"

#define INLINE TARGET inline __attribute__((always_inline))
#define LAMBDA TARGET __attribute__((always_inline))  // between a lambda's parameters and its body

namespace umbra {
namespace {

// Kunpeng 920's own prefetchers follow few streams: asking 1 KB ahead is the published remedy.
constexpr int kAhead = 1024;
constexpr int kMost = 4;               // activation rows of one pass
constexpr int kFour = 4;               // rows whose sums or scales are a vector
constexpr int kFours = kRows / kFour;  // such vectors in a row block

template <class F, int... I>
INLINE void repeat(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
// f(0) ... f(N - 1), with constants.
template <int N, class F>
INLINE void repeat(F&& f) {
    repeat(f, std::make_integer_sequence<int, N>{});
}

// A vector of zeros that the compiler neither copies, which is slow on Kunpeng 920, nor keeps in a register.
INLINE int32x4_t nothing() {
    int32x4_t zeros;
    asm volatile("movi %0.2d, #0" : "=w"(zeros));
    return zeros;
}

// The bytes of a format's codes, less the middle.
struct SignedCodes {
    int8_t of[16];
};
constexpr SignedCodes signed_codes(const FormatTraits& of) {
    SignedCodes codes{};
    for (int i = 0; i < 16; i++) codes.of[i] = static_cast<int8_t>(of.byte_of(i) - of.middle);
    return codes;
}
template <Format F>
constexpr SignedCodes kSignedCodes = signed_codes(kTraits<F>);

// One row block, read from its first column to its last.
template <Format F, bool Zeros>
struct Stream {
    static constexpr FormatTraits kOf = kTraits<F>;
    static constexpr int kBytes = kOf.block_bytes();      // of a block of 32 columns
    static constexpr bool kTwo = kOf.scale_bytes() == 2;  // factors
    static constexpr bool kByBlock = kOf.scale_bytes() > 0;
    static constexpr int kSums = kOf.sixteens() ? 2 : 1;  // of a block, with factors of their own
    static constexpr bool kSixteenths = kOf.plain_nibbles();
    // What weights, as they are multiplied, are less by than the bytes of formats.h. If it is not the middle, sums start
    // at what the difference adds; those of 16 columns always do.
    static constexpr int kLess = kOf.bytes() ? 128 : kSixteenths ? 8 : kOf.coded() ? kOf.middle : 0;
    static constexpr bool kMoved = !Zeros && !kOf.sixteens() && kOf.middle != kLess;

    const uint8_t* quants;
    const uint16_t* scales;
    const uint8_t* zeros;
    int per_group, left = 0;  // blocks
    const float* rows;        // of e4m3 scales
    const float16_t* halves;  // the scales of the group that is being read
    const uint8_t* bytes;     // those of the block, where it has some
    int32x4_t zero[kFours];   // the group's zero points, less the middle of the levels; set only with Zeros

    INLINE Stream(const Matrix& w, int block)
        : quants(w.quants + block * w.quant_stride()), scales(w.scales + block * w.scale_count()),
          zeros(Zeros ? w.zeros + block * w.scale_count() : nullptr), per_group(w.group / kBlock),
          rows(reinterpret_cast<const float*>(scales)) {
        if (kOf.f8_scales()) scales += 2 * kRows;
    }

    // Called before each block: prefetches what comes later and, where a group begins, reads its scales and zero
    // points.
    INLINE void enter() {
        for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(quants + kAhead + i);
        if (left-- > 0) {
            if (kByBlock) next();
            return;
        }
        left = per_group - 1;
        __builtin_prefetch(scales + kAhead / 4);
        halves = reinterpret_cast<const float16_t*>(scales);
        scales += kOf.nested()                      ? kOf.scale_halves() * kRows
                  : kByBlock                        ? 0
                  : kOf.scales == Scales::exponents ? kRows / 2
                  : kOf.scales == Scales::floats    ? 2 * kRows
                                                    : kRows;
        if (kByBlock) next();
        if constexpr (Zeros) {
            const uint8x16_t bytes = vld1q_u8(zeros);
            const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
            const int32x4_t middle = vdupq_n_s32(kLess);
            repeat<2>([&](auto i) LAMBDA {
                zero[2 * i] = vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words[i]))), middle);
                zero[2 * i + 1] = vsubq_s32(vreinterpretq_s32_u32(vmovl_high_u16(words[i])), middle);
            });
            zeros += kRows;
        }
    }

    INLINE void next() {
        bytes = reinterpret_cast<const uint8_t*>(scales);
        scales += kOf.scale_bytes() * kRows * (kOf.expanded() ? 4 : 1) / 2;
    }

    // Scales of row group `four`: number `Which` of the block times its own.
    template <int Which>
    INLINE float32x4_t factor(int four) const {
        if constexpr (kOf.expanded())
            return vld1q_f32(reinterpret_cast<const float*>(bytes) + Which * kRows + kFour * four);
        uint32_t word;
        __builtin_memcpy(&word, bytes + Which * kRows + kFour * four, 4);
        const uint8x8_t of_rows = vcreate_u8(word);
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(of_rows));
        if constexpr (kOf.f8_scales()) {  // f8_to_float, less its unit
            const uint16x8_t moved = vreinterpretq_u16_s16(vshlq_n_s16(wide, 7));
            const float16x8_t scales = vreinterpretq_f16_u16(vandq_u16(moved, vdupq_n_u16(0xbf80)));
            return vmulq_f32(vld1q_f32(rows + kFour * four), vcvt_f32_f16(vget_low_f16(scales)));
        }
        const float32x4_t scale = kOf.minimums() ? vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(of_rows))))
                                                 : vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
        const float32x4_t own = vcvt_f32_f16(vld1_f16(halves + (kOf.minimums() ? Which * kRows : 0) + kFour * four));
        // A minimum meets half of Block::start, which is -8 * total, and mostly sums that are halves.
        if (kOf.minimums() && Which) return vmulq_f32(vmulq_n_f32(own, kSixteenths ? 0.25f : 0.125f), scale);
        return vmulq_f32(own, scale);
    }

    // Of row group `four`, read anew at each use: registers are scarcer than loads.
    INLINE float32x4_t scale(int four) const {
        if constexpr (kByBlock) return factor<0>(four);
        if constexpr (kOf.scales == Scales::exponents) {  // e8m0_to_float
            uint32_t word;
            __builtin_memcpy(&word, reinterpret_cast<const uint8_t*>(halves) + kFour * four, 4);
            const uint8x8_t e = vcreate_u8(word);
            const uint32x4_t bits = vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(e))), 23);
            return vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(1 << 22)));
        }
        if constexpr (kOf.scales == Scales::floats)
            return vld1q_f32(reinterpret_cast<const float*>(halves) + kFour * four);
        return vcvt_f32_f16(vld1_f16(halves + kFour * four));
    }

    // The 16 bytes that are `within` bytes into columns Width * I .. Width * I + Width - 1 of the block, Width being 4 or 8
    // by the order: bytes less the middle; plain nibbles less 8, in units of 1/16; of nibbles with higher bits, quants.
    template <int I, int Width>
    INLINE int8x16_t weights(int within) const {
        constexpr int kWords = (kOf.nibbles() ? kBlock / 2 : kBlock) / Width;  // the others are the upper nibbles
        constexpr bool Upper = I / kWords;
        const uint8_t* at = quants + Width * kRows * (I % kWords) + within;
        const int8x16_t raw = vld1q_s8(reinterpret_cast<const int8_t*>(at));
        if constexpr (kOf.bytes()) return raw;
        if constexpr (kOf.nibbles() && !kSixteenths) {
            const uint8x16_t pairs = vreinterpretq_u8_s8(raw);
            const uint8x16_t codes = Upper ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(15));
            if constexpr (kOf.high_bits() > 0) return vreinterpretq_s8_u8(with_high<I, Width>(codes, within));
            return vqtbl1q_s8(vld1q_s8(kSignedCodes<F>.of), codes);
        }
        // Kunpeng 920 is modelled to need both its vector units for an AND, and one for a shift that inserts zeros.
        return Upper ? vsriq_n_s8(raw, vdupq_n_s8(0), 4) : vshlq_n_s8(raw, 4);
    }

    // `codes` with bits 4 and up, which lie four columns to a byte (matrix.h).
    template <int I, int Width>
    INLINE uint8x16_t with_high(uint8x16_t codes, int within) const {
        constexpr int kBits = kOf.high_bits(), kAt = I * Width / 4 * kBits;
        const uint8_t* from = quants + 256 + 64 * (kAt / 8) + within * 4 / Width;
        uint8x16_t high;
        if constexpr (Width == 4) {
            constexpr int kShift = kAt % 8 - 4;
            high = vld1q_u8(from);
            if constexpr (kShift > 0) high = vshrq_n_u8(high, kShift);
            if constexpr (kShift < 0) high = vshlq_n_u8(high, -kShift);
        } else {
            constexpr int8_t kShift = 4 - kAt % 8, kNext = kShift - kBits;
            const uint32x4_t two = vreinterpretq_u32_u8(vcombine_u8(vld1_u8(from), vcreate_u8(0)));
            const int8x16_t shifts = {kShift, kShift, kShift, kShift, kNext, kNext, kNext, kNext,
                                      kShift, kShift, kShift, kShift, kNext, kNext, kNext, kNext};
            high = vshlq_u8(vreinterpretq_u8_u32(vzip1q_u32(two, two)), shifts);
        }
        return vbslq_u8(vdupq_n_u8(kBits == 1 ? 16 : 48), high, codes);
    }

    // Of Block::start, which is -8 * total: what the middle that is left takes off, or -total, which a zero point
    // multiplies, in the units of the sums.
    template <class T>
    static INLINE T totals(T start) {
        constexpr int kTimes = (kSixteenths ? 16 : 1) * (kMoved || kOf.sixteens() ? kOf.middle - kLess : 1);
        return kTimes % 8 ? start * kTimes >> 3 : start * (kTimes / 8);
    }

    // Sums of integers as floats, and the last thing that is done to the sums of those.
    static INLINE float32x4_t to_float(int32x4_t dots) { return vcvtq_n_f32_s32(dots, kSixteenths ? 4 : 1); }
    static INLINE float32x4_t result(float32x4_t sum) {
        constexpr float kUnit = (kSixteenths ? 1 : 2) * kOf.unit * (kOf.f8_scales() ? kF8Unit : 1);
        return kUnit == 1 ? sum : kUnit == 2 ? vaddq_f32(sum, sum) : vmulq_n_f32(sum, kUnit);
    }
};

// Lane t: the start of activation row t in its block, or that of its first 16 columns.
template <int M>
INLINE int32x4_t starts_of(const Block* const* row, const int32_t Block::* which = &Block::start) {
    int32x4_t starts{row[0]->*which};
    repeat<M - 1>([&](auto t) LAMBDA { starts = vld1q_lane_s32(&(row[t + 1]->*which), starts, t + 1); });
    return starts;
}

}  // namespace
}  // namespace umbra
