// Portable reference versions of every kernel: plain loops over the layouts of matrix.h.

#include <cmath>

#include "kernels/matrix.h"
#include "kernels/records.h"

namespace umbra {
namespace {

template <class T>
void product_float(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                   size_t stride) {
    const T* plane = reinterpret_cast<const T*>(w.quants + block * w.quant_stride());
    for (int t = 0; t < count; t++) {
        const float* x = rows.x + static_cast<size_t>(index ? index[t] : t) * w.k;
        float sums[kRows] = {};
        for (int c = 0; c < w.k; c++)
            for (int r = 0; r < kRows; r++) sums[r] += widen(plane[static_cast<size_t>(c) * kRows + r]) * x[c];
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r];
    }
}

// What 32 columns from c on add to the product of row r of the block, without the activations' scale. The sums are those
// of bytes less the middle times activations, of 16 columns each, and of activations.
template <Format F>
float scaled(const Matrix& w, int block, int c, int r, const int32_t* dots, int32_t sum) {
    constexpr FormatTraits kOf = kTraits<F>;
    const int32_t dot = dots[0] + dots[1];
    if constexpr (kOf.f8_scales()) {
        const uint16_t* scales = w.scales + block * w.scale_count();
        float both = 0;
        for (int i = 0; i < 2; i++) both += f8_to_float(w.nested_bytes(scales, c, i)[r]) * static_cast<float>(dots[i]);
        return kOf.unit * w.float_scales(block)[r] * both;
    } else if constexpr (kOf.expanded()) {
        const float* scales = w.float_scales(block) + c + r;
        return scales[0] * static_cast<float>(dots[0]) + scales[kRows] * static_cast<float>(dots[1]);
    } else if constexpr (kOf.nested()) {
        const uint16_t* scales = w.scales + block * w.scale_count();
        const auto half = [&](int which) { return half_to_float(w.nested_halves(scales, c, which)[r]); };
        const auto byte = [&](int which) { return w.nested_bytes(scales, c, which)[r]; };
        if (kOf.minimums())
            return half(0) * static_cast<float>(byte(0) * dot) - half(1) * static_cast<float>(byte(1) * sum);
        const auto scale = [&](int which) { return half(0) * static_cast<float>(static_cast<int8_t>(byte(which))); };
        if (kOf.sixteens()) return scale(0) * static_cast<float>(dots[0]) + scale(1) * static_cast<float>(dots[1]);
        return scale(0) * static_cast<float>(dot);
    } else if constexpr (kOf.scales == Scales::exponents) {
        return kOf.unit * e8m0_to_float(w.exponents(block)[c / w.group * kRows + r]) * static_cast<float>(dot);
    } else if constexpr (kOf.scales == Scales::floats) {
        return kOf.unit * w.float_scales(block)[c / w.group * kRows + r] * static_cast<float>(dot);
    } else {
        const size_t at = block * w.scale_count() + static_cast<size_t>(c / w.group) * kRows + r;
        const int zero = w.zeros ? w.zeros[at] - kOf.middle : 0;
        return kOf.unit * half_to_float(w.scales[at]) * static_cast<float>(dot - zero * sum);
    }
}

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    const int blocks = w.k / kBlock;
    for (int t = 0; t < count; t++) {
        const size_t row = index ? index[t] : t;
        float sums[kRows] = {};
        for (int b = 0; b < blocks; b++) {
            const uint8_t* plane = w.quants + block * w.quant_stride() + b * kTraits<F>.block_bytes();
            const Block& x = rows.blocks[row * blocks + b];
            for (int r = 0; r < kRows; r++) {
                int32_t dots[2] = {};
                for (int c = 0; c < kBlock; c++)
                    dots[c / 16] += (byte_at(kTraits<F>, w.order, plane, r, c) - kTraits<F>.middle) * x.q[c];
                sums[r] += scaled<F>(w, block, b * kBlock, r, dots, x.sum()) * x.scale;
            }
        }
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r];
    }
}

void product_f8(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                size_t stride) {
    const uint8_t* plane = w.quants + block * w.quant_stride();
    const float* scales = w.float_scales(block);
    for (int t = 0; t < count; t++) {
        const float* x = rows.x + static_cast<size_t>(index ? index[t] : t) * w.k;
        float sums[kRows] = {};
        for (int start = 0; start < w.k; start += w.group) {
            float part[kRows] = {};
            for (int c = start; c < start + w.group; c++)
                for (int r = 0; r < kRows; r++)
                    part[r] += f8_to_float(plane[static_cast<size_t>(c) * kRows + r]) * x[c];
            for (int r = 0; r < kRows; r++) sums[r] += part[r] * scales[start / w.group * kRows + r];
        }
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r];
    }
}

void quantise(const float* x, int count, Block* to) {
    for (Block* block = to; block < to + count; block++, x += kBlock) {
        float most = 0;
        for (int i = 0; i < kBlock; i++) most = std::fmax(most, std::fabs(x[i]));
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t total = 0, first = 0;
        for (int i = 0; i < kBlock; i++) {
            const float level = std::nearbyint(x[i] * inverse);
            block->q[i] = std::fabs(level) < 128 ? static_cast<int8_t>(level) : 0;  // NaN and infinity have no level
            total += block->q[i];
            if (i < kBlock / 2) first = total;
        }
        block->scale = most / 127.0f;
        block->start = -8 * total;
        block->first = -8 * first;
    }
}

}  // namespace

const Kernels& kernels_generic() {
    static const Kernels kernels = [] {
        Kernels all{"generic", quantise};
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
        return all;
    }();
    return kernels;
}

}  // namespace umbra
