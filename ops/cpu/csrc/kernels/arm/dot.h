// Shared by both ARM sets: reading the x16 layout by groups of four rows, and products with SDOT. A file includes this
// once, after defining TARGET; everything here is internal to that file, so code compiled for one set is never linked
// into the other.
//
// Each 64-byte vector of the layout is four 16-byte ones, of 4 rows x 4 columns, which is what SDOT by lane takes: a
// 32-bit lane of the sum is a row, and the lane of the activations names the four columns. A block of 32 columns gives
// each group of four rows eight such vectors; they are unpacked once and meet up to four activation rows: 16 float
// sums + 8 weights + 2 activations + integer sums and temporaries just about fit the 32 registers. (At four rows GCC 12
// keeps two of the sums on the stack, seven or eight with zero points: a load and a store of each in 300 instructions.
// Keeping the scales there instead costs more.) Row groups and activation rows are independent chains of additions. An
// activation row gets the same float operations in the same order, however many share its pass.
//
// Sums are arrays whose every index is a compile-time constant (`repeat`): with loops GCC 12 keeps them in memory.
//
// Nibbles 0 .. 15 are signed bytes as they are; bytes of q8 with the top bit flipped are the value with its zero point
// of 128 taken off.
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
    int per_group, left = 0;    // blocks
    float32x4_t scale[kFours];  // of the group that is being read
    int32x4_t zero[kFours];     // beside what unpack() takes off; set only with Zeros

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
        const float16_t* halves = reinterpret_cast<const float16_t*>(scales);
        repeat<kFours>([&](auto four) LAMBDA { scale[four] = vcvt_f32_f16(vld1_f16(halves + kFour * four)); });
        scales += kRows;
        if constexpr (Zeros) {
            const uint8x16_t bytes = vld1q_u8(zeros);
            const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
            const int32x4_t taken = vdupq_n_s32(F == Format::q8 ? 128 : 0);
            repeat<2>([&](auto i) LAMBDA {
                zero[2 * i] = vsubq_s32(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words[i]))), taken);
                zero[2 * i + 1] = vsubq_s32(vreinterpretq_s32_u32(vmovl_high_u16(words[i])), taken);
            });
            zeros += kRows;
        }
    }

    // The vectors of row groups four .. four + Count - 1 of this block, as they are stored.
    template <int Count>
    INLINE void load(int four, uint8x16_t (*raw)[8]) const {
        repeat<kVectors<F> * Count>([&](auto i) LAMBDA {
            raw[i % Count][i / Count] = vld1q_u8(quants + 64 * (i / Count) + 16 * (four + i % Count));
        });
    }

    // v[i] = columns 4i .. 4i+3 of four rows, where raw[i] are the stored vectors.
    static INLINE void unpack(const uint8x16_t* raw, int8x16_t* v) {
        repeat<kVectors<F>>([&](auto i) LAMBDA {
            if constexpr (F == Format::q4) {
                v[i] = vreinterpretq_s8_u8(vandq_u8(raw[i], vdupq_n_u8(15)));
                v[4 + i] = vreinterpretq_s8_u8(vshrq_n_u8(raw[i], 4));
            } else {
                v[i] = vreinterpretq_s8_u8(veorq_u8(raw[i], vdupq_n_u8(128)));
            }
        });
    }
};

// Lane t: the scale and the start of activation row t in its block.
template <int M>
INLINE void lanes_of(const Block* const* row, float32x4_t& scales, int32x4_t& starts) {
    scales = float32x4_t{row[0]->scale};
    starts = int32x4_t{row[0]->start};
    repeat<M - 1>([&](auto t) LAMBDA {
        scales = vld1q_lane_f32(&row[t + 1]->scale, scales, t + 1);
        starts = vld1q_lane_s32(&row[t + 1]->start, starts, t + 1);
    });
}

// sums[c] += four rows, v[c], times one activation row; the chains in turn, as each addition waits for the one before.
template <int Chains>
INLINE void dot(int32x4_t* sums, const int8x16_t (*v)[8], int8x16_t low, int8x16_t high) {
    repeat<4 * Chains>([&](auto i) LAMBDA {
        sums[i % Chains] = vdotq_laneq_s32(sums[i % Chains], v[i % Chains][i / Chains], low, i / Chains);
    });
    repeat<4 * Chains>([&](auto i) LAMBDA {
        sums[i % Chains] = vdotq_laneq_s32(sums[i % Chains], v[i % Chains][4 + i / Chains], high, i / Chains);
    });
}

template <Format F, bool Zeros, int M>
TARGET void dot_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kChains = M == 1 ? 2 : 1;  // row groups at a time; several activation rows are chains of their own
    Stream<F, Zeros> stream(w, block);
    float32x4_t sums[M * kFours];
    repeat<M * kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const Block* row[M];
    repeat<M>([&](auto t) LAMBDA { row[t] = rows[t]; });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, stream.quants += 64 * kVectors<F>) {
        stream.enter();
        float32x4_t scales;
        int32x4_t starts;
        lanes_of<M>(row, scales, starts);
        // Where all zero points are equal, sums start from -zero * total, else it is taken off at the end.
        const int32x4_t totals = vshrq_n_s32(starts, 3);  // negative
        if (F == Format::q8 || Zeros) starts = vdupq_n_s32(0);
        repeat<kFours / kChains>([&](auto step) LAMBDA {
            uint8x16_t raw[kChains][8];
            int8x16_t v[kChains][8];
            stream.template load<kChains>(step * kChains, raw);
            repeat<kChains>([&](auto c) LAMBDA { stream.unpack(raw[c], v[c]); });
            repeat<M>([&](auto t) LAMBDA {
                // Sixteen sums leave no room for the activations of all rows: make the compiler load them again.
                if constexpr (M > 2) asm("" : "+r"(row[t]), "+w"(starts));
                const int8_t* q = row[t]->q;
                int32x4_t dots[kChains];
                repeat<kChains>([&](auto c) LAMBDA { dots[c] = vdupq_laneq_s32(starts, t); });
                dot<kChains>(dots, v, vld1q_s8(q), vld1q_s8(q + 16));
                repeat<kChains>([&](auto c) LAMBDA {
                    constexpr int four = step * kChains + c;
                    if constexpr (Zeros) dots[c] = vmlaq_laneq_s32(dots[c], stream.zero[four], totals, t);
                    const float32x4_t both = vmulq_laneq_f32(stream.scale[four], scales, t);
                    float32x4_t& to = sums[t * kFours + four];
                    to = vfmaq_f32(to, both, vcvtq_f32_s32(dots[c]));
                });
            });
        });
        repeat<M>([&](auto t) LAMBDA { row[t]++; });
    }
    repeat<M * kFours>([&](auto i) LAMBDA { vst1q_f32(y[i / kFours] + i % kFours * kFour, sums[i]); });
}

}  // namespace
}  // namespace umbra
