// Causal attention over a paged cache, with online softmax (arXiv 1805.02867): one pass over the keys, page by page,
// keeping for each query head the running maximum m, the running sum of exp(score - m), and the weighted sum of values,
// both rescaled when m grows. A task is one (token, KV head): its query heads share every key and value that is read.
// A page's keys are used while they are in the first cache, so each cached byte is read from memory once a token.

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace umbra {
namespace {

constexpr int kTile = 64;  // keys scored before their values are used

CLONES float dot(const float* a, const float* b, int64_t width) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += a[i + l] * b[i + l];
    float sum = add_lanes(lanes);
    for (; i < width; i++) sum += a[i] * b[i];
    return sum;
}

CLONES float dot(const float* a, const Bf16* b, int64_t width) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += a[i + l] * widen(b[i + l]);
    float sum = add_lanes(lanes);
    for (; i < width; i++) sum += a[i] * widen(b[i]);
    return sum;
}

CLONES float dot(const float* a, const F16* b, int64_t width) {
    float sum = 0;
    for (int64_t i = 0; i < width; i++) sum += a[i] * widen(b[i]);
    return sum;
}

CLONES void add_scaled(float* to, float weight, const float* from, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] += weight * from[i];
}
CLONES void add_scaled(float* to, float weight, const Bf16* from, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] += weight * widen(from[i]);
}
CLONES void add_scaled(float* to, float weight, const F16* from, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] += weight * widen(from[i]);
}

CLONES void scale_by(float* to, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] *= factor;
}

}  // namespace

template <class T>
static void attend(const Attention& a, int64_t sequence, int64_t token, int64_t kv_head) {
    const int64_t group = a.heads / a.kv_heads, row = a.kv_heads * a.width;
    // The query is the token at this position; it sees itself and all before.
    const int64_t position = a.kv_lens[sequence] - (a.query_starts[sequence + 1] - token);
    const int64_t* pages = a.block_tables + sequence * a.most_pages;
    const T* keys = static_cast<const T*>(a.k_cache) + kv_head * a.width;
    const T* values = static_cast<const T*>(a.v_cache) + kv_head * a.width;
    const float* q = a.q + (token * a.heads + kv_head * group) * a.width;
    float* out = a.out + (token * a.heads + kv_head * group) * a.width;
    float scores[kTile];
    int64_t slots[kTile];
    for (int64_t h = 0; h < group; h++) {
        float* sum = out + h * a.width;
        std::fill(sum, sum + a.width, 0.0f);
        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for (int64_t start = 0; start <= position; start += kTile) {
            const int64_t count = std::min<int64_t>(kTile, position + 1 - start);
            float tile_most = most;
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = start + i;
                slots[i] = (pages[at / a.page_size] * a.page_size + at % a.page_size) * row;
                scores[i] = a.scale * dot(q + h * a.width, keys + slots[i], a.width);
                tile_most = std::max(tile_most, scores[i]);
            }
            if (tile_most > most) {
                const float factor = std::exp(most - tile_most);
                total *= factor;
                scale_by(sum, factor, a.width);
                most = tile_most;
            }
            for (int64_t i = 0; i < count; i++) {
                const float weight = std::exp(scores[i] - most);
                total += weight;
                add_scaled(sum, weight, values + slots[i], a.width);
            }
        }
        scale_by(sum, 1.0f / total, a.width);
    }
}

void Attention::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        context.pool.each(static_cast<int>(tokens * kv_heads), [&](int task, int) {
            const int64_t token = task / kv_heads;
            const int64_t sequence = std::upper_bound(query_starts, query_starts + sequences + 1, token) - query_starts - 1;
            attend<T>(*this, sequence, token, task % kv_heads);
        });
    });
}

}  // namespace umbra
