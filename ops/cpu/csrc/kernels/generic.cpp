// Portable reference versions of every kernel: plain loops over the layouts of matrix.h.

#include <cmath>

#include "kernels/matrix.h"

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

template <Format F>
void product_quantised(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                       size_t stride) {
    const int blocks = w.k / kBlock;
    const size_t bytes = w.quant_stride() / blocks;
    for (int t = 0; t < count; t++) {
        const size_t row = index ? index[t] : t;
        float sums[kRows] = {};
        for (int b = 0; b < blocks; b++) {
            const uint8_t* plane = w.quants + block * w.quant_stride() + b * bytes;
            const size_t at = block * w.scale_count() + static_cast<size_t>(b * kBlock / w.group) * kRows;
            const Block& x = rows.blocks[row * blocks + b];
            for (int r = 0; r < kRows; r++) {
                int32_t dot = -(w.zeros ? w.zeros[at + r] : F == Format::q8 ? 128 : 8) * x.sum();
                for (int c = 0; c < kBlock; c++) dot += quant_at(F, w.order, plane, r, c) * x.q[c];
                sums[r] += half_to_float(w.scales[at + r]) * x.scale * static_cast<float>(dot);
            }
        }
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r];
    }
}

void product_mx4(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                 size_t stride) {
    const int blocks = w.k / kBlock;
    for (int t = 0; t < count; t++) {
        const size_t row = index ? index[t] : t;
        float sums[kRows] = {};
        for (int b = 0; b < blocks; b++) {
            const uint8_t* plane = w.quants + block * w.quant_stride() + b * w.block_bytes();
            const Block& x = rows.blocks[row * blocks + b];
            for (int r = 0; r < kRows; r++) {
                int32_t dot = -kMx4Zero * x.sum();
                for (int c = 0; c < kBlock; c++)
                    dot += kMx4Levels[quant_at(Format::mx4, w.order, plane, r, c)] * x.q[c];
                sums[r] += mx4_scale(w.mx4_scales(block)[b * kRows + r]) * x.scale * static_cast<float>(dot);
            }
        }
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r] * 0.5f;
    }
}

template <Format F>
void product_nested(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                    size_t stride) {
    const int blocks = w.k / kBlock;
    for (int t = 0; t < count; t++) {
        const size_t row = index ? index[t] : t;
        float sums[kRows] = {};
        for (int b = 0; b < blocks; b++) {
            const uint8_t* plane = w.quants + block * w.quant_stride() + b * w.block_bytes();
            const Block& x = rows.blocks[row * blocks + b];
            const int c = b * kBlock;
            for (int r = 0; r < kRows; r++) {
                int32_t dots[2] = {};  // of 16 columns each
                for (int i = 0; i < kBlock; i++)
                    dots[i / 16] += level_of(F, quant_at(F, w.order, plane, r, i)) * x.q[i];
                const uint16_t* scales = w.scales + block * w.scale_count();
                const float d = half_to_float(w.nested_halves(scales, c, 0)[r]);
                const auto scale = [&](int which) {
                    const uint8_t byte = w.nested_bytes(scales, c, which)[r];
                    return lowered(F) ? static_cast<float>(byte) : static_cast<float>(static_cast<int8_t>(byte));
                };
                float sum;
                if (F == Format::q6k) {
                    sum = d * scale(0) * static_cast<float>(dots[0]) + d * scale(1) * static_cast<float>(dots[1]);
                } else {
                    sum = d * scale(0) * static_cast<float>(dots[0] + dots[1]);
                    if (lowered(F))
                        sum -= half_to_float(w.nested_halves(scales, c, 1)[r]) * scale(1) * static_cast<float>(x.sum());
                }
                sums[r] += sum * x.scale;
            }
        }
        for (int r = 0; r < kRows; r++) y[t * stride + r] = sums[r];
    }
}

void product_f8(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                size_t stride) {
    const uint8_t* plane = w.quants + block * w.quant_stride();
    const float* scales = w.f8_scales(block);
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
    static const Kernels kernels{
        "generic",
        {product_float<float>, product_float<Bf16>, product_float<F16>, product_quantised<Format::q8>,
         product_quantised<Format::q4>, product_f8, product_mx4, product_nested<Format::q4k>,
         product_nested<Format::q5k>, product_nested<Format::q6k>, product_nested<Format::iq4>},
        quantise};
    return kernels;
}

}  // namespace umbra
