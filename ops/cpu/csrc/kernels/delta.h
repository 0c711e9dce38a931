// The gated delta rule of one slab, which every instruction set compiles for vectors of its own width.
//
// The state of a value head, (depth, width), lies in slabs of 32 columns, or 16 if the width is no multiple of 32:
// [width / slab][depth][slab]. Columns are independent of one another, so a task computes one slab for all rows of a
// sequence; the slab stays in the first cache meanwhile. Every row is one step of the recurrence, in decode and in
// prefill: results have the same bits however a sequence is cut into steps, and whatever else these compute.
//
// Everything in the inner namespace is internal to the file that includes it.
#pragma once

#include <cstring>

#include "kernels/ops.h"
#include "kernels/vector.h"

namespace umbra {

constexpr int kMostSlab = 32;
extern const float kZeroSlab[kMostWidth * kMostSlab];  // before any row

namespace {

// A row's inputs of one head and slab, and where its output goes.
struct DeltaRow {
    const float *q, *k, *v;
    const float* decays;         // of each row of the state, if they differ; `decay` is 1 then
    float product, decay, beta;  // product: k . q
    float* out;
};

// Rows lie so far apart that they fall into the same few lines of the caches, and no hardware fetches them ahead.
template <bool kByRow>
ALWAYS_INLINE void prefetch(const DeltaRow& row, int64_t depth) {
    for (int64_t i = 0; i < depth; i += 16) {
        __builtin_prefetch(row.k + i), __builtin_prefetch(row.q + i);
        if (kByRow) __builtin_prefetch(row.decays + i);
    }
    __builtin_prefetch(row.v);
    __builtin_prefetch(row.v + 16);
}

// N vectors of columns, from `column` of the slab on, in all rows of a sequence, of which row(t) is the t-th. The state
// before them is `from`; to(t) gets the one after row t. With d = beta (v - e^g S^T k), a row makes e^g S + k d^T of the
// state S, and its output is e^g S^T q + d (k . q). While it writes its state, it adds up the next row's S^T k and S^T q.
// Where e^g differs by rows of the state, it multiplies k and q before these sums.
template <class V, int N, bool kByRow, class RowOf, class To>
ALWAYS_INLINE void run_columns(const float* from, int64_t depth, int64_t slab, int64_t column, int64_t rows,
                               RowOf&& row, To&& to) {
    constexpr int64_t kWide = sizeof(V) / sizeof(float);
    alignas(64) float decayed[2 * (kByRow ? kMostWidth : 1)];
    const float *k = nullptr, *q = nullptr;  // as the state before a row's decay meets them
    const auto meet = [&](const DeltaRow& of) {
        k = of.k, q = of.q;
        if constexpr (kByRow) {
            for (int64_t i = 0; i < depth; i++) decayed[i] = of.k[i] * of.decays[i];
            for (int64_t i = 0; i < depth; i++) decayed[kMostWidth + i] = of.q[i] * of.decays[i];
            k = decayed, q = decayed + kMostWidth;
        }
    };
    const auto decay_of = [](const DeltaRow& of, int64_t i) { return kByRow ? of.decays[i] : of.decay; };
    V by_k[N] = {}, by_q[N] = {}, d[N];
    DeltaRow now = row(0);
    meet(now);
    from += column;
    for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            V s;
            std::memcpy(&s, from + i * slab + n * kWide, sizeof s);
            by_k[n] += s * k[i];
            by_q[n] += s * q[i];
        }
    for (int64_t t = 0; t < rows; t++) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            V value;
            std::memcpy(&value, now.v + column + n * kWide, sizeof value);
            d[n] = now.beta * (value - now.decay * by_k[n]);
            const V o = now.decay * by_q[n] + d[n] * now.product;
            std::memcpy(now.out + column + n * kWide, &o, sizeof o);
        }
        float* written = to(t) + column;
        if (t + 1 == rows) {
            for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 4
                for (int n = 0; n < N; n++) {
                    V s;
                    std::memcpy(&s, from + i * slab + n * kWide, sizeof s);
                    s = s * decay_of(now, i) + d[n] * now.k[i];
                    std::memcpy(written + i * slab + n * kWide, &s, sizeof s);
                }
            return;
        }
        const DeltaRow next = row(t + 1);
        if (t + 2 < rows) prefetch<kByRow>(row(t + 2), depth);
        meet(next);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) by_k[n] = by_q[n] = V{};
        for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                V s;
                std::memcpy(&s, from + i * slab + n * kWide, sizeof s);
                s = s * decay_of(now, i) + d[n] * now.k[i];
                std::memcpy(written + i * slab + n * kWide, &s, sizeof s);
                by_k[n] += s * k[i];
                by_q[n] += s * q[i];
            }
        now = next, from = written;
    }
}

template <class V, int kSlab, bool kByRow>
ALWAYS_INLINE void run_slab_of(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    constexpr int kWide = sizeof(V) / sizeof(float), kAtOnce = kSlab / kWide < 4 ? kSlab / kWide : 4;
    const Places& places = op.places;
    const int64_t keys = op.key_heads * op.depth, all = 2 * keys + op.heads * op.width;
    const int64_t key_head = head / (op.heads / op.key_heads), factors = op.key_heads + op.decays + op.heads;
    float* states = op.states + (head * op.width + column) * op.depth;
    alignas(64) float unkept[kMostWidth * kSlab];
    const int32_t read = places.reads[sequence], write = places.writes[sequence];
    const float* from = read < 0 ? kZeroSlab : states + read * op.place;
    float* to = write < 0 ? unkept : states + write * op.place;
    const int64_t first = places.starts[sequence], end = places.starts[sequence + 1];
    const int64_t pending = first < end ? places.pending[sequence] : 0;
    const int64_t mark = places.marks[sequence];
    float* marked = mark ? states + places.marked[sequence] * op.place : nullptr;
    alignas(64) float unseen[kSlab];  // outputs of pending rows
    const auto row = [&](int64_t step) {
        const int64_t t = first - pending + step;
        const bool is_new = t >= first;
        const float *rows = is_new ? op.qkv + t * all + keys : op.inputs + read * op.place + step * op.kept(),
                    *k = rows + key_head * op.depth;
        const float *f = op.factors + std::max<int64_t>(t, 0) * factors,
                    *decays = is_new ? f + op.key_heads : rows + keys + op.heads * op.width;
        return DeltaRow{is_new ? k - keys : k,
                        k,
                        rows + keys + head * op.width + column,
                        kByRow ? decays + head * op.depth : nullptr,
                        is_new ? f[key_head] : 0.0f,
                        kByRow ? 1.0f : decays[head],
                        decays[op.decays + head],
                        is_new ? op.out + (t * op.heads + head) * op.width + column : unseen};
    };
    const int64_t rows = end - first + pending;
    if (!rows) return;
    for (int64_t c = 0; c < kSlab; c += kAtOnce * kWide)
        run_columns<V, kAtOnce, kByRow>(from, op.depth, kSlab, c, rows, row,
                                        [&](int64_t t) { return t + 1 == mark ? marked : to; });
    if (mark == rows && write >= 0) std::memcpy(to, marked, op.depth * kSlab * sizeof(float));
}

template <class V, bool kByRow>
ALWAYS_INLINE void run_slab_by(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    if (GatedDelta::slab(op.width) == kMostSlab)
        run_slab_of<V, kMostSlab, kByRow>(op, sequence, head, column);
    else
        run_slab_of<V, kMostSlab / 2, kByRow>(op, sequence, head, column);
}

template <class V>
ALWAYS_INLINE void run_slab(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    if (op.by_row())
        run_slab_by<V, true>(op, sequence, head, column);
    else
        run_slab_by<V, false>(op, sequence, head, column);
}

}  // namespace
}  // namespace umbra
