// The ops with states of gated DeltaNet layers (arXiv 2412.06464): a short convolution, and the gated delta rule.

#include "kernels/delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/ops.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr int64_t kChannels = 1024;  // of a task of the convolution

// out = silu(sum over taps of weight[tap] * rows[tap]); the rows of `weight` are `stride` apart.
CLONES void conv_row(const float* const* rows, const float* weight, int64_t stride, int64_t taps, float* out,
                     int64_t width) {
    std::memset(out, 0, width * sizeof(float));
    for (int64_t tap = 0; tap < taps; tap++) {
        const float *x = rows[tap], *w = weight + tap * stride;
        for (int64_t i = 0; i < width; i++) out[i] += w[i] * x[i];
    }
    for (int64_t i = 0; i < width; i++) out[i] /= 1.0f + fast_exp(-out[i]);
}

void convolve(const CausalConv& op, int64_t sequence, int64_t channel) {
    const Places& places = op.places;
    const int64_t first = places.starts[sequence], count = places.starts[sequence + 1] - first, kept = op.taps - 1;
    const int64_t width = std::min(kChannels, op.channels - channel);
    const int64_t pending = places.pending[sequence], mark = places.marks[sequence] - pending;
    const auto place = [&](int64_t index) { return op.states + index * op.place + channel; };
    // The input `row` rows after the sequence's first one; null: zeros before it began.
    const auto input = [&](int64_t row) -> const float* {
        if (row >= 0) return op.x + (first + row) * op.stride + channel;
        const int32_t read = places.reads[sequence];
        return read < 0 ? nullptr : place(read) + (kept + pending + row) * op.channels;
    };
    // Keeps the inputs before `row`, and `behind` ones from it on. The state that was read may be overwritten: each row
    // moves to an earlier one.
    const auto keep = [&](int64_t row, int64_t behind, int32_t index) {
        for (int64_t i = 0; i < kept + behind; i++) {
            float* to = place(index) + i * op.channels;
            if (const float* from = input(row - kept + i))
                std::memcpy(to, from, width * sizeof(float));
            else
                std::memset(to, 0, width * sizeof(float));
        }
    };
    for (int64_t row = 0; row < count; row++) {
        const float* rows[CausalConv::kMostTaps];
        int64_t missing = 0;
        for (int64_t tap = 0; tap < op.taps; tap++) {
            rows[tap] = input(row - kept + tap);
            missing += !rows[tap];
        }
        conv_row(rows + missing, op.weight + missing * op.channels + channel, op.channels, op.taps - missing,
                 op.out + (first + row) * op.channels + channel, width);
    }
    // Only now: the places may be the one that was read.
    if (count && places.marks[sequence])
        keep(mark, places.drafting(sequence) ? std::min(count - mark, op.ahead) : 0, places.marked[sequence]);
    if (count && places.writes[sequence] >= 0) keep(count, 0, places.writes[sequence]);
}

// e^g of each of `count` rows of a head's state.
ALWAYS_INLINE void decay_rows(const float* a, const float* bias, float rate, float lowest, float* out, int64_t count) {
    if (lowest != 0.0f) {
        for (int64_t i = 0; i < count; i++) out[i] = fast_exp(lowest / (1.0f + fast_exp(-rate * (a[i] + bias[i]))));
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const float x = a[i] + bias[i], y = fast_exp(-std::fabs(x));
        // log(1 + y) is twice the series of atanh at z, which is at most a third.
        const float z = y / (2.0f + y), square = z * z;
        float series = 1.0f / 15.0f;
        series = series * square + 1.0f / 13.0f;
        series = series * square + 1.0f / 11.0f;
        series = series * square + 1.0f / 9.0f;
        series = series * square + 1.0f / 7.0f;
        series = series * square + 1.0f / 5.0f;
        series = series * square + 1.0f / 3.0f;
        series = series * square + 1.0f;
        out[i] = fast_exp(-rate * (0.5f * (x + std::fabs(x)) + 2.0f * z * series));
    }
}

// What all slabs of a head share: queries and keys of length 1 (queries also divided by sqrt(depth)), their products,
// and of each value head e^g, by which a state decays, and beta.
CLONES void prepare(const GatedDelta& op, int64_t token) {
    const int64_t columns = op.key_heads * op.depth;
    float* q = op.qkv + token * (2 * columns + op.heads * op.width);
    float* products = op.factors + token * (op.key_heads + op.decays + op.heads);
    const float shrink = 1.0f / std::sqrt(static_cast<float>(op.depth));
    for (int64_t h = 0; h < op.key_heads; h++, q += op.depth) {
        float* k = q + columns;
        const float q_scale = shrink / std::sqrt(dot(q, q, op.depth) + 1e-6f);
        const float k_scale = 1.0f / std::sqrt(dot(k, k, op.depth) + 1e-6f);
        for (int64_t i = 0; i < op.depth; i++) q[i] *= q_scale;
        for (int64_t i = 0; i < op.depth; i++) k[i] *= k_scale;
        products[h] = dot(q, k, op.depth);
    }
    float *decays = products + op.key_heads, *betas = decays + op.decays;
    const float *a = op.a + token * op.a_stride, *b = op.b + token * op.b_stride;
    const int64_t each = op.decays / op.heads;
    for (int64_t h = 0; h < op.heads; h++) {
        if (op.by_row() || op.lowest != 0.0f) {
            decay_rows(a + h * each, op.dt_bias + h * each, op.rates[h], op.lowest, decays + h * each, each);
        } else {
            const float x = a[h] + op.dt_bias[h];
            decays[h] = std::exp(-op.rates[h] * (x > 20.0f ? x : std::log1p(std::exp(x))));
        }
        betas[h] = 1.0f / (1.0f + std::exp(-b[h]));
    }
}

// Keeps the inputs of the rows that may come to nothing, as `kept` says.
void keep_inputs(const GatedDelta& op, int64_t sequence) {
    const Places& places = op.places;
    const int64_t keys = op.key_heads * op.depth, values = op.heads * op.width;
    const int64_t first = places.starts[sequence] + places.marks[sequence] - places.pending[sequence];
    const int64_t end = std::min(places.starts[sequence + 1], first + op.ahead);
    float* to = op.inputs + places.marked[sequence] * op.place;
    for (int64_t t = first; t < end; t++, to += op.kept()) {
        const float* factors = op.factors + t * (op.key_heads + op.decays + op.heads) + op.key_heads;
        std::memcpy(to, op.qkv + t * (2 * keys + values) + keys, (keys + values) * sizeof(float));
        std::memcpy(to + keys + values, factors, (op.decays + op.heads) * sizeof(float));
    }
}

// Rows behind the last sequence's are padding.
void clear_padding(const Places& places, float* out, int64_t tokens, int64_t width) {
    const int64_t end = places.starts[places.sequences];
    std::memset(out + end * width, 0, (tokens - end) * width * sizeof(float));
}

}  // namespace

const float kZeroSlab[kMostWidth * kMostSlab] = {};

void delta_of_four(const GatedDelta& op, int64_t sequence, int64_t head, int64_t column) {
    run_slab<Four>(op, sequence, head, column);
}

void CausalConv::run(Context& context) const {
    const int64_t parts = (channels + kChannels - 1) / kChannels;
    context.pool.each(static_cast<int>(places.sequences * parts),
                      [&](int task, int) { convolve(*this, task / parts, task % parts * kChannels); });
    clear_padding(places, out, tokens, channels);
}

void GatedDelta::run(Context& context) const {
    for_rows(context, places.starts[places.sequences], 2 * key_heads * depth, [&](int64_t t) { prepare(*this, t); });
    const int64_t columns = slab(width), slabs = width / columns, each = heads * slabs;
    context.pool.each(static_cast<int>(places.sequences * each), [&](int task, int) {
        context.kernels.delta(*this, task / each, task % each / slabs, task % slabs * columns);
    });
    for (int64_t sequence = 0; sequence < places.sequences; sequence++)
        if (places.drafting(sequence)) keep_inputs(*this, sequence);
    clear_padding(places, out, tokens, heads * width);
}

}  // namespace umbra
