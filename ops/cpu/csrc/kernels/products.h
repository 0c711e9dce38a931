// How the products of matrix.h are cut into tasks: what linear layers and mixtures of experts share.
#pragma once

#include <algorithm>

#include "kernels/ops.h"

namespace umbra {

constexpr int kTile = 64;  // activation rows that meet the same weights while both are in the second cache
constexpr int kNear = 4;   // row blocks of such weights
constexpr int kWide = kNear * kRows;

// f(row) for rows 0 .. count - 1, shared over the pool where there are many.
template <class F>
void each_row(Context& context, int64_t count, F&& f) {
    if (count < 4) {
        for (int64_t i = 0; i < count; i++) f(i);
    } else {
        context.pool.each(static_cast<int>(count), [&](int i, int) { f(i); });
    }
}

// Quantise rows 0 .. count - 1 into `to`.
inline void quantise_rows(Context& context, int64_t count, int64_t k, const Rows& to) {
    each_row(context, count, [&](int64_t i) {
        const Rows row = to.from(i, k);
        context.kernels.quantise(row.x, static_cast<int>(k / kBlock), const_cast<Block*>(row.blocks));
    });
}

// Products of `blocks` neighbouring row blocks, 16 results each: y (count, kWide).
inline void products(const Kernels& kernels, const Matrix& w, int block, int blocks, const Rows& rows,
                     const int32_t* index, int count, float* y) {
    const Product product = kernels.product[static_cast<int>(w.format)];
    for (int b = 0; b < blocks; b++) product(w, block + b, rows, index, count, y + b * kRows, kWide);
}

// f(first block, last block) for all blocks begin .. end - 1: many activation rows meet kNear blocks at a time, which then
// stay in the second cache; few take the blocks as one stream.
template <class F>
void for_near_blocks(int begin, int end, int64_t rows, F&& f) {
    const int near = rows > kTile ? kNear : end - begin;
    for (int block = begin; block < end; block += near) f(block, std::min(end, block + near));
}

// Ask for the first lines of a row block that will be read next: kernels prefetch within a block only, and the first
// lines of 500 short streams a layer would each cost the full latency of memory.
inline void prefetch_block(const Matrix& w, int block) {
    const uint8_t* at = w.quants + block * w.quant_stride();
    for (int i = 0; i < 4096; i += 64) __builtin_prefetch(at + i);
}

inline uint8_t* aligned(uint8_t* at) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t{63});
}

}  // namespace umbra
