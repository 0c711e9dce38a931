#include "kernels/selected.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention.h"
#include "kernels/elementwise.h"

namespace umbra {
namespace {

constexpr int64_t kScored = 1024;  // blocks of a task of scores
constexpr float kLeast = -std::numeric_limits<float>::infinity();

CLONES void rotate_row(const float* x, const float* cos, const float* sin, float* out, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[half + i];
        out[i] = first * cos[i] - second * sin[i];
        out[half + i] = second * cos[i] + first * sin[i];
    }
}

// The angles of `back` positions before those of cos and sin.
CLONES void turn_back(const float* cos, const float* sin, const float* back_cos, const float* back_sin, int64_t count,
                      float* to_cos, float* to_sin) {
    for (int64_t i = 0; i < count; i++) {
        to_cos[i] = cos[i] * back_cos[i] + sin[i] * back_sin[i];
        to_sin[i] = sin[i] * back_cos[i] - cos[i] * back_sin[i];
    }
}

// A row as floats: in place, or in `room`.
inline const float* floats_of(const float* row, int64_t, float*) { return row; }
template <class T>
const float* floats_of(const T* row, int64_t count, float* room) {
    widen_all(row, count, room);
    return room;
}

template <class T>
void store_row(const float* x, int64_t width, T* to) {
    for (int64_t i = 0; i < width; i++) to[i] = narrow<T>(x[i]);
}

CLONES void products(const float* q, int64_t heads, const float* row, int64_t width, float* out, int64_t stride) {
    for (int64_t h = 0; h < heads; h++) out[h * stride] = dot(q + h * width, row, width);
}

// The sum over heads of relu(q . row), each times its weight if there are weights.
CLONES float indexed(const float* q, const float* weights, int64_t heads, const float* row, int64_t width) {
    float sum = 0;
    for (int64_t h = 0; h < heads; h++) {
        const float score = std::max(dot(q + h * width, row, width), 0.0f);
        sum += weights ? weights[h] * score : score;
    }
    return sum == sum ? sum : kLeast;
}

CLONES float weigh(float* scores, int64_t count, float scale, float& most) {
    for (int64_t i = 0; i < count; i++) scores[i] *= scale;
    float least = scores[0];
    most = scores[0];
    widen_range(scores, count, least, most);
    float lanes[kLanes] = {}, sum = 0;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += scores[i + l] = fast_exp(scores[i + l] - most);
    for (; i < count; i++) sum += scores[i] = fast_exp(scores[i] - most);
    return sum + add_lanes(lanes);
}

CLONES void add_row(const float* weights, int64_t stride, int64_t heads, const float* row, int64_t width, float* sums) {
    for (int64_t h = 0; h < heads; h++) {
        const float weight = weights[h * stride];
        for (int64_t i = 0; i < width; i++) sums[h * width + i] += weight * row[i];
    }
}

CLONES void divide_row(const float* sums, float total, float* out, int64_t width) {
    for (int64_t i = 0; i < width; i++) out[i] = sums[i] / total;
}

// A token's sequence, and the tokens that it sees, its own included; none if it is padding behind all sequences.
struct Query {
    int64_t sequence, seen;
};
template <class Op>
Query query_of(const Op& op, int64_t token) {
    const int64_t* end = std::upper_bound(op.query_starts, op.query_starts + op.sequences + 1, token);
    const int64_t sequence = end - op.query_starts - 1;
    if (sequence >= op.sequences) return {0, 0};
    return {sequence, op.kv_lens[sequence] - op.query_starts[sequence + 1] + token + 1};
}

}  // namespace

void NormRotate::run(Context& context) const {
    for_rows(context, tokens * heads, width, [&](int64_t i) {
        const int64_t t = i / heads;
        float* to = out + i * width;
        normalise(x + t * stride + i % heads * width, weight, to, width, eps);
        rotate_row(to, cos + t * angle_stride, sin + t * angle_stride, to, width);
    });
}

void WriteRows::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        for_rows(context, tokens, heads * width, [&](int64_t t) {
            for (int64_t h = 0; h < heads; h++) {
                const int64_t row = (slots[t] / page_size * heads + h) * page_size + slots[t] % page_size;
                store_row(k + t * k_stride + h * width, width, static_cast<T*>(k_cache) + row * width);
                store_row(v + t * v_stride + h * width, width, static_cast<T*>(v_cache) + row * width);
            }
        });
    });
}

void WriteIndex::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        const int64_t rows = page_size + page_size / ratio;
        const auto page = [&](int64_t t) { return static_cast<T*>(cache) + slots[t] / page_size * rows * width; };
        for_rows(context, tokens, width,
                 [&](int64_t t) { store_row(keys + t * stride, width, page(t) + slots[t] % page_size * width); });
        // Only now: a block may have several of the step's tokens.
        for_rows(context, tokens, width, [&](int64_t t) {
            const int64_t offset = slots[t] % page_size;
            if (offset % ratio != ratio - 1) return;
            float sum[kMostWidth] = {}, room[kMostWidth], angles[2][kMostWidth / 2];
            for (int64_t i = offset - ratio + 1; i <= offset; i++) {
                const float *row = floats_of(page(t) + i * width, width, room), one = 1.0f;
                add_row(&one, 0, 1, row, width, sum);
            }
            for (int64_t i = 0; i < width; i++) sum[i] = widen(narrow<T>(sum[i] / static_cast<float>(ratio)));
            normalise(sum, weight, sum, width, eps);
            turn_back(cos + t * angle_stride, sin + t * angle_stride, back_cos, back_sin, width / 2, angles[0],
                      angles[1]);
            rotate_row(sum, angles[0], angles[1], sum, width);
            store_row(sum, width, page(t) + (page_size + offset / ratio) * width);
        });
    });
}

void ChooseBlocks::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        const int64_t per_page = page_size / ratio, rows = page_size + per_page, most = most_blocks();
        for (int64_t first = 0; first < tokens; first += kTogether) {
            const int64_t count = std::min(kTogether, tokens - first);
            int64_t complete[kTogether], sequence[kTogether], longest = 0;
            for (int64_t i = 0; i < count; i++) {
                const Query query = query_of(*this, first + i);
                complete[i] = query.seen / ratio, sequence[i] = query.sequence;
                if (complete[i] > top) longest = std::max(longest, complete[i]);
            }
            const int64_t parts = (longest + kScored - 1) / kScored;
            if (parts)
                context.pool.each(static_cast<int>(count * parts), [&](int task, int) {
                    const int64_t i = task / parts, begin = task % parts * kScored, t = first + i;
                    const int64_t end = complete[i] > top ? std::min(complete[i], begin + kScored) : 0;
                    const int64_t* pages = block_tables + sequence[i] * most_pages;
                    float room[kMostWidth];
                    for (int64_t block = begin; block < end; block++) {
                        const T* page = static_cast<const T*>(cache) + pages[block / per_page] * rows * width;
                        const float* row = floats_of(page + (page_size + block % per_page) * width, width, room);
                        scores[i * most + block] =
                            indexed(q + t * heads * width, weights ? weights + t * heads : nullptr, heads, row, width);
                    }
                });
            context.pool.each(static_cast<int>(count), [&](int i, int) {
                int32_t* to = out + (first + i) * top;
                const int64_t kept = std::min(complete[i], top);
                std::fill(to + kept, to + top, -1);
                if (complete[i] <= top) {
                    for (int64_t j = 0; j < kept; j++) to[j] = static_cast<int32_t>(j);
                    return;
                }
                int32_t* own = order + i * most;
                const float* by = scores + i * most;
                for (int64_t j = 0; j < complete[i]; j++) own[j] = static_cast<int32_t>(j);
                std::nth_element(own, own + kept - 1, own + complete[i],
                                 [&](int32_t a, int32_t b) { return by[a] > by[b] || (by[a] == by[b] && a < b); });
                std::sort(own, own + kept);
                std::copy_n(own, kept, to);
            });
        }
    });
}

void SelectedAttention::run(Context& context) const {
    if (tokens == 0) return;
    const int64_t group = heads / kv_heads, cuts = (group + kMostHeads - 1) / kMostHeads;
    const int64_t sections = std::max<int64_t>(1, (top + kSection - 1) / kSection), record = width + 2;
    const int64_t tasks = tokens * kv_heads * cuts;
    const bool split = context.pool.threads() > 1 && sections > 1 && tasks < 4 * context.pool.threads() &&
                       tasks * sections * std::min(kMostHeads, group) * record <= context.room.floats;
    // The sums, peak and total of a section, of `count` heads from the first of a task on; the tail is the first's.
    const auto compute = [&](auto example, int64_t task, int64_t section, float* sums, float* peaks, float* totals) {
        using T = decltype(example);
        const int64_t t = task / (kv_heads * cuts), kv_head = task / cuts % kv_heads, from = task % cuts * kMostHeads;
        const int64_t count = std::min(kMostHeads, group - from);
        const Query query = query_of(*this, t);
        const int64_t* pages = block_tables + query.sequence * most_pages;
        const T *rows_k[(kSection + 1) * kMostRatio], *rows_v[(kSection + 1) * kMostRatio];
        int64_t rows = 0;
        const auto add = [&](int64_t position) {
            const int64_t row = (pages[position / page_size] * kv_heads + kv_head) * page_size + position % page_size;
            rows_k[rows] = static_cast<const T*>(k_cache) + row * width;
            rows_v[rows++] = static_cast<const T*>(v_cache) + row * width;
        };
        const int32_t* own = blocks + t * top;
        for (int64_t j = section * kSection; j < std::min(top, (section + 1) * kSection) && own[j] >= 0; j++)
            for (int64_t i = 0; i < ratio; i++) add(own[j] * ratio + i);
        if (section == 0)
            for (int64_t i = query.seen / ratio * ratio; i < query.seen; i++) add(i);
        std::memset(sums, 0, count * width * sizeof(float));
        for (int64_t h = 0; h < count; h++) peaks[h] = kLeast, totals[h] = 0;
        if (!rows) return;
        constexpr int64_t kRows = (kSection + 1) * kMostRatio;
        float scores[kMostHeads * kRows], room[kMostWidth];
        const float* of = q + (t * heads + kv_head * group + from) * width;
        for (int64_t r = 0; r < rows; r++)
            products(of, count, floats_of(rows_k[r], width, room), width, scores + r, kRows);
        for (int64_t h = 0; h < count; h++) totals[h] = weigh(scores + h * kRows, rows, scale, peaks[h]);
        for (int64_t r = 0; r < rows; r++)
            add_row(scores + r, kRows, count, floats_of(rows_v[r], width, room), width, sums);
    };
    const auto finish = [&](int64_t task, auto&& part) {
        const int64_t t = task / (kv_heads * cuts), kv_head = task / cuts % kv_heads, from = task % cuts * kMostHeads;
        const int64_t count = std::min(kMostHeads, group - from);
        float all[kMostHeads * kMostWidth] = {}, peaks[kMostHeads], totals[kMostHeads] = {};
        std::fill_n(peaks, kMostHeads, kLeast);
        for (int64_t section = 0; section < sections; section++) {
            const auto [sums, own_peaks, own_totals] = part(section);
            for (int64_t h = 0; h < count; h++)
                if (own_totals[h] > 0)
                    merge(width, sums + h * width, own_peaks[h], own_totals[h], all + h * width, peaks[h], totals[h]);
        }
        for (int64_t h = 0; h < count; h++) {
            float* to = out + (t * heads + kv_head * group + from + h) * width;
            if (totals[h] > 0)
                divide_row(all + h * width, totals[h], to, width);
            else
                std::memset(to, 0, width * sizeof(float));
        }
    };
    struct Part {
        const float *sums, *peaks, *totals;
    };
    with_type(type, [&](auto example) {
        if (!split) {
            context.pool.each(static_cast<int>(tasks), [&](int task, int) {
                float sums[kMostHeads * kMostWidth], peaks[kMostHeads], totals[kMostHeads];
                finish(task, [&](int64_t section) {
                    compute(example, task, section, sums, peaks, totals);
                    return Part{sums, peaks, totals};
                });
            });
            return;
        }
        // A record for each task and section: the sums of all its heads, then their peaks and totals.
        const int64_t wide = std::min(kMostHeads, group), size = wide * record;
        const auto at = [&](int64_t task, int64_t section) {
            return context.room.memory + (task * sections + section) * size;
        };
        context.pool.each(static_cast<int>(tasks * sections), [&](int i, int) {
            float* sums = at(i / sections, i % sections);
            compute(example, i / sections, i % sections, sums, sums + wide * width, sums + wide * (width + 1));
        });
        context.pool.each(static_cast<int>(tasks), [&](int task, int) {
            finish(task, [&](int64_t section) {
                const float* sums = at(task, section);
                return Part{sums, sums + wide * width, sums + wide * (width + 1)};
            });
        });
    });
}

}  // namespace umbra
