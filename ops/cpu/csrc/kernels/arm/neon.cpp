// NEON with SDOT (ARMv8.2), which Kunpeng 920 has. Sixteen bytes of weights are 4 rows x 4 columns, which is what SDOT by
// lane takes: a 32-bit lane of the sum is a row, and the lane of the activations names the four columns.

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#include "kernels/arm/stream.h"

namespace umbra {
namespace {

// 16 float sums, 4 integer sums, 4 activations, weights and temporaries just about fit the 32 registers. Row groups and
// activation rows are independent chains of additions, and take turns.
template <Format F, bool Zeros, int M>
TARGET void dot_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kGroups = M == 1 ? kFours : 1;  // of four rows at a time
    constexpr int kChains = kGroups * M;          // independent sums: each addition waits for the one before
    using Reader = Stream<F, Zeros>;
    Reader stream(w, block);
    float32x4_t sums[M * kFours];
    repeat<M * kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const Block* row[M];
    repeat<M>([&](auto t) LAMBDA { row[t] = rows[t]; });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, stream.quants += stream.kBytes) {
        stream.enter();
        const int32x4_t starts = starts_of<M>(row), totals = stream.totals(starts);  // used only where sums need them
        const float32x4_t half_starts = vcvtq_n_f32_s32(starts, 1);
        int32x4_t of_halves[2];
        if constexpr (kTraits<F>.sixteens()) {
            of_halves[0] = stream.totals(starts_of<M>(row, &Block::first));
            of_halves[1] = stream.totals(starts) - of_halves[0];
        }
        repeat<kFours / kGroups>([&](auto step) LAMBDA {
            constexpr int first = step * kGroups;
            int32x4_t dots[Reader::kSums * kChains];
            repeat<Reader::kSums * kChains>([&](auto i) LAMBDA {
                constexpr int four = first + i % kGroups, t = i % kChains / kGroups;
                if constexpr (Zeros)
                    dots[i] = vmulq_laneq_s32(stream.zero[four], totals, t);
                else if constexpr (Reader::kMoved)
                    dots[i] = vdupq_laneq_s32(totals, t);
                else if constexpr (kTraits<F>.sixteens())
                    dots[i] = vdupq_laneq_s32(of_halves[i / kChains], t);
                else
                    dots[i] = nothing();
            });
            repeat<2>([&](auto half) LAMBDA {
                int8x16_t activations[M];
                repeat<M>([&](auto t) LAMBDA {
                    // Sixteen sums leave no room for all activations: make the compiler load them again.
                    if constexpr (M > 2) asm("" : "+r"(row[t]));
                    activations[t] = vld1q_s8(row[t]->q + 16 * half);
                });
                repeat<4>([&](auto i) LAMBDA {
                    constexpr int column = 4 * half + i;
                    int8x16_t weights[kGroups];
                    repeat<kGroups>([&](auto c)
                                        LAMBDA { weights[c] = stream.template weights<column, 4>(16 * (first + c)); });
                    repeat<kChains>([&](auto j) LAMBDA {
                        int32x4_t& dot = dots[half * (Reader::kSums - 1) * kChains + j];
                        dot = vdotq_laneq_s32(dot, weights[j % kGroups], activations[j / kGroups], i);
                    });
                });
            });
            repeat<kChains>([&](auto j) LAMBDA {
                constexpr int four = first + j % kGroups, t = j / kGroups;
                float32x4_t& to = sums[t * kFours + four];
                if constexpr (Reader::kTwo) {
                    float32x4_t sum = vmulq_f32(stream.template factor<0>(four), stream.to_float(dots[j]));
                    const float32x4_t other = stream.template factor<1>(four);
                    if constexpr (kTraits<F>.minimums())
                        sum = vfmaq_laneq_f32(sum, other, half_starts, t);
                    else
                        sum = vfmaq_f32(sum, other, stream.to_float(dots[kChains + j]));
                    to = vfmaq_n_f32(to, sum, row[t]->scale);
                } else {
                    to = vfmaq_f32(to, vmulq_n_f32(stream.scale(four), row[t]->scale), stream.to_float(dots[j]));
                }
            });
        });
        repeat<M>([&](auto t) LAMBDA { row[t]++; });
    }
    repeat<M * kFours>([&](auto i) LAMBDA { vst1q_f32(y[i / kFours] + i % kFours * kFour, stream.result(sums[i])); });
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<F, kMost>(w, rows, index, count, y, stride,
                                   [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                       dot_pass<F, zeros(), m()>(w, block, operands, out);
                                   });
}

// Loads sixteen weights of one column.
INLINE void widen16(const float* at, float32x4_t* v) {
    for (int i = 0; i < kFours; i++) v[i] = vld1q_f32(at + kFour * i);
}
INLINE void widen16(const Bf16* at, float32x4_t* v) {
    const uint16x8_t none = vdupq_n_u16(0);
    for (int i = 0; i < 2; i++) {  // a bfloat16 is the upper half of a float
        const uint16x8_t half = vld1q_u16(&at[8 * i].bits);
        v[2 * i] = vreinterpretq_f32_u16(vzip1q_u16(none, half));
        v[2 * i + 1] = vreinterpretq_f32_u16(vzip2q_u16(none, half));
    }
}
INLINE void widen16(const F16* at, float32x4_t* v) {
    for (int i = 0; i < 2; i++) {
        const float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(&at[8 * i].bits));
        v[2 * i] = vcvt_f32_f16(vget_low_f16(half));
        v[2 * i + 1] = vcvt_high_f32_f16(half);
    }
}

template <class T, int M>
TARGET void float_pass(const Matrix& w, int block, const float* const* x, float* const* y) {
    const T* plane = reinterpret_cast<const T*>(w.quants + block * w.quant_stride());
    float32x4_t sums[M * kFours];
    repeat<M * kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    int c = 0;
    for (; c + 3 < w.k; c += 4, plane += 4 * kRows) {
        for (size_t i = 0; i < 4 * kRows * sizeof(T); i += 64)
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(plane) + kAhead + i);
        float32x4_t values[M];  // of four columns
        repeat<M>([&](auto t) LAMBDA { values[t] = vld1q_f32(x[t] + c); });
        repeat<4>([&](auto i) LAMBDA {
            float32x4_t v[kFours];
            widen16(plane + i * kRows, v);
            repeat<M * kFours>(
                [&](auto j) LAMBDA { sums[j] = vfmaq_laneq_f32(sums[j], v[j % kFours], values[j / kFours], i); });
        });
    }
    for (; c < w.k; c++, plane += kRows) {
        float32x4_t v[kFours];
        widen16(plane, v);
        repeat<M * kFours>([&](auto j) LAMBDA { sums[j] = vfmaq_n_f32(sums[j], v[j % kFours], x[j / kFours][c]); });
    }
    repeat<M * kFours>([&](auto i) LAMBDA { vst1q_f32(y[i / kFours] + i % kFours * kFour, sums[i]); });
}

template <class T>
void product_float(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                   size_t stride) {
    for_passes<kMost>(
        index, count, y, stride, [&](size_t row) { return rows.x + row * w.k; },
        [&](auto m, const float* const* x, float* const* out) { float_pass<T, m()>(w, block, x, out); });
}

TARGET void product_f8(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for (int t = 0; t < count; t++) {
        const float* x = rows.x + static_cast<size_t>(index ? index[t] : t) * w.k;
        const uint8_t* plane = w.quants + block * w.quant_stride();
        const float* scales = w.float_scales(block);
        float32x4_t sums[kFours];
        for (int i = 0; i < kFours; i++) sums[i] = vdupq_n_f32(0);
        for (int c = 0; c < w.k; scales += kRows) {
            float32x4_t part[kFours];
            for (int i = 0; i < kFours; i++) part[i] = vdupq_n_f32(0);
            for (const int end = c + w.group; c < end; c++, plane += kRows) {
                __builtin_prefetch(plane + kAhead);
                const int8x16_t bytes = vld1q_s8(reinterpret_cast<const int8_t*>(plane));
                for (int i = 0; i < 2; i++) {  // f8_to_float
                    const int16x8_t wide = i ? vmovl_high_s8(bytes) : vmovl_s8(vget_low_s8(bytes));
                    const uint16x8_t moved = vreinterpretq_u16_s16(vshlq_n_s16(wide, 7));
                    const float16x8_t half = vreinterpretq_f16_u16(vandq_u16(moved, vdupq_n_u16(0xbf80)));
                    part[2 * i] = vfmaq_n_f32(part[2 * i], vcvt_f32_f16(vget_low_f16(half)), x[c]);
                    part[2 * i + 1] = vfmaq_n_f32(part[2 * i + 1], vcvt_high_f32_f16(half), x[c]);
                }
            }
            for (int i = 0; i < kFours; i++)
                sums[i] = vfmaq_f32(sums[i], part[i], vmulq_n_f32(vld1q_f32(scales + kFour * i), kF8Unit));
        }
        for (int i = 0; i < kFours; i++) vst1q_f32(y + t * stride + kFour * i, sums[i]);
    }
}

TARGET void quantise(const float* x, int count, Block* to) {
    for (Block* block = to; block < to + count; block++, x += kBlock) {
        float32x4_t v[8], largest = vdupq_n_f32(0);
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            largest = vmaxnmq_f32(largest, vabsq_f32(v[i]));
        }
        const float most = vmaxnmvq_f32(largest);
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t totals[2];
        for (int i = 0; i < 2; i++) {  // to nearest even, as nearbyint
            int16x8_t words[2];
            for (int j = 0; j < 2; j++) {
                const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(v[4 * i + 2 * j], inverse));
                const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(v[4 * i + 2 * j + 1], inverse));
                words[j] = vqmovn_high_s32(vqmovn_s32(low), high);
            }
            const int8x16_t bytes = vqmovn_high_s16(vqmovn_s16(words[0]), words[1]);
            vst1q_s8(block->q + 16 * i, bytes);
            totals[i] = vaddlvq_s8(bytes);
        }
        block->scale = most / 127.0f;
        block->start = -8 * (totals[0] + totals[1]);
        block->first = -8 * totals[0];
    }
}

}  // namespace

const Kernels& kernels_neon() {
    static const Kernels kernels = [] {
        Kernels all{"neon_dotprod", quantise};
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.records())
                all.put(F, product_of_records<product_quantised<kExpanded>>);
            else if constexpr (kTraits<F>.quantised())
                all.put(F, product_quantised<F>);
            else if constexpr (kTraits<F>.storage == Storage::e4m3)
                all.put(F, product_f8);
            else
                all.put(F, product_float<Stored<F>>);
        });
        all.order = Order::signed_fours;
        all.slots = &slots_neon;
        return all;
    }();
    return kernels;
}

}  // namespace umbra
