// NEON with SMMLA (i8mm): a 2 x 8 matrix of weights times the transpose of a 2 x 8 one of activations, twice the work of
// an SDOT. Sixteen bytes of weights are 2 rows x 8 columns, as SMMLA takes them. A sum's lanes are (row, activation) =
// (0,0) (0,1) (1,0) (1,1). A single activation row is multiplied by SDOT, whose sums are halves of rows: (0, 0, 1, 1).

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#include "kernels/arm/stream.h"

namespace umbra {
namespace {

constexpr int kEights = 4;  // of columns in a block

// Weights of columns 8c .. 8c+7 of rows 0 and 1 of row group `four`, or with `second` of rows 2 and 3.
template <int C, class Stream>
INLINE int8x16_t weights_of(const Stream& stream, int four, int second) {
    return stream.template weights<C, 8>(32 * four + 16 * second);
}

// Lanes (0, 0, 1, 1) of x, or with Second (2, 2, 3, 3).
template <bool Second>
INLINE int32x4_t spread(int32x4_t x) {
    return Second ? vzip2q_s32(x, x) : vzip1q_s32(x, x);
}

template <Format F, bool Zeros>
TARGET void row_pass(const Matrix& w, int block, const Block* row, float* y) {
    using Reader = Stream<F, Zeros>;
    Reader stream(w, block);
    float32x4_t sums[kFours];
    repeat<kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, row++, stream.quants += stream.kBytes) {
        stream.enter();
        constexpr int kPairs = 2 * kFours;  // of rows
        int32x4_t dots[Reader::kSums * kPairs];
        repeat<Reader::kSums * kPairs>([&](auto i) LAMBDA { dots[i] = nothing(); });
        repeat<kEights>([&](auto c) LAMBDA {
            const int64_t* at = reinterpret_cast<const int64_t*>(row->q + 8 * c);
            const int8x16_t twice = vreinterpretq_s8_s64(vld1q_dup_s64(at));
            repeat<kPairs>([&](auto i) LAMBDA {
                int32x4_t& dot = dots[c / 2 * (Reader::kSums - 1) * kPairs + i];
                dot = vdotq_s32(dot, weights_of<c>(stream, i / 2, i % 2), twice);
            });
        });
        repeat<kFours>([&](auto four) LAMBDA {
            int32x4_t dot = vpaddq_s32(dots[2 * four], dots[2 * four + 1]);
            if constexpr (Zeros) dot = vmlaq_n_s32(dot, stream.zero[four], stream.totals(row->start));
            if constexpr (Reader::kMoved) dot = vaddq_s32(dot, vdupq_n_s32(stream.totals(row->start)));
            if constexpr (kTraits<F>.sixteens()) dot = vaddq_s32(dot, vdupq_n_s32(stream.totals(row->first)));
            if constexpr (Reader::kTwo) {
                float32x4_t sum = vmulq_f32(stream.template factor<0>(four), stream.to_float(dot));
                float32x4_t other = vcvtq_n_f32_s32(vdupq_n_s32(row->start), 1);
                if constexpr (kTraits<F>.sixteens()) {
                    dot = vpaddq_s32(dots[kPairs + 2 * four], dots[kPairs + 2 * four + 1]);
                    other = stream.to_float(vaddq_s32(dot, vdupq_n_s32(stream.totals(row->start - row->first))));
                }
                sum = vfmaq_f32(sum, stream.template factor<1>(four), other);
                sums[four] = vfmaq_n_f32(sums[four], sum, row->scale);
            } else {
                sums[four] = vfmaq_f32(sums[four], vmulq_n_f32(stream.scale(four), row->scale), stream.to_float(dot));
            }
        });
    }
    repeat<kFours>([&](auto i) LAMBDA { vst1q_f32(y + i * kFour, stream.result(sums[i])); });
}

// 16 sums, the 8 vectors of a block of two pairs' activations and 4 integer sums leave 4 registers.
template <Format F, bool Zeros, int Pairs>
TARGET void pair_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    constexpr int kHalves = 2;  // two rows of a row group
    constexpr int kSums = Pairs * kHalves;
    using Reader = Stream<F, Zeros>;
    Reader stream(w, block);
    float32x4_t sums[kSums * kFours];  // [row group][pair][half]
    repeat<kSums * kFours>([&](auto i) LAMBDA { sums[i] = vdupq_n_f32(0); });
    const Block* row[2 * Pairs];
    repeat<2 * Pairs>([&](auto t) LAMBDA { row[t] = rows[t]; });
    const int blocks = w.k / kBlock;
    for (int b = 0; b < blocks; b++, stream.quants += stream.kBytes) {
        stream.enter();
        int8x16_t activations[Pairs * kEights];  // columns 8c .. 8c+7 of both rows of a pair
        float32x4_t scales[Pairs];               // (first, second, first, second)
        int32x4_t totals[Pairs];                 // likewise; used only where sums need them
        int32x4_t starts[Pairs], firsts[Pairs];  // likewise
        repeat<Pairs>([&](auto p) LAMBDA {
            const Block *&first = row[2 * p], *&second = row[2 * p + 1];
            repeat<2>([&](auto i) LAMBDA {
                const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(first->q + 16 * i));
                const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(second->q + 16 * i));
                activations[p * kEights + 2 * i] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
                activations[p * kEights + 2 * i + 1] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
            });
            const float32x2_t both = vld1_lane_f32(&second->scale, vld1_dup_f32(&first->scale), 1);
            scales[p] = vcombine_f32(both, both);
            const auto of_both = [&](const int32_t Block::* which) LAMBDA {
                const int32x2_t two = vld1_lane_s32(&(second->*which), vld1_dup_s32(&(first->*which)), 1);
                return vcombine_s32(two, two);
            };
            starts[p] = of_both(&Block::start);
            totals[p] = stream.totals(starts[p]);
            if constexpr (kTraits<F>.sixteens()) firsts[p] = stream.totals(of_both(&Block::first));
            first++, second++;
        });
        repeat<kFours>([&](auto four) LAMBDA {
            if constexpr (Pairs > 1) asm("" : "+m"(scales));  // a load is cheaper than a register
            int32x4_t dots[Reader::kSums * kSums];
            repeat<Reader::kSums * kSums>([&](auto i) LAMBDA {
                constexpr int p = i % kSums / kHalves;
                if constexpr (Zeros)
                    dots[i] = vmulq_s32(spread<i % kHalves>(stream.zero[four]), totals[p]);
                else if constexpr (Reader::kMoved)
                    dots[i] = totals[p];
                else if constexpr (kTraits<F>.sixteens())
                    dots[i] = i < kSums ? firsts[p] : stream.totals(starts[p]) - firsts[p];
                else
                    dots[i] = nothing();
            });
            repeat<kEights * kHalves>([&](auto i) LAMBDA {
                constexpr int c = i / kHalves, half = i % kHalves;
                const int8x16_t weights = weights_of<c>(stream, four, half);
                repeat<Pairs>([&](auto p) LAMBDA {
                    int32x4_t& dot = dots[c / 2 * (Reader::kSums - 1) * kSums + p * kHalves + half];
                    dot = vmmlaq_s32(dot, weights, activations[p * kEights + c]);
                });
            });
            const float32x4_t scale = stream.scale(four);
            float32x4_t other = scale;
            if constexpr (Reader::kTwo) other = stream.template factor<1>(four);
            repeat<kHalves>([&](auto half) LAMBDA {
                const float32x4_t of_rows = vreinterpretq_f32_s32(spread<half>(vreinterpretq_s32_f32(scale)));
                const float32x4_t others = vreinterpretq_f32_s32(spread<half>(vreinterpretq_s32_f32(other)));
                repeat<Pairs>([&](auto p) LAMBDA {
                    int32x4_t& dot = dots[p * kHalves + half];
                    float32x4_t& to = sums[four * kSums + p * kHalves + half];
                    if constexpr (Reader::kTwo) {
                        float32x4_t second = vcvtq_n_f32_s32(starts[p], 1);
                        if constexpr (kTraits<F>.sixteens()) second = stream.to_float(dots[kSums + p * kHalves + half]);
                        const float32x4_t sum = vmulq_f32(of_rows, stream.to_float(dot));
                        to = vfmaq_f32(to, vfmaq_f32(sum, others, second), scales[p]);
                    } else {
                        to = vfmaq_f32(to, vmulq_f32(of_rows, scales[p]), stream.to_float(dot));
                    }
                });
            });
        });
    }
    repeat<Pairs * kFours>([&](auto i) LAMBDA {
        constexpr int four = i / Pairs, p = i % Pairs;
        const float32x4_t low = stream.result(sums[2 * i]), high = stream.result(sums[2 * i + 1]);
        vst1q_f32(y[2 * p] + four * kFour, vuzp1q_f32(low, high));
        vst1q_f32(y[2 * p + 1] + four * kFour, vuzp2q_f32(low, high));
    });
}

template <Format F, bool Zeros, int M>
void quantised_pass(const Matrix& w, int block, const Block* const* rows, float* const* y) {
    if constexpr (M == 1) {
        row_pass<F, Zeros>(w, block, rows[0], y[0]);
    } else if constexpr (M % 2) {  // the last row is its own neighbour, and written twice
        const Block* even[M + 1];
        float* to[M + 1];
        for (int t = 0; t <= M; t++) even[t] = rows[t < M ? t : M - 1], to[t] = y[t < M ? t : M - 1];
        pair_pass<F, Zeros, (M + 1) / 2>(w, block, even, to);
    } else {
        pair_pass<F, Zeros, M / 2>(w, block, rows, y);
    }
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    for_quantised_passes<F, kMost>(w, rows, index, count, y, stride,
                                   [&](auto zeros, auto m, const Block* const* operands, float* const* out) {
                                       quantised_pass<F, zeros(), m()>(w, block, operands, out);
                                   });
}

}  // namespace

const Kernels& kernels_i8mm() {
    static const Kernels kernels = [] {
        Kernels all = kernels_neon();
        all.name = "neon_i8mm";
        all.order = Order::signed_eights;
        each_format([&](auto format) {
            constexpr Format F = decltype(format)::value;
            if constexpr (kTraits<F>.records())
                all.put(F, product_of_records<product_quantised<kExpanded>>);
            else if constexpr (kTraits<F>.quantised())
                all.put(F, product_quantised<F>);
        });
        return all;
    }();
    return kernels;
}

}  // namespace umbra
