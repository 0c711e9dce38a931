// Parts of the elementwise ops that other kernels use.
#pragma once

#include <cstdint>

namespace umbra {

constexpr int64_t kWorthSharing = 1 << 15;  // elements below which waking the pool costs more than it saves

// silu(gate) * up, `width` of each.
void silu_mul(const float* gate, const float* up, float* out, int64_t width);

// (up + 1) * gate * sigmoid(alpha * gate) of gates that are at most `limit` and ups between -limit and limit.
void clipped_swiglu(const float* gate, const float* up, float limit, float alpha, float* out, int64_t width);

// The largest of `count` >= 1 elements; NaN if the first one is.
float largest(const float* x, int64_t count);

// The index of the first largest of `count` >= 1 elements; 0 if every one is NaN.
int64_t first_largest(const float* x, int64_t count);

}  // namespace umbra
