// How products are cut into tasks; shared by linear layers and mixtures of experts.
#pragma once

#include <algorithm>

#include "kernels/ops.h"

namespace umbra {

constexpr int kTile = 64;  // activation rows multiplied by the same weights while both are in L2
constexpr int kNear = 4;   // row blocks of weights in such a tile
constexpr int kWide = kNear * kRows;

// Calls f(row) for rows 0 .. count - 1, shared over the pool if there are many.
template <class F>
void each_row(Context& context, int64_t count, F&& f) {
    if (count < 4) {
        for (int64_t i = 0; i < count; i++) f(i);
    } else {
        context.pool.each(static_cast<int>(count), [&](int i, int) { f(i); });
    }
}

// Quantises rows 0 .. count - 1 of to.x into to.blocks.
inline void quantise_rows(Context& context, int64_t count, int64_t k, const Rows& to) {
    each_row(context, count, [&](int64_t i) {
        const Rows row = to.from(i, k);
        context.kernels.quantise(row.x, static_cast<int>(k / kBlock), const_cast<Block*>(row.blocks));
    });
}

// Products of `blocks` neighbouring row blocks, 16 results each: y (count, kWide).
inline void products(const Kernels& kernels, const Matrix& w, int block, int blocks, const Rows& rows,
                     const int32_t* index, int count, float* y) {
    const int format = static_cast<int>(w.format);
    if (const Products several = kernels.several[format])
        return several(w, block, blocks, rows, index, count, y, kWide);
    for (int b = 0; b < blocks; b++) kernels.product[format](w, block + b, rows, index, count, y + b * kRows, kWide);
}

// Calls f(first block, end) for blocks begin .. end - 1: with many activation rows for kNear blocks at a time, which
// then stay in L2; with few rows for all blocks as one stream.
template <class F>
void for_near_blocks(int begin, int end, int64_t rows, F&& f) {
    const int near = rows > kTile ? kNear : end - begin;
    for (int block = begin; block < end; block += near) f(block, std::min(end, block + near));
}

// Prefetches the first cache lines of the row block that is read next. Kernels prefetch within a block only, and the
// first lines of 500 short streams per layer would each cost the full memory latency.
inline void prefetch_block(const Matrix& w, int block) {
    const uint8_t* at = w.quants + block * w.quant_stride();
    for (int i = 0; i < 4096; i += 64) __builtin_prefetch(at + i);
}

inline uint8_t* aligned(uint8_t* at) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t{63});
}

}  // namespace umbra
