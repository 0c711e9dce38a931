// Attention over chosen blocks of tokens, and the index that blocks are chosen by. ops/selected.py says what each op
// means.
//
// Caches hold rows: one head's part of a page is (rows, width), one row after another, so that a block of tokens is
// contiguous and no other row is read. A page of the index has the keys of its tokens (page_size, width), and behind
// them one row for each block of `ratio` of these tokens, which is written with the block's last token.
//
// Order: scores and weights are computed section by section of kSection blocks, and sections are merged in their order,
// whoever computes them, so that no bit depends on threads, chunks or other sequences.
#pragma once

#include "kernels/ops.h"

namespace umbra {

// Each head of x is divided by the root of its mean square, times `weight`, and rotated by half: the angles of a token
// are the first width / 2 of its rows of cos and sin.
struct NormRotate {
    const float* x;                   // (T, heads, width), tokens `stride` apart
    const float *weight, *cos, *sin;  // (width); angles of tokens are angle_stride apart
    float* out;                       // (T, heads, width)
    int64_t tokens, heads, width, stride, angle_stride;
    float eps;
    void run(Context&) const;
};

struct WriteRows {
    const float *k, *v;       // (T, heads, width), tokens k_stride and v_stride apart
    void *k_cache, *v_cache;  // (pages, heads, page_size, width)
    const int64_t* slots;     // (T) page * page_size + offset in the page
    int64_t tokens, heads, width, page_size, k_stride, v_stride;
    Type type;
    void run(Context&) const;
};

struct WriteIndex {
    const float* keys;                 // (T, width), tokens `stride` apart
    const float *weight, *cos, *sin;   // as of NormRotate
    const float *back_cos, *back_sin;  // (width): the angles of ratio - 1 positions
    void* cache;                       // (pages, page_size + page_size / ratio, width)
    const int64_t* slots;              // (T) as of WriteRows
    int64_t tokens, width, page_size, ratio, stride, angle_stride;
    float eps;
    Type type;
    void run(Context&) const;
};

struct ChooseBlocks {
    const float* q;        // (T, heads, width)
    const float* weights;  // (T, heads), or null: all are one
    const void* cache;     // as of WriteIndex
    const int64_t *block_tables, *query_starts, *kv_lens;
    int32_t* out;    // (T, top): ascending, behind them -1
    float* scores;   // (together, most_blocks): scratch
    int32_t* order;  // (together, most_blocks): scratch
    int64_t tokens, sequences, heads, width, page_size, ratio, top, most_pages;
    Type type;
    static constexpr int64_t kTogether = 16;  // tokens of which scores are kept at a time
    void run(Context&) const;
    int64_t most_blocks() const { return most_pages * (page_size / ratio); }
};

struct SelectedAttention {
    const float* q;  // (T, heads, width)
    const void *k_cache, *v_cache;
    const int64_t *block_tables, *query_starts, *kv_lens;
    const int32_t* blocks;  // (T, top) as ChooseBlocks writes them
    float* out;             // (T, heads, width)
    int64_t tokens, sequences, heads, kv_heads, width, page_size, ratio, top, most_pages;
    float scale;
    Type type;
    static constexpr int64_t kSection = 128;   // blocks
    static constexpr int64_t kMostRatio = 8;   // tokens of a block
    static constexpr int64_t kMostHeads = 16;  // heads of a task
    void run(Context&) const;
};

}  // namespace umbra
