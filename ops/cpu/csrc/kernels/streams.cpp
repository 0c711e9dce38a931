// Residual streams in plain loops, as elementwise.cpp has them: sums run in 16 lanes, in the same order in every set.

#include "kernels/streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

CLONES void silu_row(const float* x, float* out, int64_t width, float factor) {
    for (int64_t i = 0; i < width; i++) {
        const float v = x[i] * factor;
        out[i] = v / (1.0f + fast_exp(-v));
    }
}

CLONES void gated_read_row(const float* gates, const float* normed, float* out, int64_t hidden, int64_t streams) {
    for (int64_t s = 0; s < streams; s++, gates += hidden, normed += hidden)
        for (int64_t i = 0; i < hidden; i++) {
            const float v = normed[i] / (1.0f + fast_exp(-gates[i]));
            out[i] = s ? out[i] + v : v;
        }
    const float share = 1.0f / static_cast<float>(streams);
    for (int64_t i = 0; i < hidden; i++) out[i] *= share;
}

CLONES void add_scaled_row(float* x, const float* y, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) x[i] += factor * y[i];
}

CLONES void products(const float* x, const float* fn, float* out, int64_t rows, int64_t width, float eps) {
    const float scale = 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
    for (int64_t r = 0; r < rows; r++) out[r] = dot(x, fn + r * width, width) * scale;
}

CLONES void mix_row(float* x, const float* y, const float* post, const float* comb, int64_t hidden, int64_t streams) {
    for (int64_t i = 0; i < hidden; i++) {
        float before[kMostStreams];
        for (int64_t s = 0; s < streams; s++) before[s] = x[s * hidden + i];
        for (int64_t k = 0; k < streams; k++) {
            float sum = post[k] * y[i];
            for (int64_t j = 0; j < streams; j++) sum += comb[j * streams + k] * before[j];
            x[k * hidden + i] = sum;
        }
    }
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides the elements of each row, or of each column, of `comb` by their sum plus `margin`.
void divide(float* comb, int64_t count, bool rows, float margin) {
    const int64_t line = rows ? count : 1, step = rows ? 1 : count;
    for (int64_t i = 0; i < count; i++) {
        float sum = margin;
        for (int64_t j = 0; j < count; j++) sum += comb[i * line + j * step];
        for (int64_t j = 0; j < count; j++) comb[i * line + j * step] /= sum;
    }
}

}  // namespace

void StreamNorm::run(Context& context) const {
    for_rows(context, tokens * streams, hidden, [&](int64_t i) {
        normalise(x + i * hidden, weight + i % streams * hidden, out + i * hidden, hidden, eps);
    });
}

void Spread::run(Context& context) const {
    for_rows(context, tokens * streams, hidden,
             [&](int64_t i) { std::memcpy(out + i * hidden, x + i / streams * hidden, hidden * sizeof(float)); });
}

void ScaledSilu::run(Context& context) const {
    for_rows(context, tokens, width, [&](int64_t t) { silu_row(x + t * stride, out + t * width, width, factor); });
}

void GatedRead::run(Context& context) const {
    const int64_t wide = streams * hidden;
    for_rows(context, tokens, wide, [&](int64_t t) {
        gated_read_row(gates + t * wide, normed + t * wide, out + t * hidden, hidden, streams);
    });
}

void GatedWrite::run(Context& context) const {
    for_rows(context, tokens * streams, hidden, [&](int64_t i) {
        const int64_t t = i / streams;
        const float weight = 2.0f * sigmoid(logits[t * stride + i % streams] / static_cast<float>(streams));
        add_scaled_row(x + i * hidden, y + t * hidden, weight, hidden);
    });
}

void SinkhornRead::run(Context& context) const {
    const int64_t wide = streams * hidden, rows = (2 + streams) * streams;
    for_rows(context, tokens, rows * wide, [&](int64_t t) {
        float f[(2 + kMostStreams) * kMostStreams];
        products(x + t * wide, fn, f, rows, wide, eps);
        for (int64_t r = 0; r < rows; r++) f[r] = f[r] * scale[std::min<int64_t>(r / streams, 2)] + base[r];
        float *own = comb + t * streams * streams, *to = out + t * hidden;
        std::memset(to, 0, hidden * sizeof(float));
        for (int64_t s = 0; s < streams; s++) {
            add_scaled_row(to, x + t * wide + s * hidden, sigmoid(f[s]) + margin, hidden);
            post[t * streams + s] = 2.0f * sigmoid(f[streams + s]);
            const float* row = f + (2 + s) * streams;
            const float most = *std::max_element(row, row + streams);
            float sum = 0;
            for (int64_t j = 0; j < streams; j++) sum += own[s * streams + j] = std::exp(row[j] - most);
            for (int64_t j = 0; j < streams; j++) own[s * streams + j] = own[s * streams + j] / sum + margin;
        }
        divide(own, streams, false, margin);
        for (int64_t step = 1; step < steps; step++)
            divide(own, streams, true, margin), divide(own, streams, false, margin);
    });
}

void SinkhornWrite::run(Context& context) const {
    const int64_t wide = streams * hidden;
    for_rows(context, tokens, wide, [&](int64_t t) {
        mix_row(x + t * wide, y + t * hidden, post + t * streams, comb + t * streams * streams, hidden, streams);
    });
}

}  // namespace umbra
