// Ops whose cost is small beside the matrix products: plain loops that the compiler vectorises for each of three
// instruction sets. Sums run in 16 lanes, in the same order in every set.

#include "kernels/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/ops.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

__attribute__((always_inline)) inline void scale_row(const float* x, const float* weight, float* out, int64_t width,
                                                     float mean_square, float eps) {
    const float scale = 1.0f / std::sqrt(mean_square + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

CLONES void norm_row(const float* x, const float* residual, const float* weight, const float* bias, float* out,
                     float* total, int64_t width, float eps) {
    for (int64_t i = 0; i < width; i++) {
        const float v = residual ? x[i] + residual[i] : x[i];
        if (total) total[i] = v;
        out[i] = v;
    }
    scale_row(out, weight, out, width, dot(out, out, width) / static_cast<float>(width), eps);
    for (int64_t i = 0; bias && i < width; i++) out[i] += bias[i];
}

CLONES void square_row(const float* x, float* square, int64_t width) { *square = dot(x, x, width); }

CLONES void scale_by_square(const float* x, const float* weight, float* out, int64_t width, float mean_square,
                            float eps) {
    scale_row(x, weight, out, width, mean_square, eps);
}

CLONES void gated_norm_row(const float* x, const float* gate, const float* weight, float* out, int64_t width, float eps,
                           bool sigmoid) {
    scale_row(x, weight, out, width, dot(x, x, width) / static_cast<float>(width), eps);
    if (sigmoid)
        for (int64_t i = 0; i < width; i++) out[i] /= 1.0f + fast_exp(-gate[i]);
    else
        for (int64_t i = 0; i < width; i++) out[i] *= gate[i] / (1.0f + fast_exp(-gate[i]));
}

CLONES void sigmoid_mul_row(float* x, const float* gate, int64_t width) {
    for (int64_t i = 0; i < width; i++) x[i] /= 1.0f + fast_exp(-gate[i]);
}

CLONES void rope_row(const float* x, const float* cos, const float* sin, float* out, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    }
}

CLONES void silu_mul_row(const float* gate, const float* up, float* out, int64_t width) {
    for (int64_t i = 0; i < width; i++) out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
}

// 0.5 g (1 + tanh u) is g * sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3).
CLONES void gelu_mul_row(const float* gate, const float* up, float* out, int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        const float g = gate[i], u = -1.5957691216f * g * (1.0f + 0.044715f * g * g);
        out[i] = g / (1.0f + fast_exp(u)) * up[i];
    }
}

CLONES void softcap_row(float* x, float cap, int64_t width) {
    for (int64_t i = 0; i < width; i++) x[i] = cap - 2.0f * cap / (1.0f + fast_exp(x[i] * (2.0f / cap)));
}

CLONES void scale_by_row(float* x, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) x[i] *= factor;
}

CLONES void clipped_swiglu_row(const float* gate, const float* up, float limit, float alpha, float* out,
                               int64_t width) {
    for (int64_t i = 0; i < width; i++) {
        const float g = gate[i] > limit ? limit : gate[i];
        float u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        out[i] = (u + 1.0f) * g / (1.0f + fast_exp(-alpha * g));
    }
}

CLONES void add_row(float* x, const float* y, float factor, int64_t width) {
    for (int64_t i = 0; i < width; i++) x[i] += factor * y[i];
}

template <class Load>
void widen_row(const Load* from, float* to, int64_t width) {
    for (int64_t i = 0; i < width; i++) to[i] = widen(from[i]);
}

}  // namespace

CLONES void normalise(const float* x, const float* weight, float* out, int64_t width, float eps) {
    scale_row(x, weight, out, width, dot(x, x, width) / static_cast<float>(width), eps);
}

void silu_mul(const float* gate, const float* up, float* out, int64_t width) { silu_mul_row(gate, up, out, width); }

void gelu_mul(const float* gate, const float* up, float* out, int64_t width) { gelu_mul_row(gate, up, out, width); }

void clipped_swiglu(const float* gate, const float* up, float limit, float alpha, float* out, int64_t width) {
    clipped_swiglu_row(gate, up, limit, alpha, out, width);
}

CLONES float largest(const float* x, int64_t count) {
    float least = x[0], most = x[0];
    widen_range(x, count, least, most);
    return most;
}

CLONES int64_t first_largest(const float* x, int64_t count) {
    const float most = largest(x, count);
    for (int64_t i = 0; i < count; i++)
        if (x[i] == most) return i;
    return 0;
}

void Embedding::run(Context& context) const {
    with_type(type, [&](auto example) {
        using T = decltype(example);
        for_rows(context, tokens, hidden, [&](int64_t t) {
            const int64_t row = ids[t] - first_id;
            float* to = out + t * hidden;
            if (row < 0 || row >= vocabulary)
                std::memset(to, 0, hidden * sizeof(float));
            else
                widen_row(static_cast<const T*>(table) + row * hidden, to, hidden);
        });
    });
}

void RmsNorm::run(Context& context) const {
    for_rows(context, tokens * heads, width, [&](int64_t i) {
        const int64_t from = i / heads * stride + i % heads * width, to = i * width;
        norm_row(x + from, residual ? residual + to : nullptr, weight, bias, out + to, total ? total + to : nullptr,
                 width, eps);
    });
}

void GatedRmsNorm::run(Context& context) const {
    for_rows(context, tokens * heads, width, [&](int64_t i) {
        const float* of = gate + i / heads * stride + i % heads * width;
        gated_norm_row(x + i * width, of, weight, out + i * width, width, eps, sigmoid);
    });
}

void SquareSums::run(Context& context) const {
    for_rows(context, tokens, width, [&](int64_t t) { square_row(x + t * stride, squares + t, width); });
}

void ScaleBySquares::run(Context& context) const {
    for_rows(context, tokens, width, [&](int64_t t) {
        scale_by_square(x + t * stride, weight, out + t * width, width, squares[t] / static_cast<float>(count), eps);
    });
}

void Rope::run(Context& context) const {
    for_rows(context, tokens * heads, width, [&](int64_t i) {
        const int64_t t = i / heads;
        rope_row(x + t * stride + i % heads * width, cos + t * width, sin + t * width, out + i * width, width);
    });
}

void SiluMul::run(Context& context) const {
    for_rows(context, tokens, width,
             [&](int64_t t) { silu_mul_row(x + t * 2 * width, x + t * 2 * width + width, out + t * width, width); });
}

void GeluMul::run(Context& context) const {
    for_rows(context, tokens, width,
             [&](int64_t t) { gelu_mul_row(gate + t * gate_stride, up + t * up_stride, out + t * width, width); });
}

// Rows may be as wide as a vocabulary, so tasks are parts of them.
constexpr int64_t kPart = 4096;

void Softcap::run(Context& context) const {
    for_rows(context, (count + kPart - 1) / kPart, kPart,
             [&](int64_t part) { softcap_row(x + part * kPart, cap, std::min(kPart, count - part * kPart)); });
}

void ScaleBy::run(Context& context) const {
    for_rows(context, (count + kPart - 1) / kPart, kPart,
             [&](int64_t part) { scale_by_row(x + part * kPart, *factor, std::min(kPart, count - part * kPart)); });
}

void SigmoidMul::run(Context& context) const {
    for_rows(context, tokens, width, [&](int64_t t) { sigmoid_mul_row(x + t * width, gate + t * stride, width); });
}

void AddGated::run(Context& context) const {
    for_rows(context, tokens, width, [&](int64_t t) {
        const float factor = gate ? 1.0f / (1.0f + std::exp(-gate[t])) : 1.0f;
        add_row(x + t * width, y + t * width, factor, width);
    });
}

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Writes -infinity to the scores p (groups, each) of all groups but the `kept` best, of equal ones the first.
void keep_groups(float* p, int64_t each, int64_t groups, int64_t kept, int64_t best) {
    float scores[Route::kMostGroups];
    bool keeps[Route::kMostGroups] = {};
    for (int64_t g = 0; g < groups; g++) {
        float first = kNone, second = kNone;
        for (const float* at = p + g * each; at < p + (g + 1) * each; at++) {
            second = std::max(second, std::min(first, *at));
            first = std::max(first, *at);
        }
        scores[g] = best > 1 ? first + second : first;
    }
    for (int64_t i = 0; i < kept; i++) {
        const int64_t g = std::max_element(scores, scores + groups) - scores;
        keeps[g] = true;
        scores[g] = kNone;
    }
    for (int64_t g = 0; g < groups; g++)
        if (!keeps[g]) std::fill_n(p + g * each, each, kNone);
}

}  // namespace

void Route::run(Context& context) const {
    for_rows(context, tokens, experts * k, [&](int64_t t) {
        const float* row = logits + t * experts;
        float* p = scratch + t * experts;
        const float most = sigmoid ? 0 : *std::max_element(row, row + experts);
        const auto logistic = [&](int64_t e) { return 1.0f / (1.0f + std::exp(-row[e])); };
        float total = 0;
        for (int64_t e = 0; e < experts; e++)
            total += p[e] = sigmoid ? logistic(e) + (bias ? bias[e] : 0.0f) : std::exp(row[e] - most);
        if (kept_groups < groups) keep_groups(p, experts / groups, groups, kept_groups, best);
        float chosen = 0;
        for (int64_t j = 0; j < k; j++) {  // k is small: take the largest k times, the first among equals
            const int64_t e = std::max_element(p, p + experts) - p;
            ids[t * k + j] = e;
            chosen += weights[t * k + j] = sigmoid ? logistic(e) : p[e] / total;
            p[e] = kNone;
        }
        const float divisor = renormalise ? chosen : 1.0f;
        for (int64_t j = 0; j < k; j++)
            weights[t * k + j] = weights[t * k + j] / divisor * scale * (factors ? factors[ids[t * k + j]] : 1.0f);
    });
}

void Argmax::run(Context& context) const {
    const int64_t each = chunks(width);
    context.pool.each(static_cast<int>(rows * each), [&](int task, int) {
        const float* row = x + task / each * width;
        const int64_t begin = task % each * kChunk, end = std::min(width, begin + kChunk);
        best[task] = static_cast<int32_t>(first_largest(row + begin, end - begin) + begin);
    });
    for (int64_t r = 0; r < rows; r++) {
        int64_t place = best[r * each];
        for (int64_t c = 1; c < each; c++)
            if (x[r * width + best[r * each + c]] > x[r * width + place]) place = best[r * each + c];
        out[r] = place;
    }
}

}  // namespace umbra
