// Parts of the elementwise ops that other kernels use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"

namespace umbra {

constexpr int64_t kWorthSharing = 1 << 15;  // elements below which waking the pool costs more than it saves

// Calls f(row) for rows of `width` elements, shared over the pool if there are enough elements.
template <class F>
void for_rows(Context& context, int64_t rows, int64_t width, F&& f) {
    if (rows * width < kWorthSharing) {
        for (int64_t i = 0; i < rows; i++) f(i);
        return;
    }
    const int64_t chunk = std::max<int64_t>(1, 4096 / width);
    context.pool.each(static_cast<int>((rows + chunk - 1) / chunk), [&](int task, int) {
        for (int64_t i = task * chunk; i < std::min(rows, (task + 1) * chunk); i++) f(i);
    });
}

// x / sqrt(mean(x^2) + eps) * weight; `out` may be x.
void normalise(const float* x, const float* weight, float* out, int64_t width, float eps);

// silu(gate) * up, `width` of each.
void silu_mul(const float* gate, const float* up, float* out, int64_t width);

// gelu(gate) * up, `width` of each, with GELU's approximation by tanh.
void gelu_mul(const float* gate, const float* up, float* out, int64_t width);

// (up + 1) * gate * sigmoid(alpha * gate) of gates that are at most `limit` and ups between -limit and limit.
void clipped_swiglu(const float* gate, const float* up, float limit, float alpha, float* out, int64_t width);

// The largest of `count` >= 1 elements; NaN if the first one is.
float largest(const float* x, int64_t count);

// The index of the first largest of `count` >= 1 elements; 0 if every one is NaN.
int64_t first_largest(const float* x, int64_t count);

}  // namespace umbra
