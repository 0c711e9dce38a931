// The paged KV cache: writing it, and causal attention over it with online softmax (arXiv 1805.02867).
//
// Layout of one page of one KV head, P tokens of D elements, a contiguous piece of memory:
//   keys    [D][P], transposed, so that scores of P keys are P lanes and need no horizontal sums
//   values  [P][D]
//   int8 only: after the elements float32 [P], each token's scale; element = int8 * scale, scale = max|row| / 127
//
// A task handles a few tokens and one KV head. All their query heads (rows) share every key and value that is read, and
// each page's piece stays in L1 meanwhile. Both products, queries by keys and probabilities by values, are the same
// small matrix product: kAtOnce rows by 16 lanes of sums in registers.
// Keys are scored in tiles of up to kTile; after each tile the row's running maximum, sum and output are updated.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr int kTile = 64;      // keys scored before their values are used
constexpr int kMostRows = 32;  // query rows of a block
#if defined(__x86_64__)
constexpr int kAtOnce = 8;  // 8 sums of 16 lanes: 8 AVX-512 registers
#else
constexpr int kAtOnce = 4;  // 16 NEON registers
#endif

// c (rows, columns) += a (rows, depth) b (depth, columns) for R rows and 16 columns.
template <int R, class T>
ALWAYS_INLINE void tile(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t depth, float* c,
                        int64_t c_stride) {
    Lanes sums[R];
    for (int r = 0; r < R; r++) load(c + r * c_stride, sums[r]);
    for (int64_t k = 0; k < depth; k++) {
        Lanes v;
        load(b + k * b_stride, v);
        for (int r = 0; r < R; r++) sums[r] += a[r * a_stride + k] * v;
    }
    for (int r = 0; r < R; r++) std::memcpy(c + r * c_stride, &sums[r], sizeof(Lanes));
}

template <class T>
ALWAYS_INLINE void product(int64_t rows, int64_t depth, int64_t columns, const float* a, int64_t a_stride, const T* b,
                           int64_t b_stride, float* c, int64_t c_stride) {
    for (int64_t r = 0; r < rows; r += kAtOnce) {
        const int64_t count = std::min<int64_t>(kAtOnce, rows - r);
        const float* from = a + r * a_stride;
        float* to = c + r * c_stride;
        int64_t j = 0;
        for (; j + kLanes <= columns; j += kLanes) {
            if (count == kAtOnce) {
                tile<kAtOnce>(from, a_stride, b + j, b_stride, depth, to + j, c_stride);
                continue;
            }
            for (int64_t i = 0; i < count; i++)
                tile<1>(from + i * a_stride, a_stride, b + j, b_stride, depth, to + i * c_stride + j, c_stride);
        }
        for (; j < columns; j++)
            for (int64_t i = 0; i < count; i++)
                for (int64_t k = 0; k < depth; k++)
                    to[i * c_stride + j] += from[i * a_stride + k] * widen(b[k * b_stride + j]);
    }
}

#define PRODUCT(T)                                                                                                   \
    CLONES void multiply(int64_t rows, int64_t depth, int64_t columns, const float* a, int64_t a_stride, const T* b, \
                         int64_t b_stride, float* c, int64_t c_stride) {                                             \
        product(rows, depth, columns, a, a_stride, b, b_stride, c, c_stride);                                        \
    }
PRODUCT(float)
PRODUCT(Bf16)
PRODUCT(F16)
PRODUCT(int8_t)
#undef PRODUCT

CLONES void scale_by(float* to, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] *= factor;
}

CLONES void multiply_by(float* to, const float* factors, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] *= factors[i];
}

CLONES float largest(const float* x, int64_t count) {
    float least = x[0], most = x[0];
    widen_range(x, count, least, most);
    return most;
}

// Replaces each score by exp(score - most) and returns the sum.
CLONES float exponentials(float* scores, float most, int64_t count) {
    float lanes[kLanes] = {}, sum = 0;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += scores[i + l] = fast_exp(scores[i + l] - most);
    for (; i < count; i++) sum += scores[i] = fast_exp(scores[i] - most);
    return sum + add_lanes(lanes);
}

template <class T>
struct Piece {  // the keys or values of one page and KV head
    const T* elements;
    const float* scales;  // int8 only
};

template <class T>
Piece<T> piece_of(const void* cache, int64_t index, int64_t elements, int64_t page_size) {
    const int64_t bytes = elements * sizeof(T) + (std::is_same_v<T, int8_t> ? page_size * sizeof(float) : 0);
    const uint8_t* at = static_cast<const uint8_t*>(cache) + index * bytes;
    return {reinterpret_cast<const T*>(at), reinterpret_cast<const float*>(at + elements * sizeof(T))};
}

template <class T>
void attend(const Attention& a, int64_t sequence, int64_t token, int64_t count, int64_t kv_head) {
    const int64_t group = a.heads / a.kv_heads, width = a.width, size = a.page_size;
    const int64_t* pages = a.block_tables + sequence * a.most_pages;
    // A query sees the keys up to its own position.
    const int64_t first_position = a.kv_lens[sequence] - (a.query_starts[sequence + 1] - token);
    const auto place = [&](int64_t row) {  // offset of a row in q and out
        return ((token + row / group) * a.heads + kv_head * group + row % group) * width;
    };
    float q[kMostRows * kMostWidth], sums[kMostRows * kMostWidth], scores[kMostRows * kTile];
    float most[kMostRows], total[kMostRows];
    for (int64_t begin = 0; begin < count * group; begin += kMostRows) {
        const int64_t rows = std::min<int64_t>(kMostRows, count * group - begin);
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t d = 0; d < width; d++) q[r * width + d] = a.q[place(begin + r) + d] * a.scale;
            most[r] = -std::numeric_limits<float>::infinity(), total[r] = 0;
        }
        std::fill(sums, sums + rows * width, 0.0f);
        const int64_t seen_by_last = first_position + (begin + rows - 1) / group + 1;
        for (int64_t start = 0; start < seen_by_last; start += kTile) {
            const int64_t end = std::min(seen_by_last, start + kTile);
            // Calls f(piece index, offset in the page, number of keys, column of scores).
            const auto for_pages = [&](auto&& f) {
                for (int64_t at = start, keys; at < end; at += keys) {
                    keys = std::min(size - at % size, end - at);
                    f(pages[at / size] * a.kv_heads + kv_head, at % size, keys, at - start);
                }
            };
            std::fill(scores, scores + rows * kTile, 0.0f);
            for_pages([&](int64_t index, int64_t offset, int64_t keys, int64_t column) {
                const Piece<T> k = piece_of<T>(a.k_cache, index, width * size, size);
                // Whole vectors even if the sequence ends within the page; keys past its end are masked below.
                const int64_t whole = std::min({(keys + kLanes - 1) / kLanes * kLanes, size - offset, kTile - column});
                multiply(rows, width, whole, q, width, k.elements + offset, size, scores + column, kTile);
                if (std::is_same_v<T, int8_t>)
                    for (int64_t r = 0; r < rows; r++)
                        multiply_by(scores + r * kTile + column, k.scales + offset, keys);
            });
            for (int64_t r = 0; r < rows; r++) {
                float* row = scores + r * kTile;
                const int64_t seen =
                    std::clamp<int64_t>(first_position + (begin + r) / group + 1 - start, 0, end - start);
                std::fill(row + seen, row + (end - start), 0.0f);  // keys after the query's position
                if (seen == 0) continue;
                const float peak = std::max(most[r], largest(row, seen));
                if (peak > most[r]) {
                    const float factor = std::exp(most[r] - peak);
                    total[r] *= factor;
                    scale_by(sums + r * width, factor, width);
                    most[r] = peak;
                }
                total[r] += exponentials(row, peak, seen);
            }
            for_pages([&](int64_t index, int64_t offset, int64_t keys, int64_t column) {
                const Piece<T> v = piece_of<T>(a.v_cache, index, width * size, size);
                if (std::is_same_v<T, int8_t>)
                    for (int64_t r = 0; r < rows; r++)
                        multiply_by(scores + r * kTile + column, v.scales + offset, keys);
                multiply(rows, keys, width, scores + column, kTile, v.elements + offset * width, width, sums, width);
            });
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t d = 0; d < width; d++) a.out[place(begin + r) + d] = sums[r * width + d] / total[r];
    }
}

// Stores one token of one head: x goes to every `step`-th element of `to`.
template <class T>
void store(const float* x, int64_t width, T* to, int64_t step, float*) {
    for (int64_t d = 0; d < width; d++) to[d * step] = narrow<T>(x[d]);
}
CLONES float quantise(const float* x, int64_t width, int8_t* to) {  // returns the scale
    float least = 0, most = 0;
    widen_range(x, width, least, most);
    most = std::max(most, -least);
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    for (int64_t d = 0; d < width; d++) to[d] = static_cast<int8_t>(nearest(x[d] * inverse));
    return most / 127.0f;
}
void store(const float* x, int64_t width, int8_t* to, int64_t step, float* scale) {
    int8_t row[kMostWidth];
    *scale = quantise(x, width, row);
    for (int64_t d = 0; d < width; d++) to[d * step] = row[d];
}

template <class F>
void with_cache_type(Type type, F&& f) {
    if (type == Type::i8) return f(int8_t{});
    with_type(type, f);
}

}  // namespace

void WriteKv::run(Context& context) const {
    with_cache_type(type, [&](auto example) {
        using T = decltype(example);
        context.pool.each(static_cast<int>(tokens), [&](int t, int) {
            const int64_t page = slots[t] / page_size, offset = slots[t] % page_size;
            for (int64_t h = 0; h < heads; h++) {
                const auto piece = [&](void* cache) {
                    return piece_of<T>(cache, page * heads + h, width * page_size, page_size);
                };
                const Piece<T> keys = piece(k_cache), values = piece(v_cache);
                store(k + t * k_stride + h * width, width, const_cast<T*>(keys.elements) + offset, page_size,
                      const_cast<float*>(keys.scales) + offset);
                store(v + t * v_stride + h * width, width, const_cast<T*>(values.elements) + offset * width, 1,
                      const_cast<float*>(values.scales) + offset);
            }
        });
    });
}

void Attention::run(Context& context) const {
    // With few tokens each is a task; with many a task takes several, which share the keys they read.
    const int64_t step = std::clamp<int64_t>(tokens * kv_heads / (context.pool.threads() * 8), 1, 8);
    with_cache_type(type, [&](auto example) {
        using T = decltype(example);
        context.pool.each(static_cast<int>((tokens + step - 1) / step * kv_heads), [&](int task, int) {
            const int64_t end = std::min(tokens, (task / kv_heads + 1) * step);
            for (int64_t token = task / kv_heads * step, count; token < end; token += count) {
                const int64_t* next = std::upper_bound(query_starts, query_starts + sequences + 1, token);
                count = std::min(end, *next) - token;
                attend<T>(*this, next - query_starts - 1, token, count, task % kv_heads);
            }
        });
    });
}

}  // namespace umbra
