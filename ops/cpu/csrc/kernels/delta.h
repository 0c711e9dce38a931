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

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

// One row of N vectors of columns. The first pass reads the old state S for both sums, since the new one's products
// follow: with d = beta (v - e^g S^T k), the new state is e^g S + k d^T and the output e^g S^T q + d (k . q).
template <class V, int N>
ALWAYS_INLINE void step(const float* from, float* to, int64_t depth, int64_t slab, const float* q, const float* k,
                        const float* v, float product, float decay, float beta, float* out) {
    constexpr int64_t kWide = sizeof(V) / sizeof(float);
    V by_k[N] = {}, by_q[N] = {}, d[N];
    for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            V s;
            std::memcpy(&s, from + i * slab + n * kWide, sizeof s);
            by_k[n] += s * k[i];
            by_q[n] += s * q[i];
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
        V value;
        std::memcpy(&value, v + n * kWide, sizeof value);
        d[n] = beta * (value - decay * by_k[n]);
        const V o = decay * by_q[n] + d[n] * product;
        std::memcpy(out + n * kWide, &o, sizeof o);
    }
    for (int64_t i = 0; i < depth; i++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            V s;
            std::memcpy(&s, from + i * slab + n * kWide, sizeof s);
            s = s * decay + d[n] * k[i];
            std::memcpy(to + i * slab + n * kWide, &s, sizeof s);
        }
}

template <class V, int kSlab>
ALWAYS_INLINE void run_slab_of(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    constexpr int kWide = sizeof(V) / sizeof(float), kAtOnce = kSlab / kWide < 4 ? kSlab / kWide : 4;
    const Places& places = op.places;
    const int64_t keys = op.key_heads * op.depth, all = 2 * keys + op.heads * op.width;
    const int64_t key_head = head / (op.heads / op.key_heads), factors = op.key_heads + 2 * op.heads;
    float* states = op.states + (head * op.width + column) * op.depth;
    alignas(64) float unkept[kMostWidth * kSlab];
    const int32_t read = places.reads[sequence], write = places.writes[sequence];
    const float* from = read < 0 ? kZeroSlab : states + read * op.place;
    float* to = write < 0 ? unkept : states + write * op.place;
    const int64_t first = places.starts[sequence], end = places.starts[sequence + 1];
    const int64_t pending = first < end ? places.pending[sequence] : 0;
    alignas(64) float unseen[kSlab];  // outputs of pending rows
    for (int64_t t = first - pending; t < end; t++, from = to) {
        const bool is_new = t >= first;
        const float *rows = is_new ? op.qkv + t * all + keys
                                   : op.inputs + read * op.place + (t - first + pending) * op.kept(),
                    *k = rows + key_head * op.depth, *q = is_new ? k - keys : k;
        const float* v = rows + keys + head * op.width + column;
        const float *f = op.factors + std::max<int64_t>(t, 0) * factors,
                    *decays = is_new ? f + op.key_heads : rows + keys + op.heads * op.width;
        float* out = is_new ? op.out + (t * op.heads + head) * op.width + column : unseen;
        const float product = is_new ? f[key_head] : 0.0f;
        for (int64_t c = 0; c < kSlab; c += kAtOnce * kWide)
            step<V, kAtOnce>(from + c, to + c, op.depth, kSlab, q, k, v + c, product, decays[head],
                             decays[op.heads + head], out + c);
        if (t - first + pending + 1 == places.marks[sequence])
            std::memcpy(states + places.marked[sequence] * op.place, to, op.depth * kSlab * sizeof(float));
    }
}

template <class V>
ALWAYS_INLINE void run_slab(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    if (GatedDelta::slab(op.width) == kMostSlab)
        run_slab_of<V, kMostSlab>(op, sequence, head, column);
    else
        run_slab_of<V, kMostSlab / 2>(op, sequence, head, column);
}

}  // namespace
}  // namespace umbra
