// Shared by both ARM sets: reading the x16 layout by groups of four rows, and products with SDOT. A file includes this
// once, after defining TARGET, and MIXED: whether the set multiplies unsigned weights by signed activations. Everything
// here is internal to that file, so code compiled for one set is never linked into the other.
//
// Each 64-byte vector of the layout is four 16-byte ones, of 4 rows x 4 columns, which is what SDOT by lane takes: a
// 32-bit lane of the sum is a row, and the lane of the activations names the four columns. A block of 32 columns gives
// each group of four rows eight such vectors; each meets up to four activation rows. 16 float sums, 4 integer sums, 4
// activations, 4 stored vectors, a weight and temporaries just about fit the 32 registers, so scales are read where they
// are needed. Row groups and activation rows are independent chains of additions, and take turns. An activation row gets
// the same float operations in the same order, however many share its pass.
//
// Sums are arrays whose every index is a compile-time constant (`repeat`): with loops GCC 12 keeps them in memory.
//
// Nibbles 0 .. 15 are signed bytes as they are, and bytes of q8 are unsigned, with a zero point of 128: with the top bit
// flipped, the signed byte has it taken off.
#pragma once

// GCC 12 would move loads and constants up until the sums no longer fit the registers.
#pragma GCC optimize("no-schedule-insns", "no-tree-pre")

#include <arm_neon.h>

#include <utility>

#include "kernels/passes.h"

#define INLINE TARGET inline __attribute__((always_inline))
#define LAMBDA TARGET __attribute__((always_inline))  // between a lambda's parameters and its body

namespace umbra {
namespace {

// Kunpeng 920's own prefetchers follow few streams: asking 1 KB ahead is the published remedy.
constexpr int kAhead = 1024;
constexpr int kMost = 4;               // activation rows of one pass
constexpr int kFour = 4;               // rows of a 16-byte vector
constexpr int kFours = kRows / kFour;  // such vectors in a row block

template <Format F>
constexpr int kVectors = F == Format::q4 ? 4 : 8;  // of 64 bytes in a block

template <class F, int... I>
INLINE void repeat(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
// f(0) ... f(N - 1), with constants.
template <int N, class F>
INLINE void repeat(F&& f) {
    repeat(f, std::make_integer_sequence<int, N>{});
}

// One row block, read from its first column to its last.
template <Format F, bool Zeros>
struct Stream {
    const uint8_t* quants;
    const uint16_t* scales;
    const uint8_t* zeros;
    int per_group, left = 0;  // blocks
    const float16_t* halves;  // the scales of the group that is being read
    int32x4_t zero[kFours];   // beside what unpack() takes off; set only with Zeros

    INLINE Stream(const Matrix& w, int block)
        : quants(w.quants + block * w.quant_stride()), scales(w.scales + block * w.scale_count()),
          zeros(Zeros ? w.zeros + block * w.scale_count() : nullptr), per_group(w.group / kBlock) {}

    // Called before each block: prefetches what comes later and, where a group begins, reads its scales and zero
    // points.
    INLINE void enter() {
        for (int i = 0; i < kVectors<F>; i++) __builtin_prefetch(quants + kAhead + 64 * i);
        if (left-- > 0) return;
        left = per_group - 1;
        __builtin_prefetch(scales + kAhead / 4);
        halves = reinterpret_cast<const float16_t*>(scales);
        scales += kRows;
        if constexpr (Zeros) {
            const uint8x16_t bytes = vld1q_u8(zeros);
            const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
            const int32x4_t taken = vdupq_n_s32(F == Format::q8 && !MIXED ? 128 : 0);
            repeat<2>([&](auto i) LAMBDA {
                zero[2 * i] = vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words[i]))), taken);
                zero[2 * i + 1] = vsubq_s32(vreinterpretq_s32_u32(vmovl_high_u16(words[i])), taken);
            });
            zeros += kRows;
        }
    }

    // Of row group `four`, read anew at each use: registers are scarcer than loads.
    INLINE float32x4_t scale(int four) const { return vcvt_f32_f16(vld1_f16(halves + kFour * four)); }

    // Stored vector i of row group `four`.
    INLINE uint8x16_t load(int i, int four) const { return vld1q_u8(quants + 64 * i + 16 * four); }

    // Columns 4i .. 4i+3 of four rows, of the stored vector i % kVectors.
    static INLINE uint8x16_t unpack(int i, uint8x16_t raw) {
        if constexpr (F == Format::q4) return i < 4 ? vandq_u8(raw, vdupq_n_u8(15)) : vshrq_n_u8(raw, 4);
        return MIXED ? raw : veorq_u8(raw, vdupq_n_u8(128));
    }

    // What an integer sum starts from where all zero points are equal, of Block::start, which is -8 * total.
    template <class T>
    static INLINE T start(T start) {
        return F == Format::q4 ? start : MIXED ? start * 16 : start * 0;
    }
};

// Lane t: the start of activation row t in its block.
template <int M>
INLINE int32x4_t starts_of(const Block* const* row) {
    int32x4_t starts{row[0]->start};
    repeat<M - 1>([&](auto t) LAMBDA { starts = vld1q_lane_s32(&row[t + 1]->start, starts, t + 1); });
    return starts;
}

// sum + four rows of weights times lane I of an activation row.
template <int I>
INLINE int32x4_t dot(int32x4_t sum, uint8x16_t weights, int8x16_t activations) {
    if constexpr (MIXED)
        return vusdotq_laneq_s32(sum, weights, activations, I);
    else
        return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(weights), activations, I);
}

template <Format F, bool Zeros, int M>
TARGET void dot_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kGroups = M == 1 ? kFours : 1;               // of four rows at a time
    constexpr int kShare = M == 4 && F == Format::q8 ? 2 : M;  // activation rows at a time
    constexpr int kParts = M / kShare;
    constexpr int kChains = kGroups * kShare;  // independent sums: each addition waits for the one before
    Stream<F, Zeros> stream(w, block);
    float32x4_t sums[M * kFours];
    repeat<M * kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const Block* row[M];
    repeat<M>([&](auto t) LAMBDA { row[t] = rows[t]; });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, stream.quants += 64 * kVectors<F>) {
        stream.enter();
        const int32x4_t totals = vshrq_n_s32(starts_of<M>(row), 3);  // negative; used only with Zeros
        repeat<kFours * kParts / kGroups>([&](auto step) LAMBDA {
            constexpr int first = step / kParts * kGroups, from = step % kParts * kShare;
            int32x4_t dots[kChains];
            repeat<kChains>([&](auto j) LAMBDA {
                const Block*& at = row[from + j / kGroups];
                // Sixteen sums leave no room for the activations of all rows: make the compiler load them again.
                if constexpr (M > 2) asm("" : "+r"(at));
                dots[j] = vdupq_n_s32(Zeros ? 0 : stream.start(at->start));
            });
            repeat<2>([&](auto half) LAMBDA {
                int8x16_t activations[kShare];
                repeat<kShare>([&](auto t) LAMBDA { activations[t] = vld1q_s8(row[from + t]->q + 16 * half); });
                repeat<4>([&](auto i) LAMBDA {
                    constexpr int column = 4 * half + i;
                    uint8x16_t weights[kGroups];
                    repeat<kGroups>([&](auto c) LAMBDA {
                        weights[c] = stream.unpack(column, stream.load(column % kVectors<F>, first + c));
                    });
                    repeat<kChains>([&](auto j) LAMBDA {
                        dots[j] = dot<i>(dots[j], weights[j % kGroups], activations[j / kGroups]);
                    });
                });
            });
            repeat<kChains>([&](auto j) LAMBDA {
                constexpr int four = first + j % kGroups, t = from + j / kGroups;
                if constexpr (Zeros) dots[j] = vmlaq_laneq_s32(dots[j], stream.zero[four], totals, t);
                float32x4_t& to = sums[t * kFours + four];
                to = vfmaq_f32(to, vmulq_n_f32(stream.scale(four), row[t]->scale), vcvtq_f32_s32(dots[j]));
            });
        });
        repeat<M>([&](auto t) LAMBDA { row[t]++; });
    }
    repeat<M * kFours>([&](auto i) LAMBDA { vst1q_f32(y[i / kFours] + i % kFours * kFour, sums[i]); });
}

}  // namespace
}  // namespace umbra
