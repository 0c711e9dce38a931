// NEON with USDOT and USMMLA (i8mm), which multiply unsigned weights by signed activations: bytes of q8 as they are
// stored. USMMLA is a 2 x 8 matrix of weights times the transpose of a 2 x 8 one of activations, twice the work of a
// USDOT. Used for two or four quantised activation rows; one or three are as in neon.cpp.
//
// Vectors i and i + 1 of the layout hold columns 4i .. 4i+3 and 4i+4 .. 4i+7 of four rows; zipped by 32-bit lanes they
// are two rows of eight columns each. A sum's lanes are (row, activation) = (0,0) (0,1) (1,0) (1,1).

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define MIXED true
#include "kernels/arm/dot.h"

namespace umbra {
namespace {

// A block of two activation rows.
struct Pair {
    int8x16_t q[4];     // columns 8i .. 8i+7 of both
    float32x4_t scale;  // (first, second, first, second)
    int32x4_t start;    // likewise: of sums, where all zero points are equal; else -1 * the sum of the activations
};

template <Format F, bool Zeros, int Pairs>
TARGET void pair_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    Stream<F, Zeros> stream(w, block);
    float32x4_t sums[Pairs * kFours * 2];  // [pair][row group][rows 0 and 1, rows 2 and 3]
    repeat<Pairs * kFours * 2>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const Block* row[2 * Pairs];
    repeat<2 * Pairs>([&](auto t) LAMBDA { row[t] = rows[t]; });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, stream.quants += 64 * kVectors<F>) {
        stream.enter();
        float32x4_t scales{row[0]->scale};
        repeat<2 * Pairs - 1>([&](auto t) LAMBDA { scales = vld1q_lane_f32(&row[t + 1]->scale, scales, t + 1); });
        int32x4_t starts = starts_of<2 * Pairs>(row);
        starts = Zeros ? vshrq_n_s32(starts, 3) : stream.start(starts);
        Pair pairs[Pairs], *at = pairs;
        repeat<Pairs>([&](auto p) LAMBDA {
            const Block *&first = row[2 * p], *&second = row[2 * p + 1];
            repeat<2>([&](auto i) LAMBDA {
                const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(first->q + 16 * i));
                const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(second->q + 16 * i));
                pairs[p].q[2 * i] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
                pairs[p].q[2 * i + 1] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
            });
            first++, second++;
            pairs[p].scale = vreinterpretq_f32_f64(vdupq_laneq_f64(vreinterpretq_f64_f32(scales), p));
            pairs[p].start = vreinterpretq_s32_s64(vdupq_laneq_s64(vreinterpretq_s64_s32(starts), p));
        });
        repeat<kFours>([&](auto four) LAMBDA {
            // Two pairs' sums leave no room for the activations: make the compiler load them again. Some of these
            // sums still live on the stack; loading even more often keeps them all, for a sixth more instructions.
            if constexpr (Pairs > 1) asm("" : "+r"(at) : : "memory");
            uint8x16_t v[8];  // columns 8i .. 8i+7 of rows 0 and 1 in v[2i], of rows 2 and 3 in v[2i + 1]
            repeat<kVectors<F> / 2>([&](auto i) LAMBDA {
                const uint32x4_t a = vreinterpretq_u32_u8(stream.load(2 * i, four));
                const uint32x4_t b = vreinterpretq_u32_u8(stream.load(2 * i + 1, four));
                const uint8x16_t low = vreinterpretq_u8_u32(vzip1q_u32(a, b));
                const uint8x16_t high = vreinterpretq_u8_u32(vzip2q_u32(a, b));
                repeat<8 / kVectors<F>>([&](auto n) LAMBDA {
                    v[4 * n + 2 * i] = stream.unpack(4 * n + 2 * i, low);
                    v[4 * n + 2 * i + 1] = stream.unpack(4 * n + 2 * i + 1, high);
                });
            });
            int32x4_t dots[Pairs * 2];
            repeat<Pairs * 2>([&](auto i) LAMBDA {
                if constexpr (Pairs > 1) asm("" : "+r"(at) : : "memory");  // a load is cheaper than a copy
                dots[i] = Zeros ? vdupq_n_s32(0) : at[i / 2].start;
            });
            repeat<4 * Pairs * 2>([&](auto i) LAMBDA {
                constexpr int c = i / (Pairs * 2), n = i % (Pairs * 2);
                dots[n] = vusmmlaq_s32(dots[n], v[2 * c + n % 2], at[n / 2].q[c]);
            });
            const float32x4_t scale = stream.scale(four);
            repeat<Pairs * 2>([&](auto i) LAMBDA {
                constexpr int p = i / 2, half = i % 2;
                const auto spread = [](auto x) LAMBDA { return half ? vzip2q_s32(x, x) : vzip1q_s32(x, x); };
                const float32x4_t scales = vreinterpretq_f32_s32(spread(vreinterpretq_s32_f32(scale)));
                if constexpr (Zeros) dots[i] = vmlaq_s32(dots[i], spread(stream.zero[four]), at[p].start);
                float32x4_t& to = sums[(p * kFours + four) * 2 + half];
                to = vfmaq_f32(to, vmulq_f32(scales, at[p].scale), vcvtq_f32_s32(dots[i]));
            });
        });
    }
    repeat<Pairs * kFours>([&](auto i) LAMBDA {
        float* const* to = y + i / kFours * 2;
        vst1q_f32(to[0] + i % kFours * kFour, vuzp1q_f32(sums[2 * i], sums[2 * i + 1]));
        vst1q_f32(to[1] + i % kFours * kFour, vuzp2q_f32(sums[2 * i], sums[2 * i + 1]));
    });
}

template <Format F, bool Zeros, int M>
void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    if constexpr (M % 2 == 0)
        pair_pass<F, Zeros, M / 2>(w, block, rows, y);
    else
        dot_pass<F, Zeros, M>(w, block, rows, y);
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<kMost>(w, rows, index, count, y, stride,
                                [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                    quantised_pass<F, zeros(), m()>(w, block, operands, out);
                                });
}

}  // namespace

const Kernels& kernels_i8mm() {
    static const Kernels kernels = [] {
        Kernels all = kernels_neon();
        all.name = "neon_i8mm";
        all.product[static_cast<int>(Format::q8)] = product_quantised<Format::q8>;
        all.product[static_cast<int>(Format::q4)] = product_quantised<Format::q4>;
        return all;
    }();
    return kernels;
}

}  // namespace umbra
